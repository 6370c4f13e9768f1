"""MoonViT and its projector, whole on every rank; spec: `spec/moonvit.py`.

Legend: T patches of all pictures, C channels, Y X pixels, H tower width, A = head dim / 2 angles, M
merged features, K patches of a merging kernel.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.engine.model import spec as specs
from firstlight.engine.model.layers.access import Access
from firstlight.engine.model.layers.encoder import EncoderLayer, Setting, refuse_unfit
from firstlight.engine.model.layers.norm import Norm
from firstlight.kernels.gated_activation.reference import ACTIVATIONS

Shape = tuple[int, int, int]  # frames, rows, columns of a picture, in patches


class MoonViT:
    """pixel_values [T, C, Y, X] with grids [pictures, 3] -> features for the decoder [M, decoder width], in order."""

    def __init__(self, spec: specs.MoonViT, weights: Access) -> None:
        self.spec = spec
        tower = weights.into("vision")
        self._patch = tower.tensor("patch_embed.weight").flatten(1)
        self._patch_bias_H = tower.maybe("patch_embed.bias")
        table_YXH = tower.tensor("position_embed.weight")
        if spec.read_square:
            side = spec.grid[0]
            table_YXH = table_YXH.flatten(0, 1)[: side**2].unflatten(0, (side, side))
        self._position_HYX = table_YXH.permute(2, 0, 1)
        self._layers = [EncoderLayer(layer, tower.into(f"layers.{i}")) for i, layer in enumerate(spec.layers)]
        self._norm = Norm(spec.norm, tower.into("norm"))
        self._project = _Projector(spec.projector, weights.into("projector"))

    def __call__(self, tensors: Mapping[str, Tensor]) -> Tensor:
        refuse_unfit(self.spec.problem(tensors))
        pixels, shapes = tensors["pixel_values"], self.spec.shapes(tensors)
        x_TH = F.linear(pixels.flatten(1).to(self._patch.dtype), self._patch, self._patch_bias_H)
        x_TH = x_TH + torch.cat([self._positions(shape) for shape in shapes])
        turns_TA = torch.cat([self._turns(shape) for shape in shapes])
        lengths = tuple(frames * rows * columns for frames, rows, columns in shapes)
        pictures = Setting(turns_TA, lengths, layout="pairs")
        for layer in self._layers:
            x_TH = layer(x_TH, pictures)
        parts = zip(self._norm(x_TH).split(lengths), shapes, strict=True)
        return self._project(torch.cat([self._merge(part_TH, shape) for part_TH, shape in parts]))

    def _positions(self, shape: Shape) -> Tensor:
        """Learned positions stretched to the picture's grid, [frames * rows * columns, H]."""
        frames, rows, columns = shape
        grid_HYX = self._position_HYX
        if grid_HYX.shape[1:] != (rows, columns):
            stretched = F.interpolate(grid_HYX.float()[None], size=(rows, columns), mode=self.spec.interpolation)
            grid_HYX = stretched[0].to(grid_HYX.dtype)
        space_PH = grid_HYX.flatten(1).T
        if frames == 1:
            return space_PH
        time_FH = _sines(frames, self.spec.hidden, space_PH.device).to(space_PH.dtype)
        return (space_PH[None] + time_FH[:, None]).flatten(0, 1)

    def _turns(self, shape: Shape) -> Tensor:
        """Rotations [frames * rows * columns, A], complex: even pairs of a head turn by the column, odd by the row."""
        frames, rows, columns = shape
        mixer, device = self.spec.layers[0].mixer, self._patch.device
        assert isinstance(mixer, specs.Attention)
        steps = torch.arange(0, mixer.head_dim, 4, dtype=torch.float32, device=device)
        frequencies = self.spec.rope_theta ** (-steps / mixer.head_dim)
        place = torch.arange(rows * columns, device=device).unsqueeze(1)
        angles = torch.stack((place % columns * frequencies, place // columns * frequencies), dim=-1).flatten(1)
        return torch.polar(torch.ones_like(angles), angles).repeat(frames, 1)

    def _merge(self, x_TH: Tensor, shape: Shape) -> Tensor:
        """The mean over frames, cut into kernels: [M, K, H]."""
        frames, rows, columns = shape
        down, across = self.spec.merge
        grid = x_TH.view(frames, rows // down, down, columns // across, across, -1).float().mean(0).to(x_TH.dtype)
        return grid.transpose(1, 2).flatten(2, 3).flatten(0, 1)


def _sines(frames: int, width: int, device: torch.device) -> Tensor:
    """Sine and cosine of each frame's number, [frames, width]."""
    steps = torch.arange(width // 2, dtype=torch.float32, device=device)
    angles = torch.arange(frames, device=device).unsqueeze(1) * 10000.0 ** (-steps / (width / 2))
    return torch.cat((angles.sin(), angles.cos()), dim=1)


class _Projector:
    """[M, K, H] -> [M, decoder width]."""

    def __init__(self, spec: specs.MergedProjector, weights: Access) -> None:
        self._first, self._second = weights.linear("0"), weights.linear("1")
        self._activation = ACTIVATIONS[spec.activation]
        self._pre_norm = Norm(spec.pre_norm, weights.into("pre_norm")) if spec.pre_norm else None
        self._post_norm = Norm(spec.post_norm, weights.into("post_norm")) if spec.post_norm else None

    def __call__(self, x_MKH: Tensor) -> Tensor:
        x_MKH = x_MKH if self._pre_norm is None else self._pre_norm(x_MKH)
        out = self._second(self._activation(self._first(x_MKH.flatten(1))))
        return out if self._post_norm is None else self._post_norm(out)
