"""Architectures: one file each, found through the registry."""

from firstlight.engine.model.families.registry import FAMILIES, Families, register_family

__all__ = ["FAMILIES", "Families", "register_family"]
