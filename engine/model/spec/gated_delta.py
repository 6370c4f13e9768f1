"""Linear attention by the gated delta rule, as data. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from firstlight.engine.model.spec.cache import CacheSpec, StateTensor
from firstlight.engine.model.spec.param import Param, Scope
from firstlight.engine.parallel.placement import Shard, over_heads


class GatedDelta(msgspec.Struct, frozen=True, kw_only=True, tag="gated_delta"):
    """A matrix per value head, decayed and corrected by each token (arXiv 2412.06464; by channel: arXiv 2510.26692).

    q, k and v pass a causal convolution of `conv` taps and SiLU; q and k are divided by their lengths, q by sqrt(key
    dim). Each key head serves `num_heads / num_key_heads` value heads. With f = W_f x + dt_bias a head or a channel
    (`decay`) forgets by -exp(A) softplus(f) or, with a `decay_bound`, by bound sigmoid(exp(A) f); W_f has rank
    `decay_rank` (None: full). The step is `beta_scale` sigmoid(W_b x). What is read is RMS-normed per head and
    multiplied by `gate_activation`(W_g x), W_g of rank `gate_rank` (None: full).
    `fused`: the checkpoint keeps [q | k | v | gate] and [b | f] head by head in two tensors, and so do we.
    `decay_shape` is the shape in which the heads' A are stored; () stands for [heads], behind which
    `decay_padding` zeros may be stored. `wide`: filters of the convolution and the weight of the norm are kept in
    float32.
    """

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    eps: float
    conv: int = 4
    decay: Literal["head", "channel"] = "head"
    decay_rank: int | None = None
    decay_bound: float | None = None
    decay_shape: tuple[int, ...] = ()
    decay_padding: int = 0
    gate_rank: int | None = None
    gate_activation: Literal["silu", "sigmoid"] = "silu"
    beta_scale: float = 1.0
    fused: bool = False
    wide: bool = False

    @property
    def rows(self) -> tuple[int, int, int]:
        """Of q, k and v: what the convolution sees."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_heads * self.value_dim

    @property
    def decays(self) -> int:
        """How many decays a token has."""
        return self.num_heads * (self.key_dim if self.decay == "channel" else 1)

    def parameters(self, scope: Scope) -> Iterator[Param]:
        heads = over_heads(self.num_key_heads, "linear key heads")
        for name, rows, place in self._input_rows(heads):
            where = (place,) if place else ()
            yield scope.param(f"{name}.weight", rows, scope.hidden, role="attention", place=where, storage="in.weight")
        for name, rank, rows in (("f_b", self.decay_rank, self.decays), ("g_b", self.gate_rank, self.rows[2])):
            if rank is not None:
                yield scope.param(f"{name}.weight", rows, rank, role="attention", place=(heads,))
        kept = "F32" if self.wide else None
        for part, rows in zip("qkv", self.rows, strict=True):
            filters = f"conv.{part}.weight", rows, 1, self.conv
            yield scope.param(*filters, role="attention", place=(heads,), storage="conv.weight", dtype=kept)
        shape = self.decay_shape or (self.num_heads,)
        along = msgspec.structs.replace(heads, dim=shape.index(self.num_heads))
        padding = self.decay_padding
        yield scope.param("decay", *shape, role="attention", place=(along,), dtype="F32", padding=padding)
        yield scope.param("dt_bias", self.decays, role="attention", place=(heads,), dtype="F32")
        yield scope.param("norm.weight", self.value_dim, role="norm", dtype=kept)
        output = msgspec.structs.replace(heads, dim=1)
        yield scope.param("o.weight", scope.hidden, self.rows[2], role="attention", place=(output,))

    def _input_rows(self, heads: Shard) -> Iterator[tuple[str, int, Shard | None]]:
        """What is projected from the layer's input in one product, in order; low ranks are whole on every rank."""
        q, k, v = self.rows
        if self.fused:
            yield "qkvg", q + k + 2 * v, heads
            yield "bf", 2 * self.num_heads, heads
            return
        yield from (("q", q, heads), ("k", k, heads), ("v", v, heads))
        yield ("g", v, heads) if self.gate_rank is None else ("g_a", self.gate_rank, None)
        yield "b", self.num_heads, heads
        yield ("f", self.decays, heads) if self.decay_rank is None else ("f_a", self.decay_rank, None)

    def words(self) -> str:
        """`gated delta rule, 16 key and 32 value heads of 128 x 128, decay a head`."""
        heads = f"{self.num_heads} heads"
        if self.num_key_heads != self.num_heads:
            heads = f"{self.num_key_heads} key and {self.num_heads} value heads"
        bound = f" above {self.decay_bound:g}" if self.decay_bound is not None else ""
        return f"gated delta rule, {heads} of {self.key_dim} x {self.value_dim}, decay a {self.decay}{bound}"

    def operators(self) -> tuple[str, ...]:
        """Operators of kernels/ that a forward calls, beside linear and norms."""
        return ("causal_conv", "linear_attention")

    def cache(self) -> CacheSpec:
        return CacheSpec(
            states=(
                StateTensor(name="conv", shape=(sum(self.rows), self.conv - 1), dtype=None),
                StateTensor(name="memory", shape=(self.num_heads, self.key_dim, self.value_dim)),
            )
        )
