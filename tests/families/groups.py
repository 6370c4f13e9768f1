"""All tiny models of the families together; one word a group.

A group has `TINY` (name -> model; equality, plan and verify tests run all of them), `MESHES` (name -> meshes that must
give what one rank gives) and `STEPPED` (names whose prompts are run again in chunks and single steps).
"""

from tests.families import attention_kinds, chosen_kinds, moe_kinds, recurrent_kinds
from tests.families.tiny import Tiny

MODULES = (attention_kinds, recurrent_kinds, moe_kinds, chosen_kinds)

TINY: dict[str, Tiny] = {name: case for module in MODULES for name, case in module.TINY.items()}
MESHES: dict[str, tuple[str, ...]] = {name: meshes for module in MODULES for name, meshes in module.MESHES.items()}
STEPPED: tuple[str, ...] = tuple(name for module in MODULES for name in module.STEPPED)
