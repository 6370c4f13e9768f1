"""The encoder layer of vision towers: bidirectional attention and a feed-forward, whole on every rank.

Legend: T patches of all pictures, with class tokens where the tower has them; H tower width, N heads, D head dim,
A = D / 2 angles.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.model import spec as specs
from firstlight.engine.model.layers import tower_inputs as inputs
from firstlight.engine.model.layers.access import Access
from firstlight.engine.model.layers.norm import Norm
from firstlight.kernels.gated_activation.reference import ACTIVATIONS


def refuse_unfit(problem: tuple[str, str] | None) -> None:
    """Refuses (bad-image) picture tensors with a spec's `problem`, (expected, found); None: they fit."""
    if problem is not None:
        raise Refused(
            fatal(
                "bad-image",
                "the picture tensors are not what the vision tower takes",
                expected=problem[0],
                found=problem[1],
                next="preprocess the picture with the checkpoint's own processor",
            )
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """What the layers share: rotations [T, A] complex, sequence lengths for attention, and a mask of real patches."""

    turns_TA: Tensor | None
    lengths: tuple[int, ...]
    real_T: Tensor | None = None
    layout: str = "halves"


class EncoderLayer:
    """Bidirectional attention within each length and a feed-forward, each behind its norm: [T, H] -> [T, H].

    `is_scaled`: both sums are multiplied by learned factors (LayerScale, arXiv 2103.17239).
    """

    def __init__(self, spec: specs.LayerSpec, weights: Access, is_scaled: bool = False) -> None:
        assert isinstance(spec.mixer, specs.Attention)
        assert isinstance(spec.ffn, specs.MLP)
        assert spec.mixer_norm is not None
        assert spec.ffn_norm is not None
        self._attention, self._ffn = spec.mixer, spec.ffn
        self._activation = ACTIVATIONS[spec.ffn.activation]
        self._mixer_norm = Norm(spec.mixer_norm, weights.into("mixer_norm"))
        self._ffn_norm = Norm(spec.ffn_norm, weights.into("ffn_norm"))
        mixer, ffn = weights.into("mixer"), weights.into("ffn")
        self._q_norm = Norm(spec.mixer.qk_norm, mixer.into("q_norm")) if spec.mixer.qk_norm else None
        self._k_norm = Norm(spec.mixer.qk_norm, mixer.into("k_norm")) if spec.mixer.qk_norm else None
        self._qkv, self._o = mixer.linear("qkv"), mixer.linear("o")
        self._in, self._down = ffn.linear("gate_up" if spec.ffn.gated else "up"), ffn.linear("down")
        self._mixer_scale_H = weights.tensor("mixer_scale") if is_scaled else None
        self._ffn_scale_H = weights.tensor("ffn_scale") if is_scaled else None

    def __call__(self, x_TH: Tensor, setting: Setting) -> Tensor:
        mixed_TH = self._attend(self._mixer_norm(x_TH), setting)
        x_TH = x_TH + (mixed_TH if self._mixer_scale_H is None else mixed_TH * self._mixer_scale_H)
        fed_TH = self._feed(self._ffn_norm(x_TH))
        return x_TH + (fed_TH if self._ffn_scale_H is None else fed_TH * self._ffn_scale_H)

    def _feed(self, x_TH: Tensor) -> Tensor:
        if not self._ffn.gated:
            return self._down(self._activation(self._in(x_TH)))
        gate, up = self._in(x_TH).chunk(2, dim=-1)
        return self._down(self._activation(gate) * up)

    def _attend(self, x_TH: Tensor, setting: Setting) -> Tensor:
        spec = self._attention
        q_TND, k_TND, v_TND = self._qkv(x_TH).unflatten(-1, (3, spec.num_heads, spec.head_dim)).unbind(1)
        if self._q_norm is not None and self._k_norm is not None:
            dims = 1 if spec.qk_norm_over == "width" else 2
            q_TND = self._q_norm(q_TND.flatten(dims)).view_as(q_TND)
            k_TND = self._k_norm(k_TND.flatten(dims)).view_as(k_TND)
        if setting.turns_TA is not None:
            q_TND = inputs.turned(q_TND, setting.turns_TA, setting.layout)
            k_TND = inputs.turned(k_TND, setting.turns_TA, setting.layout)
        return self._o(_attention(q_TND, k_TND, v_TND, spec.scale, setting).flatten(1))


def _attention(q_TND: Tensor, k_TND: Tensor, v_TND: Tensor, scale: float, setting: Setting) -> Tensor:
    """Every patch sees all of its length; neighbours of equal length are one batch."""
    runs = [(length, len(list(same))) for length, same in itertools.groupby(setting.lengths)]
    sizes = [length * count for length, count in runs]
    masks = [None] * len(runs) if setting.real_T is None else setting.real_T.split(sizes)
    parts = zip(runs, masks, *(one_TND.split(sizes) for one_TND in (q_TND, k_TND, v_TND)), strict=True)
    return torch.cat([_alike(count, real, (q, k, v), scale) for (_, count), real, q, k, v in parts])


def _alike(count: int, real_T: Tensor | None, qkv_TND: tuple[Tensor, Tensor, Tensor], scale: float) -> Tensor:
    q, k, v = (one_TND.unflatten(0, (count, -1)).transpose(1, 2) for one_TND in qkv_TND)
    mask = None if real_T is None else real_T.view(count, 1, 1, -1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2).flatten(0, 1)
