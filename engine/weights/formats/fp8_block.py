"""FP8 with one float32 scale a block: DeepSeek-V3's release format (arXiv 2412.19437, section 3.3).

A weight [F, H] in F8_E4M3 has a companion `weight_scale_inv` [ceil(F / 128), ceil(H / 128)] in F32. Sizes only: reading
such a checkpoint is refused until its unpacking is here.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from functools import lru_cache
from math import prod

import msgspec

from firstlight.engine.model.spec import Param
from firstlight.engine.weights.header import dtype_bytes

QUANTIZED_ROLES = frozenset(("attention", "mlp", "expert"))


class Fp8Block(msgspec.Struct, frozen=True):
    """Matrices of attention and feed-forward in FP8 blocks, everything else in `dtype`; `kept` lists exceptions."""

    dtype: str
    block: tuple[int, int]
    kept: tuple[str, ...] = ()

    def layer_key(self, layer: int) -> Hashable:
        """The parts of the layer that stay unquantized."""
        return _exceptions(self.kept).get(str(layer))

    def is_even(self, param: Param, shape: tuple[int, ...]) -> bool:
        """Whether shards of `shape` begin and end between blocks."""
        if not self._is_quantized(param):
            return True
        cuts = zip(shape, param.shape, self.block, strict=True)
        return all(size == whole or size % block == 0 for size, whole, block in cuts)

    def nbytes(self, param: Param, shape: tuple[int, ...], start: tuple[int, ...] | None = None) -> int:
        """Bytes of a part of `param`, scales included; a block that is cut keeps its scale on both sides."""
        if not self._is_quantized(param):
            return dtype_bytes(param.dtype or self.dtype, prod(shape))
        first = start or (0,) * len(shape)
        rows, columns = (
            (-(-(begin + size) // block) - begin // block) if size else 0
            for begin, size, block in zip(first, shape, self.block, strict=True)
        )
        return prod(shape) + 4 * rows * columns

    def _is_quantized(self, param: Param) -> bool:
        return len(param.shape) == 2 and param.role in QUANTIZED_ROLES and not self._is_kept(param)

    def _is_kept(self, param: Param) -> bool:
        found = re.match(r"layers\.(\d+)\.(.+)", param.name)
        exceptions = _exceptions(self.kept).get(found[1]) if found else None
        if not found or not exceptions:
            return False
        path = tuple(part for part in found[2].split(".") if not part.isdigit())
        return any(path[: len(module)] == module for module in exceptions)


_OURS = {  # parts of module names in releases -> parts of parameter names here
    "self_attn": "mixer",
    "mlp": "ffn",
    "block_sparse_moe": "ffn",
    "shared_expert": "shared",
    "shared_experts": "shared",
    "gate": "router",
    "kv_a_proj_with_mqa": "kv_a",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}


@lru_cache(maxsize=8)
def _exceptions(kept: tuple[str, ...]) -> dict[str, frozenset[tuple[str, ...]]]:
    """By layer, the modules that stay unquantized: `model.layers.0.self_attn.q_proj` is ("mixer", "q") of "0".

    Experts are not told apart: one that is kept counts for all of its layer, so that no plan holds too little.
    """
    found: dict[str, set[tuple[str, ...]]] = {}
    for name in kept:
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.(.+)", name)
        if layer:
            parts = (part for part in layer[2].split(".") if not part.isdigit())
            path = tuple(_OURS.get(part, part.removesuffix("_proj")) for part in parts)
            found.setdefault(layer[1], set()).add(path)
    return {number: frozenset(paths) for number, paths in found.items()}
