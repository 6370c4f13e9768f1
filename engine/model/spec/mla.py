"""Multi-head latent attention, over all keys or over keys that an indexer selects, as data. No torch."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from firstlight.engine.model.spec.attention import Temperature
from firstlight.engine.model.spec.cache import CacheSpec, CacheTensor
from firstlight.engine.model.spec.norm import Norm
from firstlight.engine.model.spec.param import Param, Scope
from firstlight.engine.model.spec.rope import Rope
from firstlight.engine.parallel.placement import over_heads


class Indexer(msgspec.Struct, frozen=True, kw_only=True):
    """Which `topk` keys a token attends to, by a small attention of its own (DeepSeek-V3.2, arXiv 2512.02556).

    score(t, s) = sum over heads of w_h(t) relu(q_h(t) k(s)); its keys are cached beside the latents. `own` False: the
    layer has no indexer and attends to what the last layer with one chose.
    """

    num_heads: int
    head_dim: int
    topk: int
    norm: Norm
    rope: Rope | None
    own: bool = True

    def parameters(self, scope: Scope, q_lora_rank: int) -> Iterator[Param]:
        """Every rank has all of it: the choice is the same for all heads."""
        if not self.own:
            return
        yield scope.param("q.weight", self.num_heads * self.head_dim, q_lora_rank, role="attention")
        yield scope.param("k.weight", self.head_dim, scope.hidden, role="attention")
        yield from self.norm.parameters(scope.into("k_norm"), self.head_dim)
        yield scope.param("weights.weight", self.num_heads, scope.hidden, role="attention")


class MLA(msgspec.Struct, frozen=True, kw_only=True, tag="mla"):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values come from one latent per token.

    `gated`: what the heads give is multiplied by sigmoid(g x), element by element or, `gate_by_head`, each head as a
    whole, before the output projection.
    `kv_scale` multiplies the latent that keys and values are expanded from.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    scale: float
    norm: Norm
    rope: Rope | None = None
    bias: bool = False
    gated: bool = False
    gate_by_head: bool = False
    kv_scale: float = 1.0
    temperature: Temperature | None = None
    indexer: Indexer | None = None

    def parameters(self, scope: Scope) -> Iterator[Param]:
        heads = over_heads(self.num_heads, "query heads")
        q_rows = self.num_heads * (self.nope_dim + self.rope_dim)
        if self.q_lora_rank is None:
            yield scope.param("q.weight", q_rows, scope.hidden, role="attention", place=(heads,))
        else:
            yield scope.param("q_a.weight", self.q_lora_rank, scope.hidden, role="attention")
            if self.bias:
                yield scope.param("q_a.bias", self.q_lora_rank, role="attention")
            yield from self.norm.parameters(scope.into("q_a_norm"), self.q_lora_rank)
            yield scope.param("q_b.weight", q_rows, self.q_lora_rank, role="attention", place=(heads,))
        latent = self.kv_lora_rank + self.rope_dim
        yield scope.param("kv_a.weight", latent, scope.hidden, role="attention")
        if self.bias:
            yield scope.param("kv_a.bias", latent, role="attention")
        yield from self.norm.parameters(scope.into("kv_a_norm"), self.kv_lora_rank)
        kv_rows = self.num_heads * (self.nope_dim + self.v_dim)
        yield scope.param("kv_b.weight", kv_rows, self.kv_lora_rank, role="attention", place=(heads,))
        if self.gated:
            width = self.num_heads * (1 if self.gate_by_head else self.v_dim)
            yield scope.param("g.weight", width, scope.hidden, role="attention", place=(heads,))
        output = msgspec.structs.replace(heads, dim=1)
        yield scope.param("o.weight", scope.hidden, self.num_heads * self.v_dim, role="attention", place=(output,))
        if self.bias:
            yield scope.param("o.bias", scope.hidden, role="attention")
        if self.indexer is not None:
            assert self.q_lora_rank is not None, "an indexer reads the query's latent"
            yield from self.indexer.parameters(scope.into("indexer"), self.q_lora_rank)

    def words(self) -> str:
        """`MLA, 128 heads, latent 512+64, rope 10,000 (yarn x 40)`."""
        chosen = self.indexer and f"{self.indexer.topk:,} keys of {'an' if self.indexer.own else 'an earlier'} indexer"
        parts = (
            f"MLA, {self.num_heads} heads, latent {self.kv_lora_rank}+{self.rope_dim}",
            self.gated and "output gate",
            chosen,
            self.rope and self.rope.words(),
        )
        return ", ".join(part for part in parts if part)

    def operators(self) -> tuple[str, ...]:
        """Operators of kernels/ that a forward calls, beside linear and norms."""
        over = ("attention", "selective_attention") if self.indexer else ("attention",)
        return (*(("rotary",) if self.rope else ()), *over, "write_cache")

    def cache(self) -> CacheSpec:
        latent = CacheTensor(name="latent", heads=1, dim=self.kv_lora_rank + self.rope_dim, divided=False)
        if self.indexer is None or not self.indexer.own:
            return CacheSpec(tensors=(latent,))
        index = CacheTensor(name="index", heads=1, dim=self.indexer.head_dim, divided=False)
        return CacheSpec(tensors=(latent, index))
