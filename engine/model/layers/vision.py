"""CLIP and SigLIP vision towers with a projector, whole on every rank.

Legend: B pictures, C channels, Y X pixels, P patches, S = P (+ 1 class token), H tower width, T = B * S.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.engine.model.layers.access import Access
from firstlight.engine.model.layers.encoder import EncoderLayer, Setting, refuse_unfit
from firstlight.engine.model.layers.norm import Norm
from firstlight.engine.model.spec import Projector, VisionSpec
from firstlight.kernels.gated_activation.reference import ACTIVATIONS


class VisionTower:
    """pixel_values [B, C, Y, X] -> features for the decoder [B * tokens_per_image, decoder width]."""

    def __init__(self, spec: VisionSpec, weights: Access) -> None:
        self.spec = spec
        tower = weights.into("vision")
        self._patch_HCYX = tower.tensor("patch_embed.weight")
        self._patch_bias_H = tower.maybe("patch_embed.bias")
        self._class_H = tower.maybe("class_embed")
        self._position_SH = tower.tensor("position_embed.weight")
        self._pre_norm = Norm(spec.pre_norm, tower.into("pre_norm")) if spec.pre_norm else None
        self._layers = [EncoderLayer(layer, tower.into(f"layers.{i}")) for i, layer in enumerate(spec.layers)]
        self._project = _Projector(spec.projector, weights.into("projector"))

    def __call__(self, tensors: Mapping[str, Tensor]) -> Tensor:
        states = self._states(self._pixels(tensors))
        count = len(self._layers)
        chosen = [states[index % (count + 1)] for index in self.spec.feature_layers]
        if self.spec.drop_first:
            chosen = [state_BSH[:, 1:] for state_BSH in chosen]
        return self._project(torch.cat(chosen, dim=-1)).flatten(0, 1)

    def _states(self, pixels_BCYX: Tensor) -> dict[int, Tensor]:
        """The hidden states that are asked for, by index (0 is the embedding); later layers are not run."""
        wanted = {index % (len(self._layers) + 1) for index in self.spec.feature_layers}
        x_BSH = self._embed(pixels_BCYX)
        pictures = Setting(turns_TA=None, lengths=(x_BSH.shape[1],) * x_BSH.shape[0])
        states, x_TH = {0: x_BSH}, x_BSH.flatten(0, 1)
        for index, layer in enumerate(self._layers[: max(wanted)], start=1):
            x_TH = layer(x_TH, pictures)
            states[index] = x_TH.view_as(x_BSH)
        return {index: states[index] for index in wanted}

    def _embed(self, pixels_BCYX: Tensor) -> Tensor:
        patches = F.conv2d(
            pixels_BCYX.to(self._patch_HCYX.dtype), self._patch_HCYX, self._patch_bias_H, stride=self.spec.patch_size
        )
        x_BSH = patches.flatten(2).transpose(1, 2)
        if self._class_H is not None:
            x_BSH = torch.cat((self._class_H.expand(x_BSH.shape[0], 1, -1), x_BSH), dim=1)
        x_BSH = x_BSH + self._position_SH
        return x_BSH if self._pre_norm is None else self._pre_norm(x_BSH)

    def _pixels(self, tensors: Mapping[str, Tensor]) -> Tensor:
        size, channels = self.spec.image_size, self.spec.channels
        pixels = tensors.get("pixel_values", torch.empty(0))
        if pixels.dim() != 4 or tuple(pixels.shape[1:]) != (channels, size, size):
            found = f"pixel_values {list(pixels.shape)}" if "pixel_values" in tensors else "no pixel_values"
            refuse_unfit((f"pixel_values [pictures, {channels}, {size}, {size}]", found))
        return pixels


class _Projector:
    """Linear layers with the activation between them, behind a norm or not."""

    def __init__(self, spec: Projector, weights: Access) -> None:
        self._norm = None if spec.norm is None else Norm(spec.norm, weights.into("norm"))
        self._linears = [weights.linear(str(index)) for index in range(len(spec.widths) - 1)]
        self._activation = ACTIVATIONS[spec.activation]

    def __call__(self, x_BSH: Tensor) -> Tensor:
        x_BSH = x_BSH if self._norm is None else self._norm(x_BSH)
        for index, linear in enumerate(self._linears):
            x_BSH = linear(self._activation(x_BSH) if index else x_BSH)
        return x_BSH
