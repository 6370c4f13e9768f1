"""Causal attention of a ragged batch over a paged cache, and the write into that cache."""
