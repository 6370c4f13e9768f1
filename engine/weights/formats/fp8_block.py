"""FP8 with one float32 scale a block: DeepSeek-V3's release format (arXiv 2412.19437, section 3.3).

A weight [F, H] in F8_E4M3 has a companion `weight_scale_inv` [ceil(F / 128), ceil(H / 128)] in F32. Sizes only: reading
such a checkpoint is refused until its unpacking is here.
"""

from __future__ import annotations

import re
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

    def nbytes(self, param: Param, shape: tuple[int, ...]) -> int:
        """Bytes that `shape` of `param` takes, scales included; a block that is cut keeps its scale on both sides."""
        if len(shape) != 2 or param.role not in QUANTIZED_ROLES or self._is_kept(param):
            return dtype_bytes(param.dtype or self.dtype, prod(shape))
        blocks = -(-shape[0] // self.block[0]) * -(-shape[1] // self.block[1])
        return prod(shape) + 4 * blocks

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
