"""State space duality (Mamba 2), as data. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from firstlight.engine.model.spec.cache import CacheSpec, StateTensor
from firstlight.engine.model.spec.param import Param, Scope
from firstlight.engine.parallel.placement import over_heads


class Mamba2(msgspec.Struct, frozen=True, kw_only=True, tag="mamba2"):
    """Mamba 2 (arXiv 2405.21060): a matrix per head that decays by exp(-exp(A) dt), is written by B and read by C.

    [z | x | B | C | dt] = scales W_in u; x, B and C pass a causal convolution and SiLU; dt = softplus(dt + dt_bias)
    within `dt_limits` (None: no upper one). Groups of heads share B and C. What is read, with D x added, is multiplied
    by SiLU(z) and normed over each group ("behind" the gate), normed and then multiplied ("before"), or multiplied
    only (None).
    """

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    eps: float
    conv: int = 4
    conv_bias: bool = True
    bias: bool = False
    output_bias: bool = False
    dt_limits: tuple[float, float | None] = (0.0, None)
    norm: Literal["behind", "before"] | None = "behind"
    scales: tuple[float, float, float, float, float] | None = None

    @property
    def width(self) -> int:
        """Of x: all heads."""
        return self.num_heads * self.head_dim

    @property
    def shared(self) -> int:
        """Of B or C: all groups."""
        return self.num_groups * self.state_dim

    def parameters(self, scope: Scope) -> Iterator[Param]:
        heads = over_heads(self.num_heads, "state heads")
        groups = over_heads(self.num_groups, "state groups", replicate=True)
        parts = (
            ("z", self.width, heads),
            ("x", self.width, heads),
            ("b", self.shared, groups),
            ("c", self.shared, groups),
            ("dt", self.num_heads, heads),
        )
        for name, rows, place in parts:
            yield scope.param(
                f"{name}.weight", rows, scope.hidden, role="attention", place=(place,), storage="in.weight"
            )
            if self.bias:
                yield scope.param(f"{name}.bias", rows, role="attention", place=(place,), storage="in.bias")
        for name, rows, place in parts[1:4]:
            yield scope.param(
                f"conv.{name}.weight", rows, 1, self.conv, role="attention", place=(place,), storage="conv.weight"
            )
            if self.conv_bias:
                yield scope.param(f"conv.{name}.bias", rows, role="attention", place=(place,), storage="conv.bias")
        for name in ("decay", "dt_bias", "d"):
            yield scope.param(name, self.num_heads, role="attention", place=(heads,), dtype="F32")
        if self.norm is not None:
            # One group is normed over all ranks; of several, each lies on one.
            units = heads if self.num_groups == 1 else over_heads(self.num_groups, "norm groups")
            yield scope.param("norm.weight", self.width, role="norm", place=(units,))
        output = msgspec.structs.replace(heads, dim=1)
        yield scope.param("o.weight", scope.hidden, self.width, role="attention", place=(output,))
        if self.output_bias:
            yield scope.param("o.bias", scope.hidden, role="attention")

    def words(self) -> str:
        """`Mamba 2, 128 heads of 64, 8 groups, state 128`."""
        groups = f", {self.num_groups} groups" if self.num_groups > 1 else ""
        return f"Mamba 2, {self.num_heads} heads of {self.head_dim}{groups}, state {self.state_dim}"

    def operators(self) -> tuple[str, ...]:
        """Operators of kernels/ that a forward calls, beside linear and norms."""
        return ("causal_conv", "linear_attention")

    def cache(self) -> CacheSpec:
        channels = ((self.width, self.num_heads), (2 * self.shared, self.num_groups))
        return CacheSpec(
            states=(
                StateTensor(
                    name="conv", shape=(self.width + 2 * self.shared, self.conv - 1), parts=channels, dtype=None
                ),
                StateTensor(name="memory", shape=(self.num_heads, self.state_dim, self.head_dim)),
            )
        )
