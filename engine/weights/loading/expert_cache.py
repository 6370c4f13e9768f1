"""Loads experts on demand into a memory budget, evicting those used least recently.

Legend: T tokens, k chosen experts, M rows of a token and one of its experts, C experts that have room, H hidden.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from firstlight.engine.parallel.pieces import Piece, Storage
from firstlight.engine.weights.loader import Filling
from firstlight.engine.weights.loading import room
from firstlight.engine.weights.loading.placing import STORED_DTYPES
from firstlight.engine.weights.loading.residency import ResidencyReport
from firstlight.engine.weights.loading.room import Coming, Experts, Signature, in_one, leaf_of, of_one
from firstlight.engine.weights.loading.slots import zero_padding
from firstlight.engine.weights.loading.untouched import Untouched
from firstlight.engine.weights.memory import Pool

MOST_ROWS = 4096  # of one product: what a long prefill takes beside the weights is bounded

# Places [M] in [T, k] counted through, the slot of each [M, 1], tensors of slots [C, ...] by name, the expert in each
# slot [C] -> what each place contributes to its token [M, H], float32.
Call = Callable[[Tensor, Tensor, dict[str, Tensor], Tensor], Tensor]


class ExpertCache:
    """A rank's experts of all layers in a limited number of slots; the least recently used one is evicted.

    Layers whose experts have equal shapes share slots; between others slots are divided by size.
    """

    def __init__(self, coming: Coming) -> None:
        """Raises `Refused` where not one expert of each kind has room, on this rank or on another."""
        self._coming, self._owned = coming, Experts(coming)
        self._untouched = Untouched(coming.checkpoint, coming.pieces.pieces)
        self._lock = threading.Lock()
        self._banks: dict[str, _Bank] = {}
        counts = self._owned.slots()
        nbytes = sum(self._owned.nbytes(kind) * count for kind, count in counts.items())
        self._pool = Pool.reserve(nbytes, "experts", coming.device, wait=False)
        for kind, sites in self._owned.kinds.items():
            bank = _Bank(self._pool, kind, counts[kind])
            self._banks.update(dict.fromkeys(sites, bank))
        self._hits = self._misses = self._fetched_bytes = 0
        self._waited_s = 0.0

    @property
    def pool(self) -> Pool:
        return self._pool

    def has(self, site: str) -> bool:
        return site in self._banks

    def experts(self, site: str) -> int:
        """How many experts of a site belong to this rank, in memory or not."""
        return self._owned.count(site)

    def routed(self, site: str, ids_Tk: Tensor, first: int, call: Call) -> Tensor:
        """The sum [T, H], float32, of what the experts that tokens chose contribute, in as many goes as there must be.

        `ids_Tk` are global numbers, of which [first, first + E) are here. Contributions are added one expert after the
        other, by number, as where all are in memory: how many have room changes no bit of the sum.
        """
        bank, count = self._banks[site], self.experts(site)
        places: dict[int, list[int]] = {}
        for place, expert in enumerate((ids_Tk - first).flatten().tolist()):
            if 0 <= expert < count:
                places.setdefault(expert, []).append(place)
        sum_TH: Tensor | None = None
        for group in _goes(places, bank.size):
            slots = self.hold(site, group)
            rows = [len(places[one]) for one in group]
            place_M = torch.tensor([place for one in group for place in places[one]], dtype=torch.int64)
            rows_of = torch.tensor(rows, dtype=torch.int64)  # said, for none of the chosen experts may be here
            slot_M1 = torch.tensor(slots, dtype=ids_Tk.dtype).repeat_interleave(rows_of, dim=0)[:, None]
            place_M, slot_M1 = place_M.to(ids_Tk.device), slot_M1.to(ids_Tk.device)
            part_MH = call(place_M, slot_M1, bank.tensors, bank.experts_of(site))
            if sum_TH is None:
                sum_TH = part_MH.new_zeros(ids_Tk.shape[0], part_MH.shape[1])
            token_M = place_M // ids_Tk.shape[1]
            for token, part in zip(token_M.split(rows), part_MH.split(rows), strict=True):
                sum_TH.index_add_(0, token, part)
        assert sum_TH is not None
        return sum_TH

    def hold(self, site: str, experts: Sequence[int]) -> list[int]:
        """Slots with these experts of a site, by local number; all of them stay until the next call."""
        bank = self._banks[site]
        assert len(experts) <= bank.size, "more experts than there is room for"
        if self._coming.device.type == "cuda":  # what was computed from those that leave must be done
            torch.cuda.current_stream(self._coming.device).synchronize()
        started_s = time.perf_counter()
        with self._lock:
            absent = bank.touch(site, experts)
            self._hits, self._misses = self._hits + len(experts) - len(absent), self._misses + len(absent)
            if absent:
                self._fetch(site, bank, absent)
                self._waited_s += time.perf_counter() - started_s
            return [bank.where[site, one] for one in experts]

    def report(self) -> ResidencyReport:
        banks = {id(bank): bank for bank in self._banks.values()}.values()
        return ResidencyReport(
            kind="experts",
            budget_bytes=self._coming.budget_bytes,
            held_bytes=self._coming.other_bytes + self._pool.reserved_bytes + self._owned.staging_bytes,
            whole_bytes=self._coming.pieces.nbytes,
            units=sum(bank.size for bank in banks),
            pinned=0,
            ahead=0,
            hits=self._hits,
            misses=self._misses,
            waited_s=self._waited_s,
            fetched_bytes=self._fetched_bytes,
            fetch_s=self._waited_s,
        )

    def check(self) -> None:
        """Assert what always holds between calls."""
        for bank in self._banks.values():
            bank.check()

    def close(self) -> None:
        """Ends background work; only the backing of memory may continue."""
        self._pool.stop()

    def _fetch(self, site: str, bank: _Bank, absent: Sequence[int]) -> None:
        """Reads experts into slots; a slot whose read failed is empty."""
        storages: dict[str, Tensor] = {}
        pieces: list[Piece] = []
        described: list[Storage] = []
        whole = self._owned.sites[site]
        for expert in absent:
            slot = bank.take(site, expert)
            for storage in whole:
                name = f"{storage.name}.{expert}"
                storages[name] = bank.tensors[leaf_of(site, storage)][slot]
                described.append(of_one(storage, name))
            own = [in_one(piece, f"{piece.storage}.{expert}") for piece in self._owned.pieces[site, expert]]
            zero_padding(own, described[-len(whole) :], storages)
            pieces += own
        coming = self._coming
        filling = Filling(coming.checkpoint, described, pieces, storages, coming.device, self._pool)
        ahead_bytes = (self._owned.staging_bytes or room.STAGING_BYTES) // 2
        try:
            for _, nbytes in filling.carry_out(coming.threads, ahead_bytes=ahead_bytes):
                self._fetched_bytes += nbytes
            self._untouched.check(pieces)
        except BaseException:
            bank.forget(site, absent)
            raise


class _Bank:
    """Slots for experts of one kind: tensors [C, ...] by leaf name, and which expert is where, the oldest first."""

    def __init__(self, pool: Pool, signature: Signature, size: int) -> None:
        self.size = size
        self.tensors = {leaf: pool.take((size, *shape), STORED_DTYPES[dtype]) for leaf, shape, dtype in signature}
        self.where: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._free = list(range(size))

    def touch(self, site: str, experts: Sequence[int]) -> list[int]:
        """Marks these experts as most recently used; returns those that are not in memory."""
        for expert in experts:
            if (site, expert) in self.where:
                self.where.move_to_end((site, expert))
        return [expert for expert in experts if (site, expert) not in self.where]

    def take(self, site: str, expert: int) -> int:
        """A slot for an expert: a free one, or that of the least recently used expert."""
        slot = self._free.pop() if self._free else self.where.popitem(last=False)[1]
        self.where[site, expert] = slot
        return slot

    def forget(self, site: str, experts: Sequence[int]) -> None:
        for expert in experts:
            slot = self.where.pop((site, expert), None)
            if slot is not None:
                self._free.append(slot)

    def experts_of(self, site: str) -> Tensor:
        """The local number of the expert of a site in each slot [C]; 0 where there is another's or none."""
        found = torch.zeros(self.size, dtype=torch.int64)
        for (owner, expert), slot in self.where.items():
            if owner == site:
                found[slot] = expert
        return found

    def check(self) -> None:
        taken = [*self.where.values(), *self._free]
        assert len(taken) == len(set(taken)) == self.size, "a slot is held twice or lost"


def _goes(places: dict[int, list[int]], size: int) -> Iterator[list[int]]:
    """Experts in order, `size` of them at once and no more rows than one product takes; one empty go for none."""
    group: list[int] = []
    rows = 0
    for expert in sorted(places):
        if group and (len(group) == size or rows + len(places[expert]) > MOST_ROWS):
            yield group
            group, rows = [], 0
        group.append(expert)
        rows += len(places[expert])
    yield group
