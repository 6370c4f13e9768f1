"""Handles half a million tensor names by pattern, by kind and as columns, without an object for each. No torch."""
