"""Reads a checkpoint's headers and index within size limits, and decides which files belong together. No torch."""
