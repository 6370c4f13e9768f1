"""Selective state spaces (Mamba), as data. No torch."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from firstlight.engine.model.spec.cache import CacheSpec, StateTensor
from firstlight.engine.model.spec.norm import Norm
from firstlight.engine.model.spec.param import Param, Scope
from firstlight.engine.parallel.placement import over_heads


class Mamba(msgspec.Struct, frozen=True, kw_only=True, tag="mamba"):
    """Mamba (arXiv 2312.00752): a row of numbers a channel, decayed by exp(-exp(A) dt), written by B, read by C.

    [x | z] = W_in u; x passes a causal convolution and SiLU; [dt | B | C] = W_x x, each normed where there is a `norm`;
    dt = softplus(W_dt dt + bias). What is read, with D x added, is multiplied by SiLU(z).
    """

    width: int
    state_dim: int
    rank: int
    conv: int = 4
    conv_bias: bool = True
    bias: bool = False
    norm: Norm | None = None

    def parameters(self, scope: Scope) -> Iterator[Param]:
        channels = over_heads(self.width, "state channels")
        across = msgspec.structs.replace(channels, dim=1)
        for part in "xz":
            yield scope.param(
                f"{part}.weight", self.width, scope.hidden, role="attention", place=(channels,), storage="in.weight"
            )
        for part in "xz" if self.bias else "":
            yield scope.param(f"{part}.bias", self.width, role="attention", place=(channels,), storage="in.bias")
        yield scope.param("conv.weight", self.width, 1, self.conv, role="attention", place=(channels,))
        if self.conv_bias:
            yield scope.param("conv.bias", self.width, role="attention", place=(channels,))
        rows = self.rank + 2 * self.state_dim
        yield scope.param("select.weight", rows, self.width, role="attention", place=(across,))
        yield scope.param("dt.weight", self.width, self.rank, role="attention", place=(channels,))
        yield scope.param("dt.bias", self.width, role="attention", place=(channels,))
        for name, size in (("dt_norm", self.rank), ("b_norm", self.state_dim), ("c_norm", self.state_dim)):
            if self.norm is not None:
                yield from self.norm.parameters(scope.into(name), size)
        yield scope.param("decay", self.width, self.state_dim, role="attention", place=(channels,), dtype="F32")
        yield scope.param("d", self.width, role="attention", place=(channels,), dtype="F32")
        yield scope.param("o.weight", scope.hidden, self.width, role="attention", place=(across,))
        if self.bias:
            yield scope.param("o.bias", scope.hidden, role="attention")

    def words(self) -> str:
        """`Mamba, 8,192 channels, state 16`."""
        return f"Mamba, {self.width:,} channels, state {self.state_dim}"

    def operators(self) -> tuple[str, ...]:
        """Operators of kernels/ that a forward calls, beside linear and norms."""
        return ("causal_conv", "selective_scan")

    def cache(self) -> CacheSpec:
        return CacheSpec(
            states=(
                StateTensor(name="conv", shape=(self.width, self.conv - 1), dtype=None),
                StateTensor(name="memory", shape=(self.width, self.state_dim)),
            )
        )
