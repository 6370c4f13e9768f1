"""Checkpoints: tensors by name, storage formats, sources of bytes, the ledger and the loader."""
