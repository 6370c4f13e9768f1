"""Residency policies: weights fully resident, layers streamed through a memory budget, or experts on demand.

Whatever is not a layer (embedding, head, norms, vision) or, with experts on demand, not an expert, is always there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
import torch
from torch import Tensor

from firstlight.engine.parallel.pieces import Piece, Storage
from firstlight.engine.weights.loader import AHEAD_BYTES, Filling
from firstlight.engine.weights.loading import room
from firstlight.engine.weights.loading.arriving import Arriving, by_expert, sites_of
from firstlight.engine.weights.loading.overlap import ENOUGH_BYTES, ENOUGH_S, Overlap
from firstlight.engine.weights.loading.pages import aligned
from firstlight.engine.weights.loading.room import Coming, Layers
from firstlight.engine.weights.loading.slots import views, zero_padding
from firstlight.engine.weights.loading.threads import await_end
from firstlight.engine.weights.loading.untouched import Untouched
from firstlight.engine.weights.memory import Pool

Built = TypeVar("Built")

AHEAD = 1  # layers that are read ahead at first
MOST_AHEAD = 4


class ResidencyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was in memory and what had to be waited for.

    `held_bytes` is memory for weights, staging included, of `budget_bytes` (None: no budget) for `whole_bytes` of them.
    `units` layers or experts fit at once, of which `pinned` never leave. A hit was there when it was wanted, a miss had
    to be waited for, `waited_s` in all; `fetched_bytes` were read in `fetch_s`. `start` says in words whether layers
    ran while others were read, and why; empty with a budget.
    """

    kind: str
    budget_bytes: int | None
    held_bytes: int
    whole_bytes: int
    units: int
    pinned: int
    ahead: int
    hits: int
    misses: int
    waited_s: float
    fetched_bytes: int
    fetch_s: float
    start: str = ""


class LayerStream:
    """Layers in slots of equal size: some stay, the others follow one another, read ahead in the background.

    With room for every layer all of them stay: then the first pass runs while the layers behind it are being read, and
    of layers with experts those come first that tokens choose (`arriving`). One thread asks (`turn_to`), in whatever
    order; what is read ahead is what the forward pass wants next, round and round.
    """

    def __init__(self, coming: Coming, late: Sequence[Storage] = (), late_pieces: Sequence[Piece] = ()) -> None:
        """`late` come behind the layers, where there is room for all (`behind`), from `late_pieces`.

        Raises `Refused` where not even two layers have room, on this rank or on another.
        """
        self._coming, self._layers = coming, Layers(coming)
        self._late, self._late_pieces, self._is_late_there = late, late_pieces, not late
        count = self._layers.slots()
        self._reserve(count)
        self._free = list(range(count))
        self._ahead = 0 if count == len(self._range) else min(AHEAD, count - 1)
        self._pinned = set(_spread(self._range, count if not self._ahead else count - 1 - self._ahead))
        self._where: dict[int, int] = {}  # layer -> slot, of what is there
        self._fetch_counts: dict[int, int] = {}
        self._fetching: int | None = None
        self._turn, self._using = self._range.start, -1
        self._changed = threading.Condition()
        self._cancel = threading.Event()
        self._failure: BaseException | None = None
        self._counts = _Counts()
        self._pass_waited = 0
        self._untouched = Untouched(coming.checkpoint, coming.pieces.pieces)
        self.start = ""  # whether layers ran while others were read, and why
        self._is_awaited = self._is_over = False  # by `settle`: all of it is to come first; nothing is left to read
        self.arriving = self._experts() if coming.budget_bytes is None else None
        self._thread = threading.Thread(target=self._fetch_all, name="layers", daemon=True)

    def _reserve(self, count: int) -> None:
        """Memory for so many layers, and for what comes behind them."""
        slot_bytes, late_bytes = self._layers.slot_bytes, sum(aligned(storage.nbytes) for storage in self._late)
        self._pool = Pool.reserve(count * slot_bytes + late_bytes, "layers", self._coming.device, wait=False)
        self._slots = [self._pool.take((slot_bytes,), torch.uint8) for _ in range(count)]
        self._late_slot = self._pool.take((late_bytes,), torch.uint8)

    def begin(self) -> None:
        """Fetch from here on, in the background; called once."""
        self._thread.start()

    def settle(self, overlap: Overlap, other_bytes: int) -> None:
        """Return soon, or when everything is there, whichever brings the first token sooner; raises what reading does.

        `other_bytes` were read beside the layers since `overlap` began.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_over or self._counts.taken_bytes + other_bytes >= ENOUGH_BYTES,
                overlap.left_s(ENOUGH_S),
            )
            runs, self.start = overlap.judge(self._counts.taken_bytes + other_bytes)
            self._is_awaited = not runs
            if self.arriving is not None:
                self.arriving.stop()
            if self._is_awaited:
                self._changed.wait_for(lambda: self._is_over)
            if self._failure is not None:
                raise self._failure

    @property
    def pool(self) -> Pool:
        return self._pool

    def turn_to(self, layer: int) -> tuple[int, dict[str, Tensor]]:
        """How often a layer was fetched so far, and its storages, which stay as they are until the next call."""
        if self._coming.device.type == "cuda":  # what was computed from the layer before must be done before it may go
            torch.cuda.current_stream(self._coming.device).synchronize()
        with self._changed:
            if layer <= self._turn:
                if self._using >= 0:
                    self._end_of_pass()
                if self.arriving is not None:
                    self.arriving.begins_pass()
            self._turn = self._using = layer
            there = layer in self._where
            self._counts.asked(there)
            self._pass_waited += not there
            self._changed.notify_all()
            if not there:
                started_s = time.perf_counter()
                self._changed.wait_for(lambda: layer in self._where or self._failure is not None)
                self._counts.waited_s += time.perf_counter() - started_s
            if self._failure is not None:
                raise self._failure
            slot = self._where[layer]
            return self._fetch_counts[layer], self._views(layer, slot)

    def behind(self) -> dict[str, Tensor]:
        """Storages that come behind the layers, once they are there."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_late_there or self._failure is not None)
            if self._failure is not None:
                raise self._failure
        return views(self._late_slot, self._late)

    @property
    def is_all_there(self) -> bool:
        """Whether nothing is left to read, and nothing that was read goes."""
        return self._is_over and not self._ahead and self._failure is None

    def layers(self, build: Callable[[Mapping[str, Tensor], int], Built]) -> Turning[Built]:
        """The layers as a sequence that turns to each one that is asked for; `build` makes one of its storages."""
        return Turning(self, self._range, build)

    def is_there(self, layer: int) -> bool:
        return layer in self._where

    def report(self) -> ResidencyReport:
        counts, arriving = self._counts, self.arriving
        with self._changed:
            return ResidencyReport(
                kind="streamed",
                budget_bytes=self._coming.budget_bytes,
                held_bytes=self._coming.other_bytes + self._pool.reserved_bytes + self._layers.staging_bytes,
                whole_bytes=self.whole_bytes,
                units=len(self._slots),
                pinned=len(self._pinned),
                ahead=self._ahead,
                hits=counts.hits,
                misses=counts.misses,
                waited_s=counts.waited_s + (arriving.waited_s if arriving else 0.0),
                fetched_bytes=counts.fetched_bytes + (arriving.fetched_bytes if arriving else 0),
                fetch_s=counts.fetch_s,
                start=self.start,
            )

    @property
    def whole_bytes(self) -> int:
        """What all weights of this rank take in memory."""
        return self._coming.pieces.nbytes

    def there_bytes(self) -> int:
        """What of it is in its place now."""
        with self._changed:
            late = sum(storage.nbytes for storage in self._late if not self._is_late_there)
            absent = sum(
                storage.nbytes
                for layer in self._range
                for storage in self._layers.storages[layer]
                if layer not in self._where and (self.arriving is None or not self.arriving.has_storage(storage))
            )
            return self.whole_bytes - late - absent - (self.arriving.absent_bytes() if self.arriving else 0)

    def check(self) -> None:
        """Assert what always holds between calls."""
        with self._changed:
            taken = [*self._where.values(), *self._free]
            assert len(taken) == len(set(taken)), "a slot is held twice"
            assert len(taken) + (self._fetching is not None) == len(self._slots), "a slot is lost"
            assert self._using < 0 or self._using in self._where, "the layer in use is gone"

    def close(self) -> None:
        """Fetch no more; returns when nothing is written into the slots any longer."""
        self._cancel.set()
        with self._changed:
            self._changed.notify_all()
        if self.arriving is not None:
            self.arriving.stop()
        await_end(self._thread)
        self._pool.stop()

    @property
    def _range(self) -> range:
        return self._layers.range

    def _fetch_all(self) -> None:
        """The background thread: all layers in order, or whatever is wanted next, as long as there is a slot for it."""
        try:
            if not self._ahead:
                self._fetch_each_once()
            else:
                self._fetch_as_wanted()
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the layer
            self._failure = error
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _fetch_each_once(self) -> None:
        """There is room for all: one load, of which each layer is used as soon as it is there."""
        places = dict(zip(self._range, range(len(self._slots)), strict=True))
        storages: dict[str, Tensor] = {}
        for layer, slot in places.items():
            own = self._views(layer, slot)
            zero_padding(self._layers.pieces.get(layer, ()), self._layers.storages[layer], own)
            storages |= own
        described = [one for layer in self._range for one in self._layers.storages[layer]]
        pieces = [piece for piece in self._all_pieces() if self.arriving is None or not self.arriving.holds(piece)]
        filling = self._filling(described, pieces, storages)
        started_s, read_bytes, coming = time.perf_counter(), 0, iter(self._range)
        layer = next(coming)
        ahead_bytes = AHEAD_BYTES if self._coming.budget_bytes is None else room.STAGING_BYTES // 2
        for of, nbytes in filling.carry_out(self._coming.threads, self._cancel, ahead_bytes, by_layer=True):
            while layer != of:
                self._arrived(layer, places[layer], read_bytes, time.perf_counter() - started_s)
                started_s, read_bytes, layer = time.perf_counter(), 0, next(coming)
            read_bytes += nbytes
            self._placed(nbytes)
        for last in (layer, *coming):
            self._arrived(last, places[last], read_bytes, time.perf_counter() - started_s)
            started_s, read_bytes = time.perf_counter(), 0
        self._fetch_late()
        if self.arriving is not None:
            self.arriving.fill(self._cancel, lambda: self._is_awaited)
        self._untouched.check()

    def _fetch_late(self) -> None:
        storages = views(self._late_slot, self._late)
        zero_padding(self._late_pieces, self._late, storages)
        filling = self._filling(self._late, self._late_pieces, storages)
        for _, nbytes in filling.carry_out(self._coming.threads, self._cancel):
            self._placed(nbytes)
            self._counts.fetched_bytes += nbytes
        with self._changed:
            self._is_late_there = True
            self._changed.notify_all()

    def _placed(self, nbytes: int) -> None:
        with self._changed:
            self._counts.taken_bytes += nbytes
            self._changed.notify_all()
        self._coming.told(nbytes)

    def _arrived(self, layer: int, slot: int, read_bytes: int, took_s: float) -> None:
        with self._changed:
            self._where[layer], self._fetching = slot, None
            if slot in self._free:
                self._free.remove(slot)
            self._fetch_counts[layer] = self._fetch_counts.get(layer, 0) + 1
            self._counts.fetched_bytes += read_bytes
            self._counts.fetch_s += took_s
            self._changed.notify_all()

    def _fetch_as_wanted(self) -> None:
        while True:
            with self._changed:
                found: tuple[int, int] | None = None
                while not self._cancel.is_set() and (found := self._next()) is None:
                    self._changed.wait()
                if found is None:
                    return
                layer, slot = found
                self._fetching = layer
            started_s = time.perf_counter()
            read_bytes = self._fetch(layer, slot)
            self._arrived(layer, slot, read_bytes, time.perf_counter() - started_s)

    def _next(self) -> tuple[int, int] | None:
        """The layer to fetch and a slot for it: free, or that of a layer whose turn comes later than its own."""
        for layer in sorted(self._range, key=self._distance):
            if layer in self._where:
                continue
            if self._free:
                return layer, self._free.pop()
            victims = [one for one in self._where if one not in self._pinned and one != self._using]
            victim = max(victims, key=self._distance, default=None)
            if victim is None or self._distance(victim) <= self._distance(layer):
                return None
            return layer, self._where.pop(victim)
        return None

    def _distance(self, layer: int) -> int:
        """How many turns from now on a layer is wanted, round and round."""
        return (layer - self._turn) % len(self._range)

    def _fetch(self, layer: int, slot: int) -> int:
        storages, pieces = self._views(layer, slot), self._layers.pieces[layer]
        zero_padding(pieces, self._layers.storages[layer], storages)
        filling = self._filling(self._layers.storages[layer], pieces, storages)
        read_bytes = 0
        for _, nbytes in filling.carry_out(self._coming.threads, self._cancel, room.STAGING_BYTES // 2):
            read_bytes += nbytes
            self._coming.told(nbytes)
        self._untouched.check(pieces)
        return read_bytes

    def _experts(self) -> Arriving | None:
        """The experts of all layers, where tokens may choose which of them come first."""
        coming, pieces = self._coming, self._all_pieces()
        sites = sites_of(one for layer in self._range for one in self._layers.storages[layer])
        if not sites or any(piece.role == "order" for piece in pieces):
            return None  # an order of inputs is looked at when an operator is made, which is before any token
        places: dict[str, Tensor] = {}
        for layer, slot in zip(self._range, range(len(self._slots)), strict=True):
            places |= self._views(layer, slot)
        own = by_expert(pieces, sites)
        return Arriving(coming.checkpoint, sites, own, places, coming.device, self._pool, coming.threads, self._placed)

    def _all_pieces(self) -> list[Piece]:
        return [piece for layer in self._range for piece in self._layers.pieces.get(layer, ())]

    def _filling(self, described: Sequence[Storage], pieces: Sequence[Piece], into: Mapping[str, Tensor]) -> Filling:
        return Filling(self._coming.checkpoint, described, pieces, into, self._coming.device, self._pool)

    def _views(self, layer: int, slot: int) -> dict[str, Tensor]:
        return views(self._slots[slot], self._layers.storages[layer])

    def _end_of_pass(self) -> None:
        """Read further ahead where some layers were waited for and some were not; one layer less stays then."""
        streamed = len(self._range) - len(self._pinned)
        if self._pass_waited and 0 < self._ahead < MOST_AHEAD and self._pinned and self._pass_waited < streamed:
            self._pinned.discard(max(self._pinned))
            self._ahead += 1
        self._pass_waited = 0


@dataclass(slots=True)
class _Counts:
    """What a stream has done so far; `taken_bytes` are those that were placed, of whatever layer."""

    hits: int = 0
    misses: int = 0
    waited_s: float = 0.0
    taken_bytes: int = 0
    fetched_bytes: int = 0
    fetch_s: float = 0.0

    def asked(self, there: bool) -> None:
        """A layer was asked for that was there, or was not."""
        self.hits, self.misses = self.hits + there, self.misses + (not there)


class Turning(Generic[Built]):
    """Objects over layers that come and go: built anew whenever a layer was fetched anew, never over stale weights."""

    def __init__(self, stream: LayerStream, layers: range, build: Callable[[Mapping[str, Tensor], int], Built]) -> None:
        self._stream = stream
        self._layers = layers
        self._build = build
        self._built: dict[int, tuple[int, Built]] = {}

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, place: int) -> Built:
        layer = self._layers[place]
        count, storages = self._stream.turn_to(layer)
        found = self._built.get(layer)
        if found is None or found[0] != count:
            self._forget()
            found = (count, self._build(storages, layer))
            self._built[layer] = found
        return found[1]

    def _forget(self) -> None:
        """What was built over layers that are gone goes with them."""
        for layer in [one for one in self._built if not self._stream.is_there(one)]:
            del self._built[layer]


def _spread(layers: range, count: int) -> Sequence[int]:
    """`count` layers at even distances."""
    return [layers[index * len(layers) // count] for index in range(count)]
