"""Weights that are stored without quantization: one element, one number."""

from __future__ import annotations

from collections.abc import Hashable

import msgspec

from firstlight.engine.model.spec import Param
from firstlight.engine.weights.files.header import dtype_bytes


class Plain(msgspec.Struct, frozen=True):
    """Every parameter in `dtype`, but for those the architecture pins."""

    dtype: str

    def layer_key(self, layer: int) -> Hashable:
        return None

    def format_of(self, param: Param) -> None:
        """Nothing is quantized."""

    def is_even(self, param: Param, shape: tuple[int, ...]) -> bool:
        return True

    def keeps_all(self, param: Param, shape: tuple[int, ...]) -> bool:
        return False

    def nbytes(self, param: Param, shape: tuple[int, ...], start: tuple[int, ...] | None = None) -> int:
        """Bytes that `shape` of `param` takes in the checkpoint and, unconverted, in memory."""
        elements = 1
        for size in shape:
            elements *= size
        return dtype_bytes(param.dtype or self.dtype, elements)
