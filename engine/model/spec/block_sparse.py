"""Attention over blocks of keys that an indexer selects (MiniMax-M3, arXiv 2606.13392), as data. No torch."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from firstlight.engine.model.spec.cache import CacheTensor
from firstlight.engine.model.spec.norm import Norm
from firstlight.engine.model.spec.param import Param, Scope
from firstlight.engine.model.spec.rope import Rope


class BlockIndexer(msgspec.Struct, frozen=True, kw_only=True):
    """Which `topk` blocks of `block` keys a query attends to; every index head chooses for its share of the heads.

    A block counts as much as the best of its keys, q_h(t) k(s); the last `local` blocks up to the query's own are
    always among those chosen. The indexer's keys, one a token, are cached beside the layer's.
    """

    num_heads: int
    head_dim: int
    block: int
    topk: int
    local: int
    norm: Norm
    rope: Rope | None

    def parameters(self, scope: Scope) -> Iterator[Param]:
        """Every rank has all of it."""
        yield scope.param("q.weight", self.num_heads * self.head_dim, scope.hidden, role="attention")
        yield scope.param("k.weight", self.head_dim, scope.hidden, role="attention")
        yield from self.norm.parameters(scope.into("q_norm"), self.head_dim)
        yield from self.norm.parameters(scope.into("k_norm"), self.head_dim)

    def tensor(self) -> CacheTensor:
        """Its keys in the cache."""
        return CacheTensor(name="index", heads=1, dim=self.head_dim, divided=False)

    def words(self) -> str:
        return f"{self.topk} blocks of {self.block:,} keys by an indexer"
