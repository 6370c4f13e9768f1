"""Storage formats: sizes, companion tensors, slice alignment and unpacking, one file each."""
