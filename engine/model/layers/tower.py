"""The vision transformer over patches of pictures of any size, whole on every rank; spec: `spec/tower.py`.

Legend: T patches of all pictures, class tokens among them where there are; E elements of a patch, H tower width, n
features, W decoder width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.engine.model import spec as specs
from firstlight.engine.model.layers import tower_inputs as inputs
from firstlight.engine.model.layers.access import Access
from firstlight.engine.model.layers.chain import Chain
from firstlight.engine.model.layers.encoder import EncoderLayer, Setting, refuse_unfit
from firstlight.engine.model.layers.norm import Norm


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
            EncoderLayer(layer, tower.into(f"layers.{i}"), spec.layer_scale) for i, layer in enumerate(spec.layers)
        ]
        self._chain = Chain(spec.chain, projector)
        self._deep = [Chain(deep.chain, projector.into(f"deep.{i}")) for i, deep in enumerate(spec.deep)]

    def __call__(self, tensors: Mapping[str, Tensor]) -> Tensor:
        refuse_unfit(self.spec.problem(tensors))
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
