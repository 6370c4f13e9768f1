"""Tiny models whose attention, positions or norms are of a kind that Llama has not."""

from tests.families.tiny import Tiny

TINY: dict[str, Tiny] = {}
MESHES: dict[str, tuple[str, ...]] = {}
STEPPED: tuple[str, ...] = ()
