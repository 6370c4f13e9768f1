"""Memory that weights come into one after the other: where storages lie in it, and what reading into it takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.parallel.pieces import Piece, RankPieces, Storage
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.loader import Filling
from firstlight.engine.weights.loading.pages import aligned
from firstlight.engine.weights.loading.placing import STORED_DTYPES


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
