"""The tower over flat patches; see the spec of the same name. It is small and runs once a picture: every rank has all.

Legend: T patches of all pictures, class tokens among them where there are; E elements of a patch, H tower width, N
heads, D head dim, A = D / 2 angles, n features, W decoder width.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.model import spec as specs
from firstlight.engine.model.layers import tower_inputs as inputs
from firstlight.engine.model.layers.access import Access
from firstlight.engine.model.layers.chain import Chain
from firstlight.engine.model.layers.norm import Norm
from firstlight.kernels.gated_activation.reference import ACTIVATIONS


@dataclass(frozen=True, slots=True)
class Setting:
    """What the layers share: rotations [T, A] complex, the lengths that attend as wholes, a mask of real patches."""

    turns_TA: Tensor | None
    lengths: tuple[int, ...]
    real_T: Tensor | None = None
    layout: str = "halves"


class PatchTower:
    """Picture tensors under the vendor's names -> features [n, W], deeper features side by side behind them."""

    def __init__(self, spec: specs.PatchTower, weights: Access) -> None:
        self.spec = spec
        tower, projector = weights.into("vision"), weights.into("projector")
        self._patch_HE = tower.tensor("patch_embed.weight").flatten(1)
        self._patch_bias_H = tower.maybe("patch_embed.bias")
        self._class_H = tower.tensor("class_embed").flatten() if spec.class_token else None
        self._position_PH = tower.tensor("position_embed.weight").flatten(0, -2) if spec.positions else None
        self._embed_norm = Norm(spec.embed_norm, tower.into("embed_norm")) if spec.embed_norm else None
        self._pre_norm = Norm(spec.pre_norm, tower.into("pre_norm")) if spec.pre_norm else None
        self._norm = Norm(spec.norm, tower.into("norm")) if spec.norm else None
        self._layers = [
            _Layer(layer, tower.into(f"layers.{i}"), spec.layer_scale) for i, layer in enumerate(spec.layers)
        ]
        self._chain = Chain(spec.chain, projector)
        self._deep = [Chain(deep.chain, projector.into(f"deep.{i}")) for i, deep in enumerate(spec.deep)]

    def __call__(self, tensors: Mapping[str, Tensor]) -> Tensor:
        self._check(tensors)
        patches = inputs.patches(self.spec, tensors)
        x_TH = self._embed(patches)
        whole, windows, back_T = self._settings(patches, x_TH.device)
        if back_T is not None:
            x_TH = x_TH[torch.argsort(back_T)]
        states, deep = self._states(x_TH, whole, windows, back_T)
        features_nW = self._chain(torch.cat([self._without_class(state, patches) for state in states], dim=-1))
        by_layer = sorted(range(len(deep)), key=lambda i: self.spec.deep[i].layer)  # however the layers are listed
        return torch.cat((features_nW, *(self._deep[i](deep[i]) for i in by_layer)), dim=-1)

    def _states(
        self, x_TH: Tensor, whole: Setting, windows: Setting | None, back_T: Tensor | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The states that are asked for, and the deep ones, in the order of the pictures' patches."""
        count = len(self._layers)
        wanted = [index % (count + 1) for index in self.spec.states]
        kept = {0: x_TH}
        last = max([*wanted, *(deep.layer + 1 for deep in self.spec.deep)])
        for index, layer in enumerate(self._layers[:last]):
            is_whole = windows is None or index in self.spec.whole_layers
            x_TH = layer(x_TH, whole if is_whole or windows is None else windows)
            kept[index + 1] = x_TH
        if self._norm is not None and last == count:
            kept[count] = self._norm(x_TH)
        found = [kept[index] for index in (*wanted, *(deep.layer + 1 for deep in self.spec.deep))]
        found = found if back_T is None else [state[back_T] for state in found]
        return found[: len(wanted)], found[len(wanted) :]

    def _embed(self, patches: inputs.Patches) -> Tensor:
        x_TH = F.linear(patches.pixels_TE.to(self._patch_HE.dtype), self._patch_HE, self._patch_bias_H)
        x_TH = x_TH if self._embed_norm is None else self._embed_norm(x_TH)
        positions, lengths = self.spec.positions, patches.lengths
        table_PH = self._position_PH
        class_H = self._class_H
        if positions is not None and table_PH is not None:
            if class_H is not None:
                first = self.spec.class_token == "first"
                class_H = class_H + table_PH[0 if first else -1]
                table_PH = table_PH[1:] if first else table_PH[:-1]
            x_TH = x_TH + inputs.positions(positions, table_PH, patches).to(x_TH.dtype)
        if class_H is not None:
            parts = [(class_H[None], part) for part in x_TH.split(lengths)]
            ordered = parts if self.spec.class_token == "first" else [(part, one) for one, part in parts]
            x_TH = torch.cat([one for pair in ordered for one in pair])
        return x_TH if self._pre_norm is None else self._pre_norm(x_TH)

    def _settings(self, patches: inputs.Patches, device: torch.device) -> tuple[Setting, Setting | None, Tensor | None]:
        """What attends to what: whole frames, windows where there are, and how to undo the order of windows."""
        spec = self.spec
        extra = 0 if spec.class_token is None else 1
        mixer = spec.layers[0].mixer
        assert isinstance(mixer, specs.Attention)
        turns_TA = inputs.turns(spec.rope, mixer.head_dim, patches, extra, device) if spec.rope else None
        frames = tuple(rows * columns + extra for count, rows, columns in patches.shapes for _ in range(count))
        layout = spec.rope.layout if spec.rope else "halves"
        if spec.window is None:
            return Setting(turns_TA, frames, patches.real_T, layout), None, None
        order_T, lengths = inputs.windows(patches.shapes, spec.kernel, spec.window)
        order_T = order_T.to(device)
        turns_TA = turns_TA[order_T] if turns_TA is not None else None
        whole, inner = Setting(turns_TA, frames, layout=layout), Setting(turns_TA, lengths, layout=layout)
        return whole, inner, torch.argsort(order_T)

    def _without_class(self, x_TH: Tensor, patches: inputs.Patches) -> Tensor:
        if self.spec.class_token is None or self.spec.keep_class:
            return x_TH
        first = self.spec.class_token == "first"
        parts = x_TH.split([length + 1 for length in patches.lengths])
        return torch.cat([part[1:] if first else part[:-1] for part in parts])

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        problem = self.spec.problem(tensors)
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


class _Layer:
    """One encoder layer: attention within each length and a feed-forward, each behind its norm."""

    def __init__(self, spec: specs.LayerSpec, weights: Access, is_scaled: bool) -> None:
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
