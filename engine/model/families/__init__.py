"""Families: `spec(config)` and `RULES`, one file each."""
