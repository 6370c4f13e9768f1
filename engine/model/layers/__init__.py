"""Blocks: the mathematics that families configure, one file each."""
