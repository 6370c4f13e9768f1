"""Attention and a state space model in parallel on the same input. Legend: T tokens, H hidden."""

from __future__ import annotations

from torch import Tensor

from firstlight.engine.model import spec as specs
from firstlight.engine.model.batch import ForwardBatch
from firstlight.engine.model.layers.access import Access
from firstlight.engine.model.layers.attention import Attention
from firstlight.engine.model.layers.mamba2 import Mamba2


class SideBySide:
    """x [T, H] -> [T, H]. `cache` holds the attention's tensors, then the states."""

    def __init__(self, spec: specs.SideBySide, weights: Access) -> None:
        self.spec = spec
        self._attention = Attention(spec.attention, weights.into("attention"))
        self._state = Mamba2(spec.state, weights.into("state"))
        self._tensors = len(spec.attention.cache().tensors)

    def __call__(self, x_TH: Tensor, batch: ForwardBatch, cache: tuple[Tensor, ...]) -> Tensor:
        enter, leave = self.spec.enter, self.spec.leave
        attended_TH = self._attention(x_TH * enter[0], batch, cache[: self._tensors]) * leave[0]
        return attended_TH + self._state(x_TH * enter[1], batch, cache[self._tensors :]) * leave[1]
