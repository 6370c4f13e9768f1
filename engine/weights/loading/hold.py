"""Applies a residency policy to a rank's weights: resident, streamed layers, or experts on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.parallel.kept import Residency
from firstlight.engine.parallel.pieces import RankPieces, Storage
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.loader import Weights, load
from firstlight.engine.weights.loading import room
from firstlight.engine.weights.loading.arriving import is_expert
from firstlight.engine.weights.loading.expert_cache import ExpertCache
from firstlight.engine.weights.loading.overlap import Overlap
from firstlight.engine.weights.loading.pages import aligned
from firstlight.engine.weights.loading.residency import LayerStream
from firstlight.engine.weights.loading.room import Coming, Experts, Largest, Layers, alone, nobody
from firstlight.engine.weights.loading.slots import staging_bytes, too_small, without
from firstlight.engine.weights.loading.untouched import Untouched


def hold(
    checkpoint: Checkpoint,
    pieces: RankPieces,
    device: torch.device,
    kind: Residency = "resident",
    budget_bytes: int | None = None,
    threads: int | None = None,
    largest: Largest = alone,
    told: Callable[[int], None] = nobody,
    **options: Any,
) -> Weights:
    """Weights of which `kind` says what is in memory when; `options` are those of `load`.

    `budget_bytes` bounds the memory for weights, staging included; without one there is room for all of them, and
    `streamed` runs a layer while those behind it are still being read, where that brings the first token sooner; what
    pictures alone need comes behind the layers then. `largest` gives the largest of all ranks' numbers, so that all
    judge alike; `told` hears of every lot of bytes of what comes and goes. Raises `Refused` where the budget is too
    small, with the least that is not.
    """
    if kind == "resident":
        if budget_bytes is not None and budget_bytes < (least := largest(pieces.nbytes)):
            raise too_small(budget_bytes, least, "all weights at once (--residency streamed needs less)")
        return _loaded(checkpoint, pieces, device, threads, **options)
    always, late = _divided(pieces, kind, budget_bytes)
    if kind == "experts" and not largest(len(pieces.storages) - len(always.storages)):
        raise _no_experts()
    if budget_bytes is not None:  # what is always there is filled first, through the staging memory of what comes later
        options["ahead_bytes"] = room.STAGING_BYTES // 2
    coming = _coming(checkpoint, pieces, always, device, budget_bytes)
    coming = replace(coming, threads=threads, largest=largest, told=told)
    stream = experts = None
    if kind == "streamed":
        stream = LayerStream(coming, late.storages, late.pieces)
    elif len(always.storages) < len(pieces.storages):
        experts = ExpertCache(coming)
    else:
        coming.refuse_less_than(_least_of(coming, kind), "what is always there, on a rank without experts")
    try:
        weights = _beside(stream, coming, always, options)
    except BaseException:
        for one in (stream, experts):
            if one is not None:
                one.close()
        raise
    return replace(weights, pieces=pieces, stream=stream, experts=experts)


def least_budget(checkpoint: Checkpoint, pieces: RankPieces, device: torch.device, kind: Residency) -> int:
    """The smallest budget, in bytes, with which `hold` takes these weights, as far as this rank is concerned."""
    if kind == "resident":
        return pieces.nbytes
    always, _ = _divided(pieces, kind, 0)
    return _least_of(_coming(checkpoint, pieces, always, device, 0), kind)


def _divided(pieces: RankPieces, kind: Residency, budget_bytes: int | None) -> tuple[RankPieces, RankPieces]:
    """Of a rank's weights those that are always there, and those that come behind the layers."""
    none = without(pieces, lambda _: True)
    if kind == "experts":
        return without(pieces, is_expert), none
    start, stop = pieces.layers
    always = without(pieces, lambda storage: start <= storage.layer < stop)
    if budget_bytes is not None:
        return always, none
    return without(always, _sees), without(always, lambda storage: not _sees(storage))


def _coming(
    checkpoint: Checkpoint, pieces: RankPieces, always: RankPieces, device: torch.device, budget_bytes: int | None
) -> Coming:
    other_bytes = sum(aligned(storage.nbytes) for storage in always.storages)
    staging = 0
    if budget_bytes is not None:
        staging = staging_bytes(checkpoint, always.storages, always.pieces, device, room.STAGING_BYTES)
    return Coming(checkpoint, pieces, device, budget_bytes, other_bytes, staging)


def _least_of(coming: Coming, kind: Residency) -> int:
    if kind == "streamed":
        return Layers(coming).least_bytes
    if any(map(is_expert, coming.pieces.storages)):
        return Experts(coming).least_bytes
    return coming.other_bytes + coming.other_staging_bytes


def _beside(stream: LayerStream | None, coming: Coming, always: RankPieces, options: dict[str, Any]) -> Weights:
    """What is always there; layers come meanwhile if there is room for all, and behind it if there is a budget."""
    overlap, has_room = Overlap(coming.device), coming.budget_bytes is None
    if stream is not None and has_room:
        stream.begin()
    weights = _loaded(coming.checkpoint, always, coming.device, coming.threads, **options)
    if stream is not None and has_room:
        stream.settle(overlap, weights.bytes_read)
    elif stream is not None:
        stream.begin()
    return weights


def _loaded(checkpoint: Checkpoint, pieces: RankPieces, device: torch.device, *how: Any, **options: Any) -> Weights:
    """The resident weights, after checking that no file changed meanwhile."""
    untouched = Untouched(checkpoint, pieces.pieces)
    weights = load(checkpoint, pieces, device, *how, **options)
    untouched.check()
    return weights


def _sees(storage: Storage) -> bool:
    """Whether a parameter is needed only for pictures."""
    return storage.name.startswith(("vision.", "projector."))


def _no_experts() -> Refused:
    return Refused(
        fatal(
            "usage",
            "the model has no experts that could be read on demand",
            expected="a mixture of experts",
            found="none",
            next="use --residency streamed",
        )
    )
