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
        return frozenset(part for number, part in _exceptions(self.kept) if number == str(layer))

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
        layer = re.match(r"layers\.(\d+)\.", param.name)
        part = param.name.removesuffix(".weight").rsplit(".", 1)[-1]
        return layer is not None and (layer[1], part) in _exceptions(self.kept)


@lru_cache(maxsize=8)
def _exceptions(kept: tuple[str, ...]) -> frozenset[tuple[str, str]]:
    """(layer, part) of each module that stays unquantized: `model.layers.0.self_attn.q_proj` is ("0", "q")."""
    found = set()
    for name in kept:
        layer = re.search(r"layers\.(\d+)\.", name)
        if layer:
            found.add((layer[1], name.rsplit(".", 1)[-1].removesuffix("_proj")))
    return frozenset(found)
