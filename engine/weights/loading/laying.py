"""Lays out weights that stay packed, row by row, from their stored tensors; blocks may become smaller."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from firstlight.engine.parallel.pieces import Piece
from firstlight.engine.weights.formats.grid import COLUMNS, ROWS, UNCUT, Axis, Box, Part
from firstlight.engine.weights.loading.turning import turned_by
from firstlight.engine.weights.source import Region
from firstlight.kernels.packed.kinds import CODE_BITS


def begins_with_a_block(part: Part, region: Region) -> bool:
    """Whether the first row and the first column of a region are the first of a block of a stored tensor."""
    axes = (axis for axis in part.dims if isinstance(axis, Axis) and not axis.whole)
    return all(not region[axis.dim][0] % axis.block for axis in axes)


def lay(piece: Piece, stored: Tensor, box: Box, place: Tensor) -> None:
    """Puts what `box` needs of one stored tensor of a weight into place, as it is held."""
    packed, packing, role = piece.packed, piece.packing, piece.role
    assert packed is not None
    assert packing is not None
    turn = _turn(piece, stored, box, place)
    if turn is not None:
        turn()
        return
    found = packed.format.laid(role, stored, box)
    found = found.reshape(found.shape[-2:])
    own = packed.format.packing(packed.tensors[0].dtype)
    assert own is not None
    if role == "codes":
        found = found.view(torch.uint8)
        place = place.narrow(COLUMNS, _first_byte(piece, box), found.shape[COLUMNS])
    for dim, block, stored_block in zip((ROWS, COLUMNS), packing.grid(role), own.grid(role), strict=True):
        if stored_block != UNCUT:
            first, index = _blocks(piece.region[dim], box[dim], block, stored_block)
            place = place.narrow(dim, first, index.shape[0])
            if not torch.equal(index, torch.arange(found.shape[dim])):
                found = found.index_select(dim, index.to(found.device))
    place.copy_(found)


def _turn(piece: Piece, stored: Tensor, box: Box, place: Tensor) -> Callable[[], None] | None:
    """What turns codes round straight into place; None where they are laid out in another way."""
    packed = piece.packed
    assert packed is not None
    if piece.role != "codes" or stored.dim() != 2 or stored.device.type != "cpu" or place.device.type != "cpu":
        return None
    turn = turned_by(packed.format, box, piece.region[ROWS][2])
    if turn is None or stored.stride(-1) != 1 or place.stride(-1) != 1:
        return None
    low, high = box[ROWS]
    rows = place.view(torch.uint8).narrow(ROWS, low - piece.region[ROWS][0], high - low)
    return partial(turn, stored, rows[:, _first_byte(piece, box) :])


def _first_byte(piece: Piece, box: Box) -> int:
    """Where the codes of a box begin in the rows that are held."""
    assert piece.packing is not None
    return (box[COLUMNS][0] - piece.region[COLUMNS][0]) * CODE_BITS[piece.packing.code] // 8


def _blocks(cut: tuple[int, int, int], inside: tuple[int, int], block: int, stored: int) -> tuple[int, Tensor]:
    """The first block of a cut (start, stop, step) that indices `inside` it belong to, and where it and those behind it
    are found among the stored blocks, of which the first one holds the first of these indices.
    """
    start, _, step = cut
    first, stop = (-(-(at - start) // step) for at in inside)
    at = first // block if block else 0
    heads = torch.arange(at, -(-stop // block)) * block if block else torch.zeros(1, dtype=torch.int64)
    of_weight = heads.clamp(min=first) * step + start
    return at, of_weight // stored - inside[0] // stored if stored else torch.zeros_like(of_weight)
