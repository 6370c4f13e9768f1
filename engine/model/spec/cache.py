"""What a layer keeps of the sequences that run. No torch."""

from __future__ import annotations

import math

import msgspec

from firstlight.engine.weights.header import DTYPE_BITS


class CacheTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of [tokens, heads, dim] that a layer keeps; heads are divided over tp when `divided`."""

    name: str
    heads: int
    dim: int
    divided: bool

    def local_heads(self, tp: int) -> int:
        return max(1, self.heads // tp) if self.divided else self.heads


class StateTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of `shape` that a layer keeps per sequence, however long it grows: recurrent or convolution state.

    `divided` names the dim that is cut over tp (whole heads or channels); None: every rank keeps all of it. Where that
    dim has `parts`, (size, units) each, they are cut one by one, and several ranks hold a unit where units are fewer.
    `dtype` pins its dtype; None follows the cache.
    """

    name: str
    shape: tuple[int, ...]
    divided: int | None = 0
    parts: tuple[tuple[int, int], ...] = ()
    dtype: str | None = "F32"

    def local_shape(self, tp: int) -> tuple[int, ...]:
        if self.divided is None:
            return self.shape
        dim = self.divided
        local = sum(size // min(units, tp) for size, units in self.parts) if self.parts else self.shape[dim] // tp
        return (*self.shape[:dim], local, *self.shape[dim + 1 :])


class CacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a layer keeps: tensors per token (the last `window` tokens only, if set) and state per sequence.

    A layer is called with these in order: first the paged tensors, [pages, heads, page, dim] each, then the states,
    [slots, *local shape] each.
    """

    tensors: tuple[CacheTensor, ...] = ()
    window: int | None = None
    states: tuple[StateTensor, ...] = ()

    @property
    def elements_per_token(self) -> int:
        return sum(tensor.heads * tensor.dim for tensor in self.tensors)

    def state_bytes(self, element_bytes: int, tp: int = 1) -> int:
        """Bytes of state of one sequence on a rank of tp; `element_bytes` is the cache's."""
        return sum(
            math.prod(state.local_shape(tp)) * (DTYPE_BITS[state.dtype] // 8 if state.dtype else element_bytes)
            for state in self.states
        )
