"""Linear attention with one fixed decay a head (lightning attention), as data. No torch."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from firstlight.engine.model.spec.cache import CacheSpec, StateTensor
from firstlight.engine.model.spec.param import Param, Scope
from firstlight.engine.parallel.placement import over_heads


class Lightning(msgspec.Struct, frozen=True, kw_only=True, tag="lightning"):
    """A matrix per head that keeps exp(-slope) of itself from token to token (arXiv 2401.04658; MiniMax-01).

    [q | k | v], head by head, = act(W_qkv x). What is read is RMS-normed over all heads of a token together and
    multiplied by sigmoid(W_g x).
    """

    num_heads: int
    head_dim: int
    slopes: tuple[float, ...]
    activation: str
    eps: float

    def parameters(self, scope: Scope) -> Iterator[Param]:
        heads = over_heads(self.num_heads, "linear heads")
        width = self.num_heads * self.head_dim
        for name, rows in (("qkv", 3 * width), ("gate", width)):
            yield scope.param(
                f"{name}.weight", rows, scope.hidden, role="attention", place=(heads,), storage="in.weight"
            )
        yield scope.param("norm.weight", width, role="norm", place=(heads,))
        output = msgspec.structs.replace(heads, dim=1)
        yield scope.param("o.weight", scope.hidden, width, role="attention", place=(output,))

    def words(self) -> str:
        """`lightning attention, 64 heads of 128`."""
        return f"lightning attention, {self.num_heads} heads of {self.head_dim}"

    def operators(self) -> tuple[str, ...]:
        """Operators of kernels/ that a forward calls, beside linear and norms."""
        return ("linear_attention",)

    def cache(self) -> CacheSpec:
        return CacheSpec(states=(StateTensor(name="memory", shape=(self.num_heads, self.head_dim, self.head_dim)),))
