"""What the files of a checkpoint say: headers, indexes and which files belong together, read with bounds. No torch."""
