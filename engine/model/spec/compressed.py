"""Attention over a window and over compressed spans of everything before it (DeepSeek-V4), as data. No torch."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from firstlight.engine.model.spec.cache import CacheSpec, CacheTensor, StateTensor
from firstlight.engine.model.spec.norm import Norm
from firstlight.engine.model.spec.param import Param, Scope
from firstlight.engine.model.spec.rope import Rope
from firstlight.engine.parallel.placement import over_heads


class Compressor(msgspec.Struct, frozen=True, kw_only=True):
    """Every `rate` tokens become one entry of `dim`: their projections weighed, channel by channel, by a softmax.

    `overlap`: each token is projected twice, once for its own entry and once for the one behind it, so that an entry
    sees two spans. An entry is rotated as the first position of its span.
    """

    rate: int
    dim: int
    norm: Norm
    overlap: bool = False

    @property
    def projected(self) -> int:
        """Values and as many weights that a token gives."""
        return self.dim * (2 if self.overlap else 1)

    @property
    def reach(self) -> int:
        """Tokens whose projections an entry is made of, and that a sequence keeps."""
        return self.rate * (2 if self.overlap else 1)

    def parameters(self, scope: Scope) -> Iterator[Param]:
        """Every rank has all of it: there is one key head."""
        yield scope.param("kv.weight", self.projected, scope.hidden, role="attention")
        yield scope.param("gate.weight", self.projected, scope.hidden, role="attention")
        yield scope.param("position_bias", self.rate, self.projected, role="attention", dtype="F32")
        yield from self.norm.parameters(scope.into("norm"), self.dim)

    def tensor(self, name: str) -> CacheTensor:
        """Its entries in the cache."""
        return CacheTensor(name=name, heads=1, dim=self.dim, divided=False, every=self.rate)

    def state(self, name: str) -> StateTensor:
        """The projections of the last tokens, values and weights, by position modulo `reach`."""
        return StateTensor(name=name, shape=(self.reach, 2 * self.projected), divided=None)


class SpanIndexer(msgspec.Struct, frozen=True, kw_only=True):
    """Which `topk` entries a token attends to: an indexer whose keys are compressed as the entries are."""

    num_heads: int
    topk: int
    compressor: Compressor

    def parameters(self, scope: Scope, q_lora_rank: int) -> Iterator[Param]:
        yield scope.param("q.weight", self.num_heads * self.compressor.dim, q_lora_rank, role="attention")
        yield scope.param("weights.weight", self.num_heads, scope.hidden, role="attention")
        yield from self.compressor.parameters(scope.into("compressor"))


class CompressedAttention(msgspec.Struct, frozen=True, kw_only=True, tag="compressed_attention"):
    """One key head that is its own value, read through a `window` and, beyond it, through compressed entries.

    All entries are seen (heavily compressed), or those that the `indexer` chooses. The last `rope.dim` dims of a head
    are rotated, and turned back in what the attention gives. Heads leave through `groups` narrow projections of
    `o_lora_rank` each. DeepSeek-V4, sections 2.1 to 2.3 of its report.
    """

    num_heads: int
    head_dim: int
    scale: float
    q_lora_rank: int
    groups: int
    o_lora_rank: int
    window: int
    norm: Norm
    rope: Rope
    compressor: Compressor | None = None
    indexer: SpanIndexer | None = None

    def parameters(self, scope: Scope) -> Iterator[Param]:
        heads = over_heads(self.num_heads, "query heads")
        yield scope.param("q_a.weight", self.q_lora_rank, scope.hidden, role="attention")
        yield from self.norm.parameters(scope.into("q_a_norm"), self.q_lora_rank)
        yield scope.param(
            "q_b.weight", self.num_heads * self.head_dim, self.q_lora_rank, role="attention", place=(heads,)
        )
        yield scope.param("kv.weight", self.head_dim, scope.hidden, role="attention")
        yield from self.norm.parameters(scope.into("kv_norm"), self.head_dim)
        yield scope.param("sinks", self.num_heads, role="attention", place=(heads,), dtype="F32")
        width, narrow = self.num_heads * self.head_dim // self.groups, self.groups * self.o_lora_rank
        rows = over_heads(self.groups, "output groups")
        columns = msgspec.structs.replace(rows, dim=1)
        yield scope.param("o_a.weight", narrow, width, role="attention", place=(rows,))
        yield scope.param("o_b.weight", scope.hidden, narrow, role="attention", place=(columns,))
        if self.compressor is not None:
            yield from self.compressor.parameters(scope.into("compressor"))
        if self.indexer is not None:
            yield from self.indexer.parameters(scope.into("indexer"), self.q_lora_rank)

    def words(self) -> str:
        """`MQA, 64 heads of 512, window 128, spans of 4, 512 of them by an indexer, rope 160,000`."""
        parts = (
            f"MQA, {self.num_heads} heads of {self.head_dim}",
            f"window {self.window:,}",
            self.compressor and f"spans of {self.compressor.rate:,}",
            self.indexer and f"{self.indexer.topk:,} of them by an indexer",
            "sinks",
            self.rope.words(),
        )
        return ", ".join(part for part in parts if part)

    def operators(self) -> tuple[str, ...]:
        """Operators of kernels/ that a forward calls, beside linear and norms."""
        return ("rotary", "selective_attention", "write_cache")

    def cache(self) -> CacheSpec:
        """The key of every token (the last `window` matter), the entries, and the tokens that wait to become one."""
        key = CacheTensor(name="key", heads=1, dim=self.head_dim, divided=False, window=self.window)
        compressors = (
            ("entries", self.compressor),
            ("index", None if self.indexer is None else self.indexer.compressor),
        )
        found = tuple((name, one) for name, one in compressors if one is not None)
        return CacheSpec(
            tensors=(key, *(one.tensor(name) for name, one in found)),
            states=tuple(one.state(name) for name, one in found),
        )
