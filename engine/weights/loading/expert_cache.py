"""Loads experts on demand into a memory budget, evicting those that will be wanted last (`forecast.py`).

Legend: T tokens, k chosen experts, M rows of a token and one of its experts, C experts that have room, H hidden.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from firstlight.engine.parallel.pieces import Piece, Storage
from firstlight.engine.weights.loader import Filling
from firstlight.engine.weights.loading import room
from firstlight.engine.weights.loading.forecast import Forecast
from firstlight.engine.weights.loading.placing import STORED_DTYPES
from firstlight.engine.weights.loading.residency import ResidencyReport
from firstlight.engine.weights.loading.room import Coming, Experts, Signature, in_one, leaf_of, of_one
from firstlight.engine.weights.loading.slots import zero_padding
from firstlight.engine.weights.loading.untouched import Untouched
from firstlight.engine.weights.memory import Pool

MOST_ROWS = 4096  # of one product: what a long prefill takes beside the weights is bounded
GO_SHARE = 4  # of the slots a quarter are read into in one go: the others keep what is wanted later

# Places [M] in [T, k] counted through, the slot of each [M, 1], tensors of slots [C, ...] by name, the expert in each
# slot [C] -> what each place contributes to its token [M, H], float32.
Call = Callable[[Tensor, Tensor, dict[str, Tensor], Tensor], Tensor]


class ExpertCache:
    """A rank's experts of all layers in a limited number of slots; the one that will be wanted last is evicted.

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
            bank = _Bank(self._pool, kind, counts[kind], {site: self.experts(site) for site in sites})
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
        wanted, is_first = sorted(places), True
        bank.forecast.turn(site, wanted)
        while wanted or is_first:  # one empty go for none
            group = bank.go(site, wanted, places)
            wanted, is_first = wanted[len(group) :], False
            slots = self.hold(site, group, wanted)
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

    def hold(self, site: str, experts: Sequence[int], to_come: Sequence[int] = ()) -> list[int]:
        """Slots with these experts of a site, by local number; all of them stay until the next call.

        Those `to_come`, in order, leave only where all others have left.
        """
        bank = self._banks[site]
        assert len(experts) <= bank.size, "more experts than there is room for"
        if self._coming.device.type == "cuda":  # what was computed from those that leave must be done
            torch.cuda.current_stream(self._coming.device).synchronize()
        started_s = time.perf_counter()
        with self._lock:
            absent = [one for one in experts if (site, one) not in bank.where]
            self._hits, self._misses = self._hits + len(experts) - len(absent), self._misses + len(absent)
            if absent:
                self._fetch(site, bank, dict(zip(absent, bank.make_room(site, experts, to_come), strict=True)))
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

    def _fetch(self, site: str, bank: _Bank, slots: Mapping[int, int]) -> None:
        """Reads experts into the slots they are given; a slot whose read failed is empty."""
        storages: dict[str, Tensor] = {}
        pieces: list[Piece] = []
        described: list[Storage] = []
        whole = self._owned.sites[site]
        for expert, slot in slots.items():
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
            bank.give_back(slots.values())
            raise
        bank.where.update(((site, expert), slot) for expert, slot in slots.items())


class _Bank:
    """Slots for experts of one kind: tensors [C, ...] by leaf name, and which expert is where."""

    def __init__(self, pool: Pool, signature: Signature, size: int, counts: Mapping[str, int]) -> None:
        self.size = size
        self.tensors = {leaf: pool.take((size, *shape), STORED_DTYPES[dtype]) for leaf, shape, dtype in signature}
        self.where: dict[tuple[str, int], int] = {}
        self.forecast = Forecast(counts)
        self._free = list(range(size))

    def go(self, site: str, wanted: Sequence[int], places: Mapping[int, Sequence[int]]) -> list[int]:
        """Of the experts that are wanted, in order, those that come first and are computed with at once.

        They are no more than are there or can be read without one that is wanted having to leave, and have no more
        rows than one product takes.
        """
        there = sum((site, one) in self.where for one in wanted)
        left = max(len(self._free), min(self.size - there, max(1, self.size // GO_SHARE)))
        found: list[int] = []
        rows = 0
        for expert in wanted:
            is_absent = (site, expert) not in self.where
            if len(found) == self.size or (found and is_absent and left <= 0):
                break
            if found and rows + len(places[expert]) > MOST_ROWS:
                break
            left -= is_absent
            found.append(expert)
            rows += len(places[expert])
        return found

    def make_room(self, site: str, experts: Sequence[int], to_come: Sequence[int]) -> list[int]:
        """Slots for those of these experts that are not there, free from now on; others leave for them.

        None of `experts` does, and of those `to_come` the last one does first, after all others.
        """
        count = sum((site, one) not in self.where for one in experts)
        slots = [self._free.pop() for _ in range(min(count, len(self._free)))]
        left = count - len(slots)
        if left:
            stay, later = set(experts), {one: place for place, one in enumerate(to_come)}
            may = [owner for owner in self.where if owner[0] != site or owner[1] not in stay]
            wait_C = self.forecast.waits(site, may)
            for at, (owner, expert) in enumerate(may):
                if owner == site and expert in later:
                    wait_C[at] = later[expert] / len(to_come)  # less than any turn that is to come
            slots += [self.where.pop(may[at]) for at in np.argsort(-wait_C, kind="stable")[:left]]
        return slots

    def give_back(self, slots: Iterable[int]) -> None:
        """Nothing is in these slots."""
        self._free += slots

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
