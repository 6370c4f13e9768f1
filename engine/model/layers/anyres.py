"""LLaVA-NeXT's image features: the whole picture, then its tiles without padding; spec: `spec/anyres.py`.

Legend: n features of a picture, W decoder width, r c rows and columns of features.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from firstlight.engine.model import spec as specs
from firstlight.engine.model.layers.access import Access
from firstlight.engine.model.layers.encoder import refuse_unfit
from firstlight.engine.model.layers.vision import VisionTower


class AnyRes:
    """pixel_values [pictures, tiles, C, Y, X] with image_sizes [pictures, 2] -> features [n of all, W]."""

    def __init__(self, spec: specs.AnyRes, weights: Access) -> None:
        self.spec = spec
        self._tower = VisionTower(spec.tower, weights)
        self._row_end_W = weights.into("projector").tensor("row_end")

    def __call__(self, tensors: Mapping[str, Tensor]) -> Tensor:
        refuse_unfit(self.spec.problem(tensors))
        sizes = [(int(size[0]), int(size[1])) for size in tensors["image_sizes"]]
        grids = [self.spec.grid(*size) for size in sizes]
        counts = [1 + rows * columns for rows, columns in grids]
        tiles = torch.cat([one[:count] for one, count in zip(tensors["pixel_values"], counts, strict=True)])
        features = self._tower({"pixel_values": tiles}).unflatten(0, (len(tiles), -1)).split(counts)
        return torch.cat([self._arranged(*one) for one in zip(features, sizes, grids, strict=True)])

    def _arranged(self, tiles: Tensor, size: tuple[int, int], grid: tuple[int, int]) -> Tensor:
        """The whole picture's features, then those of the canvas without its padding, a mark behind each row."""
        side = self.spec.tower.image_size // self.spec.tower.patch_size
        canvas_rcW = tiles[1:].view(*grid, side, side, -1).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        rows, columns = canvas_rcW.shape[:2]
        above, left = specs.cut_away(*size, rows, columns)
        canvas_rcW = canvas_rcW[above : rows - above, left : columns - left]
        ends_r1W = self._row_end_W.to(canvas_rcW.dtype).expand(canvas_rcW.shape[0], 1, -1)
        return torch.cat((tiles[0], torch.cat((canvas_rcW, ends_r1W), dim=1).flatten(0, 1)))
