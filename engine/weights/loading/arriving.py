"""Experts of a model that is still being read: those that tokens choose come before the others.

Their places are final from the start, so an operator multiplies by all of them as ever; before it does, whoever calls
it asks for the chosen ones (`need`). Once all are there, asking costs nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from firstlight.engine.parallel.pieces import Piece, Storage
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.loader import Filling
from firstlight.engine.weights.memory import Pool

Key = tuple[str, int]  # a site, as `layers.3.ffn.`, and the local number of an expert
ABSENT, COMING, THERE = range(3)
MOST_BYTES = 64 << 20  # of experts that are read in one go while tokens may choose others
GO_S = 0.1  # of reading: whoever chooses an expert waits no longer for one that nobody chose
QUIET_S = 1.0  # without a choice, a first pass that was begun does not go on


def is_expert(storage: Storage) -> bool:
    """Whether a storage holds matrices of experts, one behind the other along dim 0; biases are small and stay."""
    return storage.role == "expert" and len(storage.shape) == 3 and ".experts." in f".{storage.name}"


def sites_of(storages: Iterable[Storage]) -> dict[str, list[Storage]]:
    """Storages of experts by what they belong to: `layers.3.ffn.` has `experts.gate_up` and `experts.down`."""
    found: dict[str, list[Storage]] = {}
    for storage in storages:
        if is_expert(storage):
            found.setdefault(storage.name.rpartition("experts.")[0], []).append(storage)
    return found


def by_expert(pieces: Iterable[Piece], sites: Mapping[str, Sequence[Storage]]) -> dict[Key, list[Piece]]:
    """The pieces of each expert of each site."""
    site_of = {storage.name: site for site, storages in sites.items() for storage in storages}
    found: dict[Key, list[Piece]] = {}
    for piece in pieces:
        if piece.storage in site_of:
            assert piece.expert is not None, piece.param
            found.setdefault((site_of[piece.storage], piece.expert), []).append(piece)
    return found


class Arriving:
    """Experts that are read once, in the order of the forward pass unless tokens choose otherwise.

    One thread asks (`need`) and reads what it asked for; another one reads the rest (`fill`).
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        sites: Mapping[str, Sequence[Storage]],
        pieces: Mapping[Key, Sequence[Piece]],
        places: Mapping[str, Tensor],
        device: torch.device,
        pool: Pool,
        threads: int | None,
        told: Callable[[int], None],
    ) -> None:
        """`places`: storage name -> its tensor, all of it; `told` hears of every lot of bytes that was placed."""
        self._checkpoint, self._device, self._pool, self._threads = checkpoint, device, pool, threads
        self._sites, self._pieces, self._places, self._told = sites, pieces, places, told
        self._names = {storage.name for storages in sites.values() for storage in storages}
        self._counts = {site: storages[0].shape[0] for site, storages in sites.items()}
        self._states = {(site, one): ABSENT for site, count in self._counts.items() for one in range(count)}
        self._changed = threading.Condition()
        self._passes, self._asking, self._asked_s = 0, 0, 0.0
        self._failure: BaseException | None = None
        self._rate = 0.0  # bytes a second, of the last go
        self.is_whole = False
        self.chosen = 0  # experts that were read because a token chose them
        self.fetched_bytes = 0
        self.waited_s = 0.0

    def has(self, site: str) -> bool:
        return site in self._sites

    def holds(self, piece: Piece) -> bool:
        """Whether a piece is one of an expert's."""
        return piece.storage in self._names

    def has_storage(self, storage: Storage) -> bool:
        """Whether a storage is one of experts."""
        return storage.name in self._names

    def absent_bytes(self) -> int:
        """Memory of experts that are not there yet."""
        with self._changed:
            return sum(self._expert_bytes(site) for (site, _), state in self._states.items() if state != THERE)

    def begins_pass(self) -> None:
        """The model goes through its layers from here on."""
        with self._changed:
            self._passes += 1
            self._asked_s = time.monotonic()
            self._changed.notify_all()

    def need(self, site: str, ids_Tk: Tensor, first: int) -> None:
        """Return when all chosen experts of a site that are this rank's are there; raises what reading them raised.

        `ids_Tk` are global numbers, of which [first, first + E) are here.
        """
        if self.is_whole:
            return
        count = self._counts[site]
        wanted = [(site, one - first) for one in ids_Tk.unique().tolist() if 0 <= one - first < count]
        started_s = time.monotonic()
        with self._changed:
            absent = self._claim(key for key in wanted)
            if absent:
                self._asking += 1
        if absent:
            try:
                self._read(absent)
            finally:
                with self._changed:
                    self._asking -= 1
                    self.chosen += len(absent)
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._are_there(wanted))
            if self._failure is not None:
                raise self._failure
            self._asked_s = time.monotonic()
            self.waited_s += self._asked_s - started_s
            self._changed.notify_all()

    def fill(self, cancel: threading.Event, at_once: Callable[[], bool]) -> None:
        """Read all that nobody asked for; the first pass goes before, unless it is to wait for all of it (`at_once`).

        Raises what reading raises, which whoever asks is told as well.
        """
        left = list(self._states)
        try:
            while left and not cancel.is_set():
                self._let_pass(cancel, at_once)
                with self._changed:
                    left = [key for key in left if self._states[key] == ABSENT]
                    lot = self._claim(left[: len(left) if at_once() else self._lot()])
                if lot:
                    self._read(lot, cancel)
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            raise
        with self._changed:
            self._changed.wait_for(lambda: cancel.is_set() or COMING not in self._states.values())
            self.is_whole = self._are_there(self._states)

    def stop(self) -> None:
        """Whoever waits looks again at what ends it."""
        with self._changed:
            self._changed.notify_all()

    def check(self) -> None:
        """Assert what always holds between calls."""
        with self._changed:
            assert not self.is_whole or self._are_there(self._states), "an expert is missing"

    def _let_pass(self, cancel: threading.Event, at_once: Callable[[], bool]) -> None:
        """Stand back while the first pass is under way: what it waits for is not what would be read here."""
        with self._changed:
            while not (cancel.is_set() or at_once() or self._passes != 1):
                quiet_s = time.monotonic() - self._asked_s
                if not self._asking and quiet_s >= QUIET_S:
                    return
                self._changed.wait(max(QUIET_S - quiet_s, 0.01))

    def _lot(self) -> int:
        """How many experts are read in one go: what takes no longer than somebody who chooses another may wait."""
        a_go = min(MOST_BYTES, int(self._rate * GO_S))
        return max(1, a_go // max(1, max(map(self._expert_bytes, self._sites))))

    def _expert_bytes(self, site: str) -> int:
        return sum(storage.nbytes // storage.shape[0] for storage in self._sites[site])

    def _claim(self, keys: Iterable[Key]) -> list[Key]:
        """Those that nobody has begun to read; from now on whoever asked does."""
        absent = [key for key in keys if self._states[key] == ABSENT]
        self._states.update(dict.fromkeys(absent, COMING))
        return absent

    def _are_there(self, keys: Iterable[Key]) -> bool:
        return all(self._states[key] == THERE for key in keys)

    def _read(self, keys: Sequence[Key], cancel: threading.Event | None = None) -> None:
        """Read claimed experts into their places; those whose reading failed are not there."""
        described = [storage for site in dict.fromkeys(site for site, _ in keys) for storage in self._sites[site]]
        pieces = [piece for key in keys for piece in self._pieces.get(key, ())]
        filling = Filling(self._checkpoint, described, pieces, self._places, self._device, self._pool)
        started_s, state, read_bytes = time.monotonic(), ABSENT, 0
        try:
            for _, nbytes in filling.carry_out(self._threads, cancel):
                read_bytes += nbytes
                self._told(nbytes)
            state = THERE
        finally:
            with self._changed:
                self._states.update(dict.fromkeys(keys, state))
                self.fetched_bytes += read_bytes
                self._rate = read_bytes / max(time.monotonic() - started_s, 1e-6)
                self._changed.notify_all()
