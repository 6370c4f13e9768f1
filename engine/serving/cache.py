"""Pages of the cache: who holds which, on the host, and the memory behind them, reserved at start.

Legend: P pages, K heads held here, S page size, D dim.
"""

from __future__ import annotations

import heapq
import math
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
    """The memory of all pages and states for this rank's layers: zeros at start, never grown, never returned.

    `layers[i]` holds the tensors of local layer i in the order of its `CacheSpec`: [P, K, S, D] each for what is kept
    per token, then [slots, ...] each for what is kept per sequence. `ranks`: those that heads are divided over.
    """

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        num_pages: int,
        page_size: int,
        num_slots: int,
        ranks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        from firstlight.engine.weights.memory import Pool, aligned

        self._specs, self._ranks, self._dtype, self._device = tuple(specs), ranks, dtype, device
        shapes = self._shapes(num_pages, page_size, num_slots)
        sizes = [aligned(math.prod(shape) * kind.itemsize) for layer in shapes for shape, kind in layer]
        self.pool = Pool.reserve(sum(sizes), "cache", device)
        self.layers: tuple[tuple[torch.Tensor, ...], ...] = tuple(
            tuple(self.pool.take(shape, kind) for shape, kind in layer) for layer in shapes
        )
        if device.type != "cpu":  # on CPUs the pool is zero already
            for layer in self.layers:
                for tensor in layer:
                    tensor.zero_()

    def small(self, num_pages: int, page_size: int, num_slots: int) -> tuple[tuple[torch.Tensor, ...], ...]:
        """Layers of another size with memory of their own, all zero: for a trace or a measurement beside serving."""
        import torch

        return tuple(
            tuple(torch.zeros(shape, dtype=kind, device=self._device) for shape, kind in layer)
            for layer in self._shapes(num_pages, page_size, num_slots)
        )

    def _shapes(
        self, num_pages: int, page_size: int, num_slots: int
    ) -> list[list[tuple[tuple[int, ...], torch.dtype]]]:
        from firstlight.engine.weights.loader import TORCH_DTYPES

        return [
            [
                ((num_pages, t.local_heads(self._ranks), -(-page_size // t.every), t.dim), self._dtype)
                for t in spec.tensors
            ]
            + [
                ((num_slots, *s.local_shape(self._ranks)), TORCH_DTYPES[s.dtype] if s.dtype else self._dtype)
                for s in spec.states
            ]
            for spec in self._specs
        ]

    def report(self) -> PoolReport:
        return self.pool.report()


def cache_bytes_per_token(specs: Iterable[CacheSpec], ranks: int, itemsize: int) -> int:
    """Bytes that one token takes in the cache of the given layers on one rank; shared entries are rounded up."""
    return sum(-(-t.local_heads(ranks) * t.dim // t.every) * itemsize for spec in specs for t in spec.tensors)


def state_bytes_per_sequence(specs: Iterable[CacheSpec], ranks: int, itemsize: int) -> int:
    """Bytes of state that one sequence has on one rank in the given layers."""
    return sum(spec.state_bytes(itemsize, ranks) for spec in specs)
