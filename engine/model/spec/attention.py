"""Softmax attention over a cache, as data. No torch."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from firstlight.engine.model.spec.cache import CacheSpec, CacheTensor
from firstlight.engine.model.spec.norm import Norm
from firstlight.engine.model.spec.param import Param, Scope
from firstlight.engine.model.spec.rope import Rope
from firstlight.engine.parallel.placement import Shard


class Attention(msgspec.Struct, frozen=True, kw_only=True, tag="attention"):
    """Grouped-query attention; multi-head when `num_kv_heads == num_heads`. `scale` multiplies q k^T."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Norm | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    causal: bool = True

    def parameters(self, scope: Scope) -> Iterator[Param]:
        heads = Shard(0, self.num_heads, unit_name="query heads")
        kv_heads = Shard(0, self.num_kv_heads, replicate=True, unit_name="key/value heads")
        for part, count, place in (
            ("q", self.num_heads, heads),
            ("k", self.num_kv_heads, kv_heads),
            ("v", self.num_kv_heads, kv_heads),
        ):
            rows = count * self.head_dim
            yield scope.param(
                f"{part}.weight", rows, scope.hidden, role="attention", place=(place,), storage="qkv.weight"
            )
            if self.qkv_bias:
                yield scope.param(f"{part}.bias", rows, role="attention", place=(place,), storage="qkv.bias")
        width = self.num_heads * self.head_dim
        output = Shard(1, self.num_heads, unit_name="query heads")
        yield scope.param("o.weight", scope.hidden, width, role="attention", place=(output,))
        if self.output_bias:
            yield scope.param("o.bias", scope.hidden, role="attention")
        if self.sinks:
            yield scope.param("sinks", self.num_heads, role="attention", place=(heads,), dtype="F32")
        if self.qk_norm is not None:
            yield from self.qk_norm.parameters(scope.into("q_norm"), self.head_dim)
            yield from self.qk_norm.parameters(scope.into("k_norm"), self.head_dim)

    def words(self) -> str:
        """`GQA, 9 query and 3 key/value heads of 64, rope 10,000` and the like."""
        kind = f"MHA, {self.num_heads} heads of {self.head_dim}"
        if self.num_heads != self.num_kv_heads:
            kind = f"GQA, {self.num_heads} query and {self.num_kv_heads} key/value heads of {self.head_dim}"
        parts = (
            kind,
            self.window and f"window {self.window:,}",
            self.softcap and f"softcap {self.softcap:g}",
            self.qk_norm and "QK-norm",
            self.qkv_bias and "QKV bias",
            self.sinks and "sinks",
            not self.causal and "not causal",
            self.rope and self.rope.words(),
        )
        return ", ".join(part for part in parts if part)

    def operators(self) -> tuple[str, ...]:
        """Operators of kernels/ that a forward calls, beside linear and norms."""
        return (*(("rotary",) if self.rope else ()), "attention", "write_cache")

    def cache(self) -> CacheSpec:
        if not self.causal:
            return CacheSpec()
        return CacheSpec(
            tensors=tuple(
                CacheTensor(name=name, heads=self.num_kv_heads, dim=self.head_dim, divided=True) for name in ("k", "v")
            ),
            window=self.window,
        )
