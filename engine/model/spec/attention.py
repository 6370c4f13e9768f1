"""Softmax attention over a cache, as data. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from firstlight.engine.model.spec.alibi import Alibi
from firstlight.engine.model.spec.block_sparse import BlockIndexer
from firstlight.engine.model.spec.cache import CacheSpec, CacheTensor
from firstlight.engine.model.spec.norm import Norm
from firstlight.engine.model.spec.param import Param, Scope
from firstlight.engine.model.spec.rope import Rope
from firstlight.engine.parallel.placement import Shard, over_heads


class Temperature(msgspec.Struct, frozen=True, kw_only=True):
    """Queries of far positions are sharpened (Llama 4): q *= 1 + strength log(1 + (position + offset) // length)."""

    strength: float
    length: float
    offset: int = 0


class Attention(msgspec.Struct, frozen=True, kw_only=True, tag="attention"):
    """Grouped-query attention; multi-head when `num_kv_heads == num_heads`. `scale` multiplies q k^T.

    Values are `v_dim` wide (None: `head_dim`) and multiplied by `v_scale`. With `fused` the rows of a key head, of
    its queries and of its value stand together in one matrix (GPT-NeoX, Falcon); with `keys_as_values` values are
    the keys as projected (Gemma 4); with `keys_of` there are queries alone, over what that layer of the model
    keeps. What is projected, and normed, is clamped to +-`clip`. `qk_norm` goes over each head ("head"), over each
    head with a weight per head ("heads", or "each" if these are stored apart), or over all heads of a token
    together ("width"), in front of the rotation or, with `qk_norm_last`, behind it. A query sees the keys at or
    before it, the last `window` of them, or those of its own `chunk` of positions; with `whole_pictures` also those
    behind it that are of the same picture; with `blocks` only those of the blocks that an indexer chooses for its
    head. With a `gate` what a head gives is multiplied by sigmoid(W_g x), or softplus as `gate_by` says, element by
    element; W_g is a projection of its "own", or stands behind the "query" rows of each head.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    v_dim: int | None = None
    v_scale: float = 1.0
    fused: bool = False
    keys_as_values: bool = False
    keys_of: int | None = None
    rope: Rope | None = None
    alibi: Alibi | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    clip: float | None = None
    qk_norm: Norm | None = None
    qk_norm_over: Literal["head", "heads", "each", "width"] = "head"
    qk_norm_last: bool = False
    v_norm: Norm | None = None
    temperature: Temperature | None = None
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False
    causal: bool = True
    whole_pictures: bool = False
    blocks: BlockIndexer | None = None
    gate: Literal["query", "own", "head"] | None = None
    gate_by: Literal["sigmoid", "softplus"] = "sigmoid"

    @property
    def value_dim(self) -> int:
        """The width of a value head."""
        return self.head_dim if self.v_dim is None else self.v_dim

    def parameters(self, scope: Scope) -> Iterator[Param]:
        heads = over_heads(self.num_heads, "query heads")
        kv_heads = over_heads(self.num_kv_heads, "key/value heads", replicate=True)
        yield from self._fused(scope) if self.fused else self._projections(scope, heads, kv_heads)
        width = self.num_heads * self.value_dim
        if self.gate in ("own", "head"):
            rows = self.num_heads if self.gate == "head" else width
            yield scope.param("gate.weight", rows, scope.hidden, role="attention", place=(heads,))
        output = msgspec.structs.replace(heads, dim=1)
        yield scope.param("o.weight", scope.hidden, width, role="attention", place=(output,))
        if self.output_bias:
            yield scope.param("o.bias", scope.hidden, role="attention")
        if self.sinks:
            sinks = scope.param("sinks", self.num_heads, role="attention", place=(heads,), dtype="F32")
            yield msgspec.structs.replace(sinks, widened=True)
        if self.qk_norm is not None:
            sides = (("q_norm", self.num_heads, heads), ("k_norm", self.num_kv_heads, kv_heads))
            for name, count, place in sides if self.keys_of is None else sides[:1]:
                if self.qk_norm_over == "each":
                    yield from self._head_by_head(scope.into(name), count, self.qk_norm)
                    continue
                shape, where = {
                    "head": ((self.head_dim,), ()),
                    "heads": ((count, self.head_dim), (place,)),
                    "width": ((count * self.head_dim,), (place,)),
                }[self.qk_norm_over]
                yield from self.qk_norm.parameters(scope.into(name), *shape, place=where)
        if self.v_norm is not None:
            yield from self.v_norm.parameters(scope.into("v_norm"), self.value_dim)
        if self.blocks is not None:
            yield from self.blocks.parameters(scope.into("blocks"))

    def _head_by_head(self, scope: Scope, heads: int, norm: Norm) -> Iterator[Param]:
        """A tensor a head, one behind the other; every rank has all of them."""
        for head in range(heads):
            for param in norm.parameters(scope.into(str(head)), self.head_dim):
                yield msgspec.structs.replace(param, storage=f"{scope.prefix}{param.name.rpartition('.')[2]}")

    def _fused(self, scope: Scope) -> Iterator[Param]:
        place = over_heads(self.num_kv_heads, "key/value heads, which are stored with their queries")
        rows = self.num_heads * self.head_dim + self.num_kv_heads * (self.head_dim + self.value_dim)
        yield scope.param("qkv.weight", rows, scope.hidden, role="attention", place=(place,))
        if self.qkv_bias:
            yield scope.param("qkv.bias", rows, role="attention", place=(place,))

    def _projections(self, scope: Scope, heads: Shard, kv_heads: Shard) -> Iterator[Param]:
        own = self.num_kv_heads if self.keys_of is None else 0
        for part, count, dim, place in (
            ("q", self.num_heads, self.head_dim + (self.value_dim if self.gate == "query" else 0), heads),
            ("k", own, self.head_dim, kv_heads),
            ("v", 0 if self.keys_as_values else own, self.value_dim, kv_heads),
        ):
            rows = count * dim
            if not rows:
                continue
            yield scope.param(
                f"{part}.weight", rows, scope.hidden, role="attention", place=(place,), storage="qkv.weight"
            )
            if self.qkv_bias:
                yield scope.param(f"{part}.bias", rows, role="attention", place=(place,), storage="qkv.bias")

    def words(self) -> str:
        """`GQA, 9 query and 3 key/value heads of 64, rope 10,000` and the like."""
        kind = f"MHA, {self.num_heads} heads of {self.head_dim}"
        if self.num_heads != self.num_kv_heads:
            kind = f"GQA, {self.num_heads} query and {self.num_kv_heads} key/value heads of {self.head_dim}"
        parts = (
            kind,
            self.window and f"window {self.window:,}",
            self.chunk and f"chunks of {self.chunk:,}",
            self.blocks and self.blocks.words(),
            self.v_dim and f"values of {self.v_dim}",
            self.keys_of is not None and f"keys of layer {self.keys_of}",
            self.softcap and f"softcap {self.softcap:g}",
            self.qk_norm and "QK-norm" + (" over all heads" if self.qk_norm_over == "width" else ""),
            self.qkv_bias and "QKV bias",
            self.sinks and "sinks",
            self.gate and "output gate",
            not self.causal and "not causal",
            self.rope and self.rope.words(),
            self.alibi and "ALiBi",
        )
        return ", ".join(part for part in parts if part)

    def operators(self) -> tuple[str, ...]:
        """Operators of kernels/ that a forward calls, beside linear and norms."""
        whole = self.chunk is None and self.alibi is None
        over = (*(("attention",) if whole else ()), *(("selective_attention",) if self.blocks or not whole else ()))
        return (*(("rotary",) if self.rope else ()), *over, "write_cache")

    def cache(self) -> CacheSpec:
        if not self.causal or self.keys_of is not None:
            return CacheSpec()
        tensors = tuple(
            CacheTensor(name=name, heads=self.num_kv_heads, dim=dim, divided=True)
            for name, dim in (("k", self.head_dim), ("v", self.value_dim))
        )
        return CacheSpec(
            tensors=tensors if self.blocks is None else (*tensors, self.blocks.tensor()),
            window=self.window or self.chunk,
        )
