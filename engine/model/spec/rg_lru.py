"""The real-gated linear recurrent unit, as data. No torch."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from firstlight.engine.model.spec.cache import CacheSpec, StateTensor
from firstlight.engine.model.spec.param import Param, Scope
from firstlight.engine.parallel.placement import over_heads


class RgLru(msgspec.Struct, frozen=True, kw_only=True, tag="rg_lru"):
    """One number a channel, decayed and written by gates (Griffin, arXiv 2402.19427): W_out (act(W_y x) h).

    u = conv(W_x x); a = exp(-8 sigmoid(r(u)) softplus(A)); h <- a h + sqrt(1 - a^2) sigmoid(i(u)) u, a sequence's first
    token without the root. The gates r and i are projections within each of `num_heads` blocks of channels.
    """

    width: int
    num_heads: int
    activation: str
    conv: int = 4

    def parameters(self, scope: Scope) -> Iterator[Param]:
        heads = over_heads(self.num_heads, "recurrent heads")
        for part in "xy":
            yield scope.param(
                f"{part}.weight", self.width, scope.hidden, role="attention", place=(heads,), storage="in.weight"
            )
        for part in "xy":
            yield scope.param(f"{part}.bias", self.width, role="attention", place=(heads,), storage="in.bias")
        yield scope.param("conv.weight", self.width, 1, self.conv, role="attention", place=(heads,))
        yield scope.param("conv.bias", self.width, role="attention", place=(heads,))
        block = self.width // self.num_heads
        for gate in ("input", "decay"):
            yield scope.param(f"{gate}_gate.weight", self.num_heads, block, block, role="attention", place=(heads,))
            yield scope.param(f"{gate}_gate.bias", self.num_heads, block, role="attention", place=(heads,))
        yield scope.param("decay", self.width, role="attention", place=(heads,), dtype="F32")
        output = msgspec.structs.replace(heads, dim=1)
        yield scope.param("o.weight", scope.hidden, self.width, role="attention", place=(output,))
        yield scope.param("o.bias", scope.hidden, role="attention")

    def words(self) -> str:
        """`RG-LRU, 2,560 channels, gates in 10 blocks`."""
        return f"RG-LRU, {self.width:,} channels, gates in {self.num_heads} blocks"

    def operators(self) -> tuple[str, ...]:
        """Operators of kernels/ that a forward calls, beside linear and norms."""
        return ("causal_conv", "linear_attention")

    def cache(self) -> CacheSpec:
        return CacheSpec(
            states=(
                StateTensor(name="conv", shape=(self.width, self.conv - 1), dtype=None),
                StateTensor(name="memory", shape=(self.width, 1, 1)),
            )
        )
