"""A gated short convolution, as data. No torch."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from firstlight.engine.model.spec.cache import CacheSpec, StateTensor
from firstlight.engine.model.spec.param import Param, Scope
from firstlight.engine.parallel.placement import over_heads


class ShortConv(msgspec.Struct, frozen=True, kw_only=True, tag="short_conv"):
    """[b | c | u] = W_in x; W_out (c conv(b u)): each channel's own filter over the last `conv` tokens (LFM2)."""

    width: int
    conv: int = 3
    bias: bool = False

    def parameters(self, scope: Scope) -> Iterator[Param]:
        channels = over_heads(self.width, "convolution channels")
        for kind, shape in (("weight", (self.width, scope.hidden)), ("bias", (self.width,))):
            for part in "bcu" if kind == "weight" or self.bias else "":
                yield scope.param(f"{part}.{kind}", *shape, role="attention", place=(channels,), storage=f"in.{kind}")
        yield scope.param("conv.weight", self.width, 1, self.conv, role="attention", place=(channels,))
        if self.bias:
            yield scope.param("conv.bias", self.width, role="attention", place=(channels,))
        output = msgspec.structs.replace(channels, dim=1)
        yield scope.param("o.weight", scope.hidden, self.width, role="attention", place=(output,))
        if self.bias:
            yield scope.param("o.bias", scope.hidden, role="attention")

    def words(self) -> str:
        """`gated convolution of 3 tokens, 2,048 channels`."""
        return f"gated convolution of {self.conv} tokens, {self.width:,} channels"

    def operators(self) -> tuple[str, ...]:
        """Operators of kernels/ that a forward calls, beside linear and norms."""
        return ("causal_conv",)

    def cache(self) -> CacheSpec:
        return CacheSpec(states=(StateTensor(name="conv", shape=(self.width, self.conv - 1), dtype=None),))
