"""A sweep over every architecture that transformers has; `make sweep`, not part of continuous integration."""
