"""Multi-head latent attention, as data. No torch."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from firstlight.engine.model.spec.cache import CacheSpec, CacheTensor
from firstlight.engine.model.spec.norm import Norm
from firstlight.engine.model.spec.param import Param, Scope
from firstlight.engine.model.spec.rope import Rope
from firstlight.engine.parallel.placement import Shard


class MLA(msgspec.Struct, frozen=True, kw_only=True, tag="mla"):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values come from one latent per token."""

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

    def parameters(self, scope: Scope) -> Iterator[Param]:
        heads = Shard(0, self.num_heads, unit_name="query heads")
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
        output = Shard(1, self.num_heads, unit_name="query heads")
        yield scope.param("o.weight", scope.hidden, self.num_heads * self.v_dim, role="attention", place=(output,))
        if self.bias:
            yield scope.param("o.bias", scope.hidden, role="attention")

    def words(self) -> str:
        """`MLA, 128 heads, latent 512+64, rope 10,000 (yarn x 40)`."""
        kind = f"MLA, {self.num_heads} heads, latent {self.kv_lora_rank}+{self.rope_dim}"
        return f"{kind}, {self.rope.words()}" if self.rope else kind

    def operators(self) -> tuple[str, ...]:
        """Operators of kernels/ that a forward calls, beside linear and norms."""
        return (*(("rotary",) if self.rope else ()), "attention", "write_cache")

    def cache(self) -> CacheSpec:
        latent = CacheTensor(name="latent", heads=1, dim=self.kv_lora_rank + self.rope_dim, divided=False)
        return CacheSpec(tensors=(latent,))
