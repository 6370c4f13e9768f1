"""Attention and a state space model in parallel on the same input, as data. No torch."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from firstlight.engine.model.spec.attention import Attention
from firstlight.engine.model.spec.cache import CacheSpec
from firstlight.engine.model.spec.mamba2 import Mamba2
from firstlight.engine.model.spec.param import Param, Scope
from firstlight.engine.model.spec.rope import Rope


class SideBySide(msgspec.Struct, frozen=True, kw_only=True, tag="side_by_side"):
    """The sum of an attention's and a state space's output (Falcon-H1); `enter` and `leave` scale input and output.

    Both are (attention, state).
    """

    attention: Attention
    state: Mamba2
    enter: tuple[float, float] = (1.0, 1.0)
    leave: tuple[float, float] = (1.0, 1.0)

    @property
    def rope(self) -> Rope | None:
        """The attention's rotary positions."""
        return self.attention.rope

    def parameters(self, scope: Scope) -> Iterator[Param]:
        yield from self.attention.parameters(scope.into("attention"))
        yield from self.state.parameters(scope.into("state"))

    def words(self) -> str:
        return f"{self.attention.words()}; beside it {self.state.words()}"

    def operators(self) -> tuple[str, ...]:
        """Operators of kernels/ that a forward calls, beside linear and norms."""
        return (*self.attention.operators(), *self.state.operators())

    def cache(self) -> CacheSpec:
        return msgspec.structs.replace(self.attention.cache(), states=self.state.cache().states)
