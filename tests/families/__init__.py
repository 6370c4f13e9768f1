"""Tiny models of the families, a module for each group of them: what stands here, the shared tests pick up."""

from tests.families.groups import MESHES, STEPPED, TINY

__all__ = ["MESHES", "STEPPED", "TINY"]
