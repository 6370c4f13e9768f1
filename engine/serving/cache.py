"""Pages of the cache: who holds which, on the host, and the memory behind them, reserved at start.

Legend: P pages, K heads held here, S page size, D dim.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from firstlight.engine.model.spec import CacheSpec
    from firstlight.engine.weights.memory import PoolReport


class PageAllocator:
    """Free and taken pages, by number. The lowest free pages are given first, so that those in use stay together.

    Only `take` and `give_back` change it.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert min(num_pages, page_size) > 0, (num_pages, page_size)
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """How many pages hold that many tokens."""
        return -(-tokens // self.page_size)

    def take(self, count: int) -> tuple[int, ...]:
        """`count` pages, in ascending order; asking for more than `num_free` is our own mistake."""
        assert count <= len(self._free), f"{count} pages asked, {len(self._free)} free"
        pages = tuple(heapq.heappop(self._free) for _ in range(count))
        self._taken.update(pages)
        return pages

    def give_back(self, pages: Iterable[int]) -> None:
        """Return pages that `take` gave."""
        for page in pages:
            self._taken.remove(page)
            heapq.heappush(self._free, page)

    def check(self) -> None:
        """Assert that every page is either free or taken, once."""
        assert len(self._free) == len(set(self._free)), "a page is free twice"
        assert not self._taken & set(self._free), "a page is both free and taken"
        assert len(self._free) + len(self._taken) == self.num_pages, "a page is lost"


class KVCache:
    """The memory of all pages for this rank's layers: zeros at start, never grown, never returned.

    `layers[i]` holds the tensors of local layer i in the order of its `CacheSpec`, each [P, K, S, D].
    """

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        num_pages: int,
        page_size: int,
        tp: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        from firstlight.engine.weights.memory import Pool, aligned

        shapes = [
            [(num_pages, tensor.local_heads(tp), page_size, tensor.dim) for tensor in spec.tensors] for spec in specs
        ]
        sizes = [aligned(p * k * s * d * dtype.itemsize) for layer in shapes for p, k, s, d in layer]
        self.pool = Pool.reserve(sum(sizes), "cache", device)
        self.layers: tuple[tuple[torch.Tensor, ...], ...] = tuple(
            tuple(self.pool.take(shape, dtype) for shape in layer) for layer in shapes
        )
        if device.type != "cpu":  # on CPUs the pool is zero already
            for layer in self.layers:
                for tensor in layer:
                    tensor.zero_()

    def report(self) -> PoolReport:
        return self.pool.report()


def cache_bytes_per_token(specs: Iterable[CacheSpec], tp: int, itemsize: int) -> int:
    """Bytes that one token takes in the cache of the given layers on one rank."""
    return sum(t.local_heads(tp) * t.dim * itemsize for spec in specs for t in spec.tensors)
