"""Very many names: by pattern, by kind and as columns, without an object for each. No torch."""
