"""What weights that come and go have to do with: whose they are, and how much memory there is for them.

A budget holds what is always there, staging memory, and slots for layers or experts; here is how many of them fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from firstlight.engine.parallel.pieces import Piece, RankPieces, Storage
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.loading.arriving import by_expert, sites_of
from firstlight.engine.weights.loading.pages import aligned
from firstlight.engine.weights.loading.slots import staging_bytes, too_small

Largest = Callable[[int], int]  # a number of this rank -> the largest of all ranks, which all of them ask for at once
Signature = tuple[tuple[str, tuple[int, ...], str], ...]  # of a kind of experts: name, shape, dtype of each part

STAGING_BYTES = 32 << 20  # of pieces that are converted or cut, while one batch is worked on and the next is read


def alone(number: int) -> int:
    """The largest of one rank's numbers: its own."""
    return number


def nobody(nbytes: int) -> None:
    """Is told of bytes that were placed."""


@dataclass(frozen=True, slots=True)
class Coming:
    """A rank's weights, of which layers or experts come and go, and the memory that there is for all of them.

    `other_bytes` of `budget_bytes` (None: no budget) are always taken, by what takes `other_staging_bytes` until it is
    read. `threads` None: as many readers as suit the source. `largest` knows the other ranks' numbers; `told` hears of
    every lot of bytes that was placed.
    """

    checkpoint: Checkpoint
    pieces: RankPieces
    device: torch.device
    budget_bytes: int | None = None
    other_bytes: int = 0
    other_staging_bytes: int = 0
    threads: int | None = None
    largest: Largest = alone
    told: Callable[[int], None] = nobody

    def refuse_less_than(self, least_bytes: int, what: str) -> None:
        """Raises `Refused` where the budget is below `least_bytes` of this rank or of another; without one never."""
        if self.budget_bytes is not None and self.budget_bytes < (least := self.largest(least_bytes)):
            raise too_small(self.budget_bytes, least, what)


class Layers:
    """A rank's layers: storages and pieces of each, and how many fit, in slots as large as the largest of them."""

    def __init__(self, coming: Coming) -> None:
        pieces = coming.pieces
        self.range = range(*pieces.layers)
        self.storages: Mapping[int, list[Storage]] = _by_layer(pieces.storages)
        layer_of = {storage.name: storage.layer for storage in pieces.storages}
        self.pieces: Mapping[int, list[Piece]] = _by_layer(pieces.pieces, layer_of)
        self.slot_bytes = max(sum(aligned(one.nbytes) for one in self.storages[layer]) for layer in self.range)
        self.staging_bytes = 0
        self._coming = coming
        if coming.budget_bytes is not None:
            self.staging_bytes = max(coming.other_staging_bytes, *map(self._staging, self.range))

    @property
    def least_bytes(self) -> int:
        """The smallest budget that does: two layers at once, the one that runs and the one that comes."""
        return self._coming.other_bytes + self.staging_bytes + min(2, len(self.range)) * self.slot_bytes

    def slots(self) -> int:
        """How many layers fit at once; `Refused` where not even two do."""
        budget_bytes, count = self._coming.budget_bytes, len(self.range)
        self._coming.refuse_less_than(self.least_bytes, "two layers at once, and what is always there")
        if budget_bytes is None:
            return count
        return min(count, (budget_bytes - self._coming.other_bytes - self.staging_bytes) // max(1, self.slot_bytes))

    def _staging(self, layer: int) -> int:
        coming = self._coming
        described, pieces = self.storages[layer], self.pieces.get(layer, [])
        return staging_bytes(coming.checkpoint, described, pieces, coming.device, STAGING_BYTES)


class Experts:
    """A rank's experts: storages of each site, pieces of each expert, and how many fit of each kind.

    Experts of equal shapes are of one kind, in whatever layer; between kinds memory is divided by size.
    """

    def __init__(self, coming: Coming) -> None:
        self.sites = sites_of(coming.pieces.storages)
        self.pieces = by_expert(coming.pieces.pieces, self.sites)
        self.kinds: dict[Signature, list[str]] = {}
        for site, storages in self.sites.items():
            self.kinds.setdefault(_signature(site, storages), []).append(site)
        self.staging_bytes = 0
        self._coming = coming
        self._counts = {kind: sum(self.count(site) for site in sites) for kind, sites in self.kinds.items()}
        if coming.budget_bytes is not None:
            self.staging_bytes = max(coming.other_staging_bytes, *map(self._staging, self.sites))

    def count(self, site: str) -> int:
        """How many experts of a site belong to this rank."""
        return self.sites[site][0].shape[0]

    def nbytes(self, kind: Signature) -> int:
        """Bytes of one expert of a kind, with the pool's alignment."""
        storages = self.sites[self.kinds[kind][0]]
        return sum(aligned(storage.nbytes // storage.shape[0]) for storage in storages)

    @property
    def least_bytes(self) -> int:
        """The smallest budget that does: one expert of each kind, with the others' shares of memory beside it."""
        one_of_each = max(-(-self._whole_bytes // count) for count in self._counts.values())
        return self._coming.other_bytes + self.staging_bytes + one_of_each

    def slots(self) -> dict[Signature, int]:
        """How many experts of each kind fit, in proportion to its share of all bytes; `Refused` where not one does."""
        self._coming.refuse_less_than(self.least_bytes, "one expert of each kind, and what is always there")
        if self._coming.budget_bytes is None:
            return dict(self._counts)
        left = self._coming.budget_bytes - self._coming.other_bytes - self.staging_bytes
        return {kind: min(count, left * count // self._whole_bytes) for kind, count in self._counts.items()}

    @property
    def _whole_bytes(self) -> int:
        return sum(count * self.nbytes(kind) for kind, count in self._counts.items())

    def _staging(self, site: str) -> int:
        """For four experts at once: two that are worked on and two that are being read."""
        coming, pieces = self._coming, next((pieces for (of, _), pieces in self.pieces.items() if of == site), [])
        described = [of_one(storage, storage.name) for storage in self.sites[site]]
        own = [in_one(piece, piece.storage) for piece in pieces]
        return min(STAGING_BYTES, 4 * staging_bytes(coming.checkpoint, described, own, coming.device, STAGING_BYTES))


def leaf_of(site: str, storage: Storage) -> str:
    """The name of a storage within its site."""
    return storage.name.removeprefix(site)


def of_one(storage: Storage, name: str) -> Storage:
    """The storage of one expert, of a storage of all of them."""
    return Storage(name=name, shape=storage.shape[1:], dtype=storage.dtype, role=storage.role, layer=storage.layer)


def in_one(piece: Piece, storage: str) -> Piece:
    """The same piece in a storage of its expert alone."""
    fields = {name: getattr(piece, name) for name in piece.__struct_fields__}
    return Piece(**{**fields, "storage": storage, "expert": None})


def _signature(site: str, storages: Iterable[Storage]) -> Signature:
    return tuple((leaf_of(site, storage), storage.shape[1:], storage.dtype) for storage in storages)


def _by_layer(items: Iterable[Any], layer_of: Mapping[str, int] | None = None) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for item in items:
        found.setdefault(item.layer if layer_of is None else layer_of[item.storage], []).append(item)
    return found
