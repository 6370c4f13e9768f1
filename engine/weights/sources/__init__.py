"""Sources of bytes: local files, HTTP ranges and object stores, one file each."""
