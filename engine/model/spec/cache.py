"""What a layer caches for each sequence: keys and values per token, and recurrent states. No torch."""

from __future__ import annotations

import math

import msgspec

from firstlight.engine.weights.files.header import DTYPE_BITS


class CacheTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of [tokens, heads, dim] that a layer keeps; heads are divided over ranks when `divided`.

    With `every` there is one entry for so many tokens. `window`: of this tensor the last so many tokens matter.
    """

    name: str
    heads: int
    dim: int
    divided: bool
    every: int = 1
    window: int | None = None

    def local_heads(self, ranks: int) -> int:
        return max(1, self.heads // ranks) if self.divided else self.heads

    def elements(self, tokens: int, ranks: int = 1) -> int:
        """What so many tokens take on one of `ranks`."""
        return self.local_heads(ranks) * self.dim * -(-tokens // self.every)


class StateTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of `shape` that a layer keeps per sequence, however long it grows: recurrent or convolution state.

    `divided` names the dim that is cut over ranks (whole heads or channels); None: every rank keeps all of it. Where
    that dim has `parts`, (size, units) each, they are cut one by one, and several ranks hold a unit where units are
    fewer. `dtype` pins its dtype; None follows the cache.
    """

    name: str
    shape: tuple[int, ...]
    divided: int | None = 0
    parts: tuple[tuple[int, int], ...] = ()
    dtype: str | None = "F32"

    def nbytes(self, element_bytes: int, ranks: int = 1) -> int:
        """Of one sequence on one of `ranks`; `element_bytes` is the cache's."""
        return math.prod(self.local_shape(ranks)) * (DTYPE_BITS[self.dtype] // 8 if self.dtype else element_bytes)

    def local_shape(self, ranks: int) -> tuple[int, ...]:
        if self.divided is None:
            return self.shape
        dim = self.divided
        local = sum(size // min(units, ranks) for size, units in self.parts) if self.parts else self.shape[dim] // ranks
        return (*self.shape[:dim], local, *self.shape[dim + 1 :])


class CacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a layer keeps: tensors per token (the last `window` tokens only, if set) and state per sequence.

    A layer is called with these in order: first the paged tensors, [pages, heads, page, dim] each (`every` tokens an
    entry: page / every of them, rounded up), then the states, [slots, *local shape] each.
    """

    tensors: tuple[CacheTensor, ...] = ()
    window: int | None = None
    states: tuple[StateTensor, ...] = ()

    @property
    def elements_per_token(self) -> int:
        """What one token more adds, however long the sequence is; shared entries are rounded up."""
        return sum(-(-one.heads * one.dim // one.every) for one in self.tensors if self._window(one) is None)

    def elements(self, tokens: int, ranks: int = 1, full_window: bool = False) -> tuple[int, int]:
        """(what grows with the sequence, what windows hold) of a sequence of so many tokens on one of `ranks`.

        `full_window`: windows are kept like the rest.
        """
        windows = [(one, None if full_window else self._window(one)) for one in self.tensors]
        grows = sum(one.elements(tokens, ranks) for one, window in windows if window is None)
        held = sum(one.elements(min(tokens, window), ranks) for one, window in windows if window is not None)
        return grows, held

    def _window(self, tensor: CacheTensor) -> int | None:
        return self.window if tensor.window is None else tensor.window

    def state_bytes(self, element_bytes: int, ranks: int = 1) -> int:
        """Bytes of state of one sequence on one of `ranks`; `element_bytes` is the cache's."""
        return sum(state.nbytes(element_bytes, ranks) for state in self.states)

    def waiting_bytes(self, element_bytes: int) -> int:
        """Of these, the last inputs of convolutions, which follow the cache's dtype; the rest is what is remembered."""
        return sum(state.nbytes(element_bytes) for state in self.states if state.dtype is None)
