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
from firstlight.engine.weights.loading import residency
from firstlight.engine.weights.loading.arriving import is_expert
from firstlight.engine.weights.loading.expert_cache import ExpertCache
from firstlight.engine.weights.loading.overlap import Overlap
from firstlight.engine.weights.loading.pages import aligned
from firstlight.engine.weights.loading.residency import Largest, LayerStream, alone, nobody
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
    start, stop = pieces.layers
    late = None
    if kind == "streamed":
        always = without(pieces, lambda storage: start <= storage.layer < stop)
        if budget_bytes is None:
            always, late = without(always, _sees), without(always, lambda storage: not _sees(storage))
    else:
        always = without(pieces, is_expert)
        if not largest(len(pieces.storages) - len(always.storages)):
            raise _no_experts()
    other_bytes = sum(aligned(storage.nbytes) for storage in always.storages)
    staging_limit, staging = residency.STAGING_BYTES, 0
    if budget_bytes is not None:  # both are filled one after the other, through the same staging memory
        options["ahead_bytes"] = staging_limit // 2
        staging = staging_bytes(checkpoint, always.storages, always.pieces, device, staging_limit)
    coming = (checkpoint, pieces, device, budget_bytes, other_bytes, threads, staging, largest)
    stream = experts = None
    if kind == "streamed":
        stream = LayerStream(*coming, late, told)
    elif len(always.storages) < len(pieces.storages):
        experts = ExpertCache(*coming)
    elif budget_bytes is not None and budget_bytes < (least := largest(other_bytes + staging)):
        raise too_small(budget_bytes, least, "what is always there, on a rank without experts")
    try:
        overlap = Overlap(device)
        if stream is not None and budget_bytes is None:
            stream.begin()
        weights = _loaded(checkpoint, always, device, threads, **options)
        if stream is not None and budget_bytes is None:
            stream.settle(overlap, weights.bytes_read)
        elif stream is not None:
            stream.begin()
    except BaseException:
        for one in (stream, experts):
            if one is not None:
                one.close()
        raise
    return replace(weights, pieces=pieces, stream=stream, experts=experts)


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
