"""CLIP- and SigLIP-type vision tower with its projector. It is small and runs once a picture: every rank has all of it.

Legend: B pictures, C channels, Y X pixels, P patches, S = P (+ 1 class token), H tower width, N heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.model.layers.access import Access
from firstlight.engine.model.layers.norm import Norm
from firstlight.engine.model.spec import MLP, LayerSpec, Projector, VisionSpec
from firstlight.engine.model.spec import Attention as AttentionSpec
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
        self._layers = [_Layer(layer, tower.into(f"layers.{i}")) for i, layer in enumerate(spec.layers)]
        self._project = _Projector(spec.projector, weights.into("projector"))

    def __call__(self, tensors: Mapping[str, Tensor]) -> Tensor:
        states = self._states(self._check(tensors))
        count = len(self._layers)
        chosen = [states[index % (count + 1)] for index in self.spec.feature_layers]
        if self.spec.drop_first:
            chosen = [state_BSH[:, 1:] for state_BSH in chosen]
        return self._project(torch.cat(chosen, dim=-1)).flatten(0, 1)

    def _states(self, pixels_BCYX: Tensor) -> dict[int, Tensor]:
        """The hidden states that are asked for, by index (0 is the embedding); later layers are not run."""
        wanted = {index % (len(self._layers) + 1) for index in self.spec.feature_layers}
        x_BSH = self._embed(pixels_BCYX)
        states = {0: x_BSH}
        for index, layer in enumerate(self._layers[: max(wanted)], start=1):
            x_BSH = layer(x_BSH)
            states[index] = x_BSH
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

    def _check(self, tensors: Mapping[str, Tensor]) -> Tensor:
        size, channels = self.spec.image_size, self.spec.channels
        pixels = tensors.get("pixel_values")
        if pixels is None or pixels.dim() != 4 or tuple(pixels.shape[1:]) != (channels, size, size):
            raise Refused(
                fatal(
                    "bad-image",
                    "the picture tensor is not what the vision tower takes",
                    expected=f"pixel_values [pictures, {channels}, {size}, {size}]",
                    found="no pixel_values" if pixels is None else f"pixel_values {list(pixels.shape)}",
                    next="preprocess the picture with the checkpoint's own processor",
                )
            )
        return pixels


class _Layer:
    """One encoder layer: bidirectional attention and an MLP, each behind its norm."""

    def __init__(self, spec: LayerSpec, weights: Access) -> None:
        assert isinstance(spec.mixer, AttentionSpec)
        assert isinstance(spec.ffn, MLP)
        assert not spec.ffn.gated
        assert spec.mixer_norm is not None
        assert spec.ffn_norm is not None
        self._attention = spec.mixer
        self._activation = ACTIVATIONS[spec.ffn.activation]
        self._mixer_norm = Norm(spec.mixer_norm, weights.into("mixer_norm"))
        self._ffn_norm = Norm(spec.ffn_norm, weights.into("ffn_norm"))
        self._qkv, self._o = weights.into("mixer").linear("qkv"), weights.into("mixer").linear("o")
        self._up, self._down = weights.into("ffn").linear("up"), weights.into("ffn").linear("down")

    def __call__(self, x_BSH: Tensor) -> Tensor:
        x_BSH = x_BSH + self._attend(self._mixer_norm(x_BSH))
        return x_BSH + self._down(self._activation(self._up(self._ffn_norm(x_BSH))))

    def _attend(self, x_BSH: Tensor) -> Tensor:
        spec = self._attention
        heads = self._qkv(x_BSH).unflatten(-1, (3, spec.num_heads, spec.head_dim))
        q_BNSD, k_BNSD, v_BNSD = heads.permute(2, 0, 3, 1, 4).unbind(0)
        out_BNSD = F.scaled_dot_product_attention(q_BNSD, k_BNSD, v_BNSD, scale=spec.scale)
        return self._o(out_BNSD.transpose(1, 2).flatten(2))


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
