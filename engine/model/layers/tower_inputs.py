"""Turns picture tensors into one sequence of patches, with positions, rotations and windows.

The patches of a kernel of k x k stand next to each other, kernel rows first; with kernel 1 that is row by row.
Legend: T patches, E elements of a patch, P positions of a table, H width, N heads, D head dim, A = D / 2 angles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.engine.model import spec as specs

Shape = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Patches:
    """`pixels_TE` of pictures of `shapes` (frames, rows, columns); row and column of each patch; which are real."""

    pixels_TE: Tensor
    shapes: tuple[Shape, ...]
    row_T: Tensor
    column_T: Tensor
    real_T: Tensor | None = None

    @property
    def lengths(self) -> list[int]:
        """Patches of each picture."""
        return [frames * rows * columns for frames, rows, columns in self.shapes]


def patches(spec: specs.PatchTower, tensors: Mapping[str, Tensor]) -> Patches:
    """Picture tensors, checked before, as patches in kernel order."""
    shapes, pixels = tuple(spec.shapes(tensors)), tensors["pixel_values"]
    places = [_places(shape, spec.kernel, pixels.device) for shape in shapes]
    rows, columns = (torch.cat([place[axis] for place in places]) for axis in (0, 1))
    if spec.inputs == "flat":
        return Patches(pixels, shapes, rows, columns)
    real: list[Tensor] = []
    if spec.inputs == "masked":
        tiles = spec.real_tiles(tensors)
        mask = tensors.get("pixel_attention_mask")
        if mask is not None:
            real = [_any_real(mask[row, tile], spec.patch_size) for row, tile in tiles]
        pixels = torch.stack([pixels[row, tile] for row, tile in tiles])
    cut = [_cut(image, shape, spec.patch_size) for image, shape in zip(pixels, shapes, strict=True)]
    picked = [one[place[0], place[1]] for one, place in zip(cut, places, strict=True)]
    flat = [one[place[0], place[1]] for one, place in zip(real, places, strict=True)] if real else []
    real_T = torch.cat(flat) if flat and not all(bool(one.all()) for one in flat) else None
    return Patches(torch.cat(picked), shapes, rows, columns, real_T)


def _places(shape: Shape, kernel: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column of each patch of a picture, in kernel order, again for each frame."""
    frames, rows, columns = shape
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    blocks = (rows // kernel, kernel, columns // kernel, kernel)
    row_T, column_T = (one.reshape(blocks).transpose(1, 2).flatten().repeat(frames).to(device) for one in (row, column))
    return row_T, column_T


def _cut(image_CYX: Tensor, shape: Shape, size: int) -> Tensor:
    """[rows, columns, E] of a picture, without what is padding around it."""
    _, rows, columns = shape
    inner = image_CYX[:, : rows * size, : columns * size]
    return inner.unflatten(1, (rows, size)).unflatten(3, (columns, size)).permute(1, 3, 0, 2, 4).flatten(2)


def _any_real(mask_YX: Tensor, size: int) -> Tensor:
    """[rows, columns] whether any pixel of a patch is picture."""
    rows, columns = mask_YX.shape[0] // size, mask_YX.shape[1] // size
    blocks = mask_YX[: rows * size, : columns * size].reshape(rows, size, columns, size)
    return (blocks != 0).any(3).any(1)


def positions(spec: specs.GridPositions, table_PH: Tensor, found: Patches) -> Tensor:
    """The position of each patch, [T, H]."""
    if spec.how == "nearest":
        return table_PH[_nearest(spec.side, found)]
    parts = zip(found.row_T.split(found.lengths), found.column_T.split(found.lengths), found.shapes, strict=True)
    return torch.cat([_interpolated(spec, table_PH, row, column, shape) for row, column, shape in parts])


def _interpolated(spec: specs.GridPositions, table_PH: Tensor, row_T: Tensor, column_T: Tensor, shape: Shape) -> Tensor:
    _, rows, columns = shape
    if spec.how == "exact" or (rows == columns == spec.side and spec.centres):
        return table_PH[row_T * spec.side + column_T]
    down, down_weight = _taps(row_T, rows, spec)
    across, across_weight = _taps(column_T, columns, spec)
    index = (down[:, :, None] * spec.side + across[:, None, :]).flatten(1)
    weight = (down_weight[:, :, None] * across_weight[:, None, :]).flatten(1)
    found_TH = torch.zeros(len(index), table_PH.shape[1], dtype=torch.float32, device=table_PH.device)
    for tap in range(index.shape[1]):  # one by one: all at once would be sixteen times as large
        found_TH += table_PH[index[:, tap]].float() * weight[:, tap, None]
    return found_TH.to(table_PH.dtype)


def _taps(index_T: Tensor, count: int, spec: specs.GridPositions) -> tuple[Tensor, Tensor]:
    """The positions along one side that a place between them is made of, and their weights; [T, taps] each.

    Linear takes two, cubic four (Keys' kernel with a = -0.75); beyond the border the outermost counts.
    """
    place_T = index_T.float()
    if spec.centres:
        place_T = (place_T + 0.5) * spec.side / count - 0.5
    else:
        place_T = place_T * (spec.side - 1) / max(count - 1, 1)
    below_T = place_T.floor()
    offsets = torch.arange(*((0, 2) if spec.how == "linear" else (-1, 3)), device=index_T.device)
    taps = below_T.long()[:, None] + offsets
    away = (place_T[:, None] - taps).abs()
    if spec.how == "linear":
        weight = (1 - away).clamp(min=0)
    else:
        near = (1.25 * away - 2.25) * away * away + 1
        far = ((-0.75 * away + 3.75) * away - 6.0) * away + 3.0
        weight = torch.where(away <= 1, near, far)
    return taps.clamp(0, spec.side - 1), weight


def _nearest(side: int, found: Patches) -> Tensor:
    """The index of the position at the same fraction of the side; of real patches only, 0 for the others (NaViT)."""
    device = found.row_T.device
    edges = torch.arange(1 / side, 1.0, 1 / side, device=device)
    indices = []
    real = found.real_T.split(found.lengths) if found.real_T is not None else [None] * len(found.shapes)
    parts = zip(found.row_T.split(found.lengths), found.column_T.split(found.lengths), found.shapes, real, strict=True)
    for row_T, column_T, (_, rows, columns), real_T in parts:
        if real_T is not None:
            rows = int(((column_T == 0) & real_T).sum())
            columns = int(((row_T == 0) & real_T).sum())
        places = ((row_T, rows), (column_T, columns))
        down, across = (
            torch.bucketize((place.float() * (1.0 / count)).clamp(max=1.0 - 1e-6), edges, right=True)
            for place, count in places
        )
        index = down * side + across
        indices.append(index if real_T is None else torch.where(real_T, index, 0))
    return torch.cat(indices)


def turns(rope: specs.AxialRope, head_dim: int, found: Patches, extra: int, device: torch.device) -> Tensor:
    """Rotations of each patch, and of class tokens behind those of each picture, [T, A] as complex numbers."""
    step = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=device)
    frequencies = 1.0 / rope.theta ** (step / (head_dim // 2))
    by_row, by_column = frequencies, frequencies
    if rope.split:
        every = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
        by_row, by_column = every[0::2], every[1::2]
    row_T1, column_T1 = found.row_T[:, None].float(), found.column_T[:, None].float()
    if rope.frames:
        width = 2 * (head_dim // 3 // 2)
        third_A = 1.0 / rope.theta ** (torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
        axes_T1 = (_frames(found.shapes, device)[:, None].float(), row_T1, column_T1)
        angles_TA = torch.cat([place_T1 * third_A for place_T1 in axes_T1], dim=-1)
    elif rope.layout == "halves":
        angles_TA = torch.cat((row_T1 * by_row, column_T1 * by_column), dim=-1)
    else:
        angles_TA = torch.cat(((column_T1 + 1) * by_column, (row_T1 + 1) * by_row), dim=-1)
    turns_TA = torch.polar(torch.ones_like(angles_TA), angles_TA)
    if extra:
        still = torch.ones_like(turns_TA[:1])
        turns_TA = torch.cat([one for part in turns_TA.split(found.lengths) for one in (part, still)])
    return turns_TA


def _frames(shapes: Sequence[Shape], device: torch.device) -> Tensor:
    """The frame of each patch of each picture."""
    parts = [torch.arange(count).repeat_interleave(rows * columns) for count, rows, columns in shapes]
    return torch.cat(parts).to(device)


def turned(x_TND: Tensor, turns_TA: Tensor, layout: str) -> Tensor:
    """Each head rotated, in float32: the pairs of `halves` are (i, i + A), those of `pairs` are neighbours."""
    if layout == "pairs":
        pairs_TNA = torch.view_as_complex(x_TND.float().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs_TNA * turns_TA[:, None]).flatten(-2).to(x_TND.dtype)
    angles = turns_TA.shape[-1]
    first, second, still = x_TND.float().split((angles, angles, x_TND.shape[-1] - 2 * angles), dim=-1)
    cos_T1A, sin_T1A = turns_TA.real[:, None], turns_TA.imag[:, None]
    turned_TND = (first * cos_T1A - second * sin_T1A, second * cos_T1A + first * sin_T1A, still)
    return torch.cat(turned_TND, dim=-1).to(x_TND.dtype)


def windows(shapes: Sequence[Shape], kernel: int, side: int) -> tuple[Tensor, tuple[int, ...]]:
    """The order of patches in which windows of `side` x `side` kernels are contiguous, and the patches of each.

    Windows start at the upper left of each frame; those at the right and lower border are smaller.
    """
    order, lengths, first = [], [], 0
    for frames, rows, columns in shapes:
        down, across = rows // kernel, columns // kernel
        grid = torch.arange(down * across).view(down, across)
        found = [
            grid[y : y + side, x : x + side].flatten() for y in range(0, down, side) for x in range(0, across, side)
        ]
        for frame in range(frames):
            order += [one + first + frame * down * across for one in found]
            lengths += [len(one) * kernel**2 for one in found]
        first += frames * down * across
    index = torch.cat(order)
    return (index[:, None] * kernel**2 + torch.arange(kernel**2)).flatten(), tuple(lengths)
