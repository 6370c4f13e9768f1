"""Which weights are in memory when: all of them, layers that follow one another through a budget, or experts on demand.

Whatever is not a layer (embedding, head, norms, vision) or, with experts on demand, not an expert, is always there.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import torch
from torch import Tensor

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.parallel.pieces import Piece, RankPieces, Storage
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.loader import AHEAD_BYTES, Filling
from firstlight.engine.weights.loading.pages import aligned
from firstlight.engine.weights.loading.placing import STORED_DTYPES
from firstlight.engine.weights.memory import Pool

Built = TypeVar("Built")
Largest = Callable[[int], int]  # a number of this rank -> the largest of all ranks, which all of them ask for at once

AHEAD = 1  # layers that are read ahead at first
MOST_AHEAD = 4
STAGING_BYTES = 32 << 20  # of pieces that are converted or cut, while one batch is worked on and the next is read


def alone(number: int) -> int:
    """The largest of one rank's numbers: its own."""
    return number


class ResidencyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was in memory and what had to be waited for.

    `held_bytes` is memory for weights, staging included, of `budget_bytes` (None: no budget) for `whole_bytes` of them.
    `units` layers or experts fit at once, of which `pinned` never leave. A hit was there when it was wanted, a miss had
    to be waited for, `waited_s` in all; `fetched_bytes` were read in `fetch_s`.
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


class LayerStream:
    """Layers in slots of equal size: some stay, the others follow one another, read ahead in the background.

    With room for every layer all of them stay: then the first pass runs while the layers behind it are being read.
    One thread asks (`turn_to`), in whatever order; what is read ahead is what the forward pass wants next, round and
    round.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        pieces: RankPieces,
        device: torch.device,
        budget_bytes: int | None,
        other_bytes: int,
        threads: int | None = None,
        other_staging_bytes: int = 0,
        largest: Largest = alone,
    ) -> None:
        """`other_bytes` of the budget are taken already, by what takes `other_staging_bytes` until it is read.

        Raises `Refused` where not even two layers have room, on this rank or on another that `largest` knows of.
        """
        self._checkpoint, self._device, self._threads = checkpoint, device, threads
        self._start, self._stop = pieces.layers
        self._storages = _by_layer(pieces.storages)
        self._pieces = _by_layer(pieces.pieces, {storage.name: storage.layer for storage in pieces.storages})
        self._budget_bytes, self._other_bytes, self._whole_bytes = budget_bytes, other_bytes, pieces.nbytes
        staging = 0 if budget_bytes is None else max(other_staging_bytes, *map(self._staging, self._range))
        self._staging_bytes = staging
        sizes = [sum(aligned(one.nbytes) for one in self._storages[layer]) for layer in self._range]
        slot_bytes = max(sizes)
        count = _slots(len(sizes), slot_bytes, budget_bytes, other_bytes + self._staging_bytes, largest)
        self._pool = Pool.reserve(count * slot_bytes, "layers", device, wait=False)
        self._slots = [self._pool.take((slot_bytes,), torch.uint8) for _ in range(count)]
        self._free = list(range(count))
        self._ahead = 0 if count == len(sizes) else min(AHEAD, count - 1)
        self._pinned = set(_spread(self._range, count if not self._ahead else count - 1 - self._ahead))
        self._where: dict[int, int] = {}  # layer -> slot, of what is there
        self._fetch_counts: dict[int, int] = {}
        self._fetching: int | None = None
        self._turn, self._using = self._start, -1
        self._changed = threading.Condition()
        self._cancel = threading.Event()
        self._failure: BaseException | None = None
        self._hits = self._misses = self._fetched_bytes = 0
        self._waited_s = self._fetch_s = 0.0
        self._pass_waited = 0
        self._thread = threading.Thread(target=self._fetch_all, name="layers", daemon=True)

    def begin(self) -> None:
        """Fetch from here on, in the background; called once."""
        self._thread.start()

    @property
    def pool(self) -> Pool:
        return self._pool

    def turn_to(self, layer: int) -> tuple[int, dict[str, Tensor]]:
        """How often a layer was fetched so far, and its storages, which stay as they are until the next call."""
        if self._device.type == "cuda":  # what was computed from the layer before must be done before it may go
            torch.cuda.current_stream(self._device).synchronize()
        with self._changed:
            if layer <= self._turn and self._using >= 0:
                self._end_of_pass()
            self._turn = self._using = layer
            there = layer in self._where
            self._hits, self._misses = self._hits + there, self._misses + (not there)
            self._pass_waited += not there
            self._changed.notify_all()
            if not there:
                started_s = time.perf_counter()
                self._changed.wait_for(lambda: layer in self._where or self._failure is not None)
                self._waited_s += time.perf_counter() - started_s
            if self._failure is not None:
                raise self._failure
            slot = self._where[layer]
            return self._fetch_counts[layer], self._views(layer, slot)

    def layers(self, build: Callable[[Mapping[str, Tensor], int], Built]) -> Turning[Built]:
        """The layers as a sequence that turns to each one that is asked for; `build` makes one of its storages."""
        return Turning(self, self._range, build)

    def is_there(self, layer: int) -> bool:
        return layer in self._where

    def report(self) -> ResidencyReport:
        with self._changed:
            return ResidencyReport(
                kind="streamed",
                budget_bytes=self._budget_bytes,
                held_bytes=self._other_bytes + self._pool.reserved_bytes + self._staging_bytes,
                whole_bytes=self._whole_bytes,
                units=len(self._slots),
                pinned=len(self._pinned),
                ahead=self._ahead,
                hits=self._hits,
                misses=self._misses,
                waited_s=self._waited_s,
                fetched_bytes=self._fetched_bytes,
                fetch_s=self._fetch_s,
            )

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
        if self._thread.ident is not None:
            self._thread.join()
        self._pool.stop()

    @property
    def _range(self) -> range:
        return range(self._start, self._stop)

    def _fetch_all(self) -> None:
        """The background thread: all layers in order, or whatever is wanted next, as long as there is a slot for it."""
        try:
            if not self._ahead:
                self._fetch_each_once()
            else:
                self._fetch_as_wanted()
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the layer
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _fetch_each_once(self) -> None:
        """There is room for all: one load, of which each layer is used as soon as it is there."""
        places = dict(zip(self._range, range(len(self._slots)), strict=True))
        storages: dict[str, Tensor] = {}
        for layer, slot in places.items():
            own = self._views(layer, slot)
            zero_padding(self._pieces.get(layer, ()), self._storages[layer], own)
            storages |= own
        described = [one for layer in self._range for one in self._storages[layer]]
        pieces = [piece for layer in self._range for piece in self._pieces.get(layer, ())]
        filling = Filling(self._checkpoint, described, pieces, storages, self._device, self._pool)
        started_s, read_bytes, coming = time.perf_counter(), 0, iter(self._range)
        layer = next(coming)
        ahead_bytes = AHEAD_BYTES if self._budget_bytes is None else STAGING_BYTES // 2
        for of, nbytes in filling.carry_out(self._threads, self._cancel, ahead_bytes, by_layer=True):
            while layer != of:
                self._arrived(layer, places[layer], read_bytes, time.perf_counter() - started_s)
                started_s, read_bytes, layer = time.perf_counter(), 0, next(coming)
            read_bytes += nbytes
        for last in (layer, *coming):
            self._arrived(last, places[last], read_bytes, time.perf_counter() - started_s)
            started_s, read_bytes = time.perf_counter(), 0

    def _arrived(self, layer: int, slot: int, read_bytes: int, took_s: float) -> None:
        with self._changed:
            self._where[layer], self._fetching = slot, None
            if slot in self._free:
                self._free.remove(slot)
            self._fetch_counts[layer] = self._fetch_counts.get(layer, 0) + 1
            self._fetched_bytes += read_bytes
            self._fetch_s += took_s
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
        storages, pieces = self._views(layer, slot), self._pieces[layer]
        zero_padding(pieces, self._storages[layer], storages)
        filling = Filling(self._checkpoint, self._storages[layer], pieces, storages, self._device, self._pool)
        ahead = STAGING_BYTES // 2
        return sum(nbytes for _, nbytes in filling.carry_out(self._threads, self._cancel, ahead_bytes=ahead))

    def _staging(self, layer: int) -> int:
        return staging_bytes(self._checkpoint, self._storages[layer], self._pieces[layer], self._device, STAGING_BYTES)

    def _views(self, layer: int, slot: int) -> dict[str, Tensor]:
        return views(self._slots[slot], self._storages[layer])

    def _end_of_pass(self) -> None:
        """Read further ahead where some layers were waited for and some were not; one layer less stays then."""
        streamed = len(self._range) - len(self._pinned)
        if self._pass_waited and 0 < self._ahead < MOST_AHEAD and self._pinned and self._pass_waited < streamed:
            self._pinned.discard(max(self._pinned))
            self._ahead += 1
        self._pass_waited = 0


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


def views(slot_N: Tensor, storages: Iterable[Storage]) -> dict[str, Tensor]:
    """Tensors for storages, one behind the other in a slot of bytes, aligned as in a pool."""
    found, start = {}, 0
    for storage in storages:
        flat_N = slot_N[start : start + storage.nbytes]
        found[storage.name] = flat_N.view(STORED_DTYPES[storage.dtype]).view(storage.shape)
        start += aligned(storage.nbytes)
    return found


def staging_bytes(
    checkpoint: Checkpoint, described: Sequence[Storage], pieces: Sequence[Piece], device: torch.device, most: int
) -> int:
    """Staging memory that reading these pieces takes, at most `most`; none for those read straight into place."""
    nbytes = sum(aligned(storage.nbytes) for storage in described)
    places = views(torch.empty(nbytes, dtype=torch.uint8, device="meta"), described)
    return Filling(checkpoint, described, pieces, places, device).staging_bytes(most)


def zero_padding(pieces: Iterable[Piece], described: Iterable[Storage], storages: Mapping[str, Tensor]) -> None:
    """Zero what pieces do not fill: whatever was in the memory before is no padding."""
    filled: dict[str, int] = {}
    for piece in pieces:
        filled[piece.storage] = filled.get(piece.storage, 0) + math.prod(piece.shape)
    for storage in described:
        if filled.get(storage.name, 0) < math.prod(storage.shape):
            storages[storage.name].zero_()


def without(pieces: RankPieces, leaves: Callable[[Storage], bool]) -> RankPieces:
    """A rank's storages and pieces but for those that come and go."""
    storages = tuple(storage for storage in pieces.storages if not leaves(storage))
    names = {storage.name for storage in storages}
    kept = tuple(piece for piece in pieces.pieces if piece.storage in names)
    return msgspec.structs.replace(pieces, storages=storages, pieces=kept)


def too_small(budget_bytes: int, least_bytes: int, what: str) -> Refused:
    """The finding for a budget in which nothing can run."""
    return Refused(
        fatal(
            "does-not-fit",
            f"the budget for weights is too small for {what}",
            expected=f"at least {least_bytes:,} bytes",
            found=f"{budget_bytes:,} bytes",
            next="raise --weights-budget to that, or divide the model over more ranks; of several ranks each has this "
            "budget, and this is what the one that needs most needs",
        )
    )


def _slots(layers: int, slot_bytes: int, budget_bytes: int | None, other_bytes: int, largest: Largest) -> int:
    if budget_bytes is None:
        return layers
    least = largest(other_bytes + min(2, layers) * slot_bytes)
    if budget_bytes < least:
        raise too_small(budget_bytes, least, "two layers at once, and what is always there")
    return min(layers, (budget_bytes - other_bytes) // max(1, slot_bytes))


def _spread(layers: range, count: int) -> Sequence[int]:
    """`count` layers at even distances."""
    return [layers[index * len(layers) // count] for index in range(count)]


def _by_layer(items: Iterable[Any], layer_of: Mapping[str, int] | None = None) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for item in items:
        found.setdefault(item.layer if layer_of is None else layer_of[item.storage], []).append(item)
    return found
