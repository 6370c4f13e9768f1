"""Tiny models of the families, a module for each group of them: what stands here, the shared tests pick up.

A module has `TINY` (name -> model; equality, plan and verify tests run all of them), `MESHES` (name -> meshes that must
give what one rank gives) and `STEPPED` (names whose prompts are run again in chunks and single steps).
"""

from tests.families import attention_kinds, moe_kinds, recurrent_kinds
from tests.families.tiny import Tiny

MODULES = (attention_kinds, recurrent_kinds, moe_kinds)  # one word a group

TINY: dict[str, Tiny] = {name: case for module in MODULES for name, case in module.TINY.items()}
MESHES: dict[str, tuple[str, ...]] = {name: meshes for module in MODULES for name, meshes in module.MESHES.items()}
STEPPED: tuple[str, ...] = tuple(name for module in MODULES for name in module.STEPPED)
