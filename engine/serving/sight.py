"""What pictures change in a batch beside the embeddings of their tokens: positions, who sees whom, and which rows.

Legend: B sequences, T tokens of all sequences flattened, t tokens of one sequence, L its length with what is cached.
Position ids of pictures: Qwen2-VL (arXiv 2409.12191, section 2.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from firstlight.engine.model.spec import ModelSpec, PatchTower, Shape, Vision
from firstlight.engine.serving.request import Span, joined


@dataclass(frozen=True, slots=True)
class Sight:
    """What a model does with pictures in its decoder: `grid` positions, `deep` features for that many of the first
    layers, pictures seen as a `whole`."""

    grid: bool = False
    deep: int = 0
    whole: bool = False

    @classmethod
    def of(cls, spec: ModelSpec) -> Sight:
        vision = spec.vision
        if vision is None:
            return cls()
        return cls(
            grid=bool(getattr(vision, "mrope", False)),
            deep=len(getattr(vision, "deep", ())),
            whole=any(getattr(layer.mixer, "whole_pictures", False) for layer in spec.layers),
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """One sequence's part in a step: positions [start, stop) of it, its runs of picture tokens and their grids.

    `marked`: the tokens of a picture are known as such: they see each other, their positions follow the grid.
    """

    start: int
    stop: int
    spans: tuple[Span, ...] = ()
    grids: tuple[Shape, ...] = ()
    marked: bool = True


@dataclass(frozen=True, slots=True)
class Extras:
    """Fields of a `ForwardBatch`; see there."""

    positions_3T: Tensor | None = None
    picture_rows: Tensor | None = None
    groups: tuple[Tensor, ...] | None = None


def extras(sight: Sight, parts: Sequence[Seen], device: torch.device) -> Extras:
    """What a batch of these parts, in this order, has beside its tokens; nothing where no part has a picture."""
    if not any(part.spans for part in parts):
        return Extras()
    positions_3T = torch.cat([grid_positions(part) for part in parts], dim=1).to(device) if sight.grid else None
    rows: list[int] = []
    offset = 0
    for part in parts:
        for begin, count in part.spans:
            low, high = max(begin, part.start), min(begin + count, part.stop)
            rows += range(offset + low - part.start, offset + high - part.start)
        offset += part.stop - part.start
    return Extras(
        positions_3T=positions_3T,
        picture_rows=torch.tensor(rows, dtype=torch.int64, device=device) if sight.deep and rows else None,
        groups=tuple(_groups(part, device) for part in parts) if sight.whole and rows else None,
    )


def grid_positions(part: Seen) -> Tensor:
    """Frame, row and column of each token [3, t].

    Text counts on by one in all three. A picture begins where text would go on; its tokens count by their place in
    its grid, and text goes on behind the longer of its sides.
    """
    pieces, position, done = [], 0, 0
    pictures = zip(part.spans, part.grids, strict=True) if part.marked else ()
    for (begin, count), (frames, rows, columns) in pictures:
        assert count == frames * rows * columns, (count, frames, rows, columns)
        pieces.append(torch.arange(position, position + begin - done).expand(3, -1))
        position += begin - done
        place = torch.meshgrid(torch.arange(frames), torch.arange(rows), torch.arange(columns), indexing="ij")
        pieces.append(torch.stack([axis.flatten() for axis in place]) + position)
        position, done = position + max(rows, columns), begin + count
    pieces.append(torch.arange(position, position + max(part.stop - done, 0)).expand(3, -1))
    return torch.cat(pieces, dim=1)[:, part.start : part.stop]


def _groups(part: Seen, device: torch.device) -> Tensor:
    """The picture that each token up to the last of this step belongs to, by its number; -1: text. [L]"""
    found = torch.full((part.stop,), -1, dtype=torch.int64)
    if not part.marked:
        return found.to(device)
    for number, (begin, count) in enumerate(joined(part.spans)):
        found[begin : begin + count] = number
    return found.to(device)


def is_marked(tensors: Mapping[str, Any]) -> bool:
    """Whether the tokens of pictures are marked in `token_type_ids`, as vendors' processors give them.

    Tensors that come without are taken as marked; references then take them as unmarked.
    """
    types = tensors.get("token_type_ids")
    return types is None or bool(types.any())


def with_grids(
    vision: Vision, spans: Sequence[Span], tensors: Mapping[str, Any]
) -> tuple[tuple[Span, ...], tuple[Shape, ...]]:
    """Spans and the grid of each, where positions follow grids: pictures that touch are told apart."""
    grids: tuple[Shape, ...] = vision.grids(tensors) if isinstance(vision, PatchTower) else ()
    return (by_picture(spans, [math.prod(grid) for grid in grids]), grids) if grids else (tuple(spans), ())


def by_picture(spans: Sequence[Span], counts: Sequence[int]) -> tuple[Span, ...]:
    """Runs cut where pictures of `counts` tokens meet without a token between them."""
    cut, left = [], list(counts)
    for begin, count in spans:
        while count > 0 and left:
            part = min(count, left[0])
            cut.append((begin, part))
            begin, count, left[0] = begin + part, count - part, left[0] - part
            if not left[0]:
                left.pop(0)
    return tuple(cut)
