"""Where numbers that are not finite come from: the first block whose output shows them, and on which rank.

A cache that has taken in such numbers tells nothing any more, so the prompt is computed once more, alone, from an empty
one. A sum over ranks spreads to all what one of them broke: a rank whose own weights hold such numbers is named alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from firstlight.engine.model.build import Model
from firstlight.engine.serving.boot import Rank
from firstlight.engine.serving.trace import TraceCommand, batch_of

MOST_TOKENS = 4096  # of a prompt that is computed again, in one step
FAULT = "the logits are not finite: the weights or an operator are at fault"
_ENDS = {"embed": -1, "norm": 1 << 30, "head": (1 << 30) + 1}


class InquestCommand(msgspec.Struct, frozen=True, tag=True):
    """Compute this batch again and say where it first goes wrong."""

    batch: TraceCommand


class Found(msgspec.Struct, frozen=True):
    """What one rank saw: the first block whose output is not finite, and which of that block's weights here are not."""

    block: str | None = None
    weights: tuple[str, ...] = ()


class _Look:
    """A tap that keeps the name of the first block whose output is not finite."""

    only_names = True  # each rank looks at its own rows

    def __init__(self) -> None:
        self.first: str | None = None

    def __call__(self, name: str, value: Tensor) -> None:
        if self.first is None and not bool(value.isfinite().all()):
            self.first = name


def run_inquest(rank: Rank, command: InquestCommand) -> Found:
    """This rank's part; all ranks must call it. A model of another's making shows nothing of itself."""
    if not isinstance(rank.model, Model):
        return Found()
    look = _Look()
    batch = batch_of(rank, command.batch)
    if batch is not None:
        with torch.inference_mode():
            logits = rank.model.forward(replace(batch, tap=look))
        if logits is not None and look.first is None and not bool(logits.isfinite().all()):
            look.first = "head"
    return Found(look.first, _unsound(rank, look.first) if look.first is not None else ())


def _unsound(rank: Rank, block: str) -> tuple[str, ...]:
    """Weights of a block on this rank with numbers that are not finite; those that come and go are passed over."""
    part = ".".join(block.split(".")[:2])
    names = [name for name in rank.weights.params if name == part or name.startswith(f"{part}.")]
    params = [(name, rank.weights.params[name]) for name in names]
    return tuple(name for name, value in params if value.is_floating_point() and not bool(value.isfinite().all()))


def verdict(found: Sequence[Found]) -> str:
    """The whole story in a sentence, from what every rank found."""
    blocks = {rank: one.block for rank, one in enumerate(found) if one.block is not None}
    if not blocks:
        return FAULT
    first = min(blocks.values(), key=_place)
    ranks = [rank for rank, block in blocks.items() if block == first]
    guilty = [rank for rank in ranks if found[rank].weights]
    if guilty:
        held = "; ".join(f"rank {rank}: {', '.join(found[rank].weights[:3])}" for rank in guilty)
        return f"{FAULT}; first in {first}, whose weights are not finite on {held}"
    several = "s" if len(ranks) > 1 else ""
    return f"{FAULT}; first in {first}, on rank{several} {', '.join(map(str, ranks))}, whose weights there are finite"


def _place(block: str) -> tuple[int, int]:
    """In the order in which blocks are computed: a layer's parts before the whole."""
    kind, _, rest = block.partition(".")
    if kind != "layers":
        return _ENDS.get(kind, -2), 0
    number, _, part = rest.partition(".")
    return int(number), 0 if part else 1
