"""Normalisation over the last dim, as data. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from firstlight.engine.model.spec.param import Param, Scope
from firstlight.engine.parallel.placement import Placement


class Norm(msgspec.Struct, frozen=True, kw_only=True):
    """RMSNorm or LayerNorm over the last dim; `offset` 1.0 multiplies by (1 + weight), without `weight` by nothing."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    bias: bool = False
    offset: float = 0.0
    weight: bool = True

    def parameters(self, scope: Scope, *shape: int, place: tuple[Placement, ...] = ()) -> Iterator[Param]:
        """`shape` is the width; where each head has a weight of its own, heads come first."""
        if self.weight:
            yield scope.param("weight", *shape, role="norm", place=place)
        if self.bias:
            yield scope.param("bias", *shape, role="norm", place=place)
