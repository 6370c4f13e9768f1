"""One decoder layer: mixer and feed-forward around the residual stream. Legend: T tokens, H hidden."""

from __future__ import annotations

from torch import Tensor

from firstlight.engine.model import spec as specs
from firstlight.engine.model.batch import ForwardBatch
from firstlight.engine.model.layers.access import Access
from firstlight.engine.model.layers.attention import Attention
from firstlight.engine.model.layers.mla import MLA
from firstlight.engine.model.layers.mlp import MLP
from firstlight.engine.model.layers.moe import MoE
from firstlight.engine.model.layers.norm import Norm

MIXERS = {specs.Attention: Attention, specs.MLA: MLA}  # one line a block
FEED_FORWARDS = {specs.MLP: MLP, specs.MoE: MoE}


class Layer:
    """x [T, H] -> [T, H]; see `LayerSpec` for the formula. `name` is what taps are called with."""

    def __init__(self, spec: specs.LayerSpec, weights: Access, name: str) -> None:
        self.spec = spec
        self.name = name
        self._mixer = MIXERS[type(spec.mixer)](spec.mixer, weights.into("mixer"))
        self._ffn = FEED_FORWARDS[type(spec.ffn)](spec.ffn, weights.into("ffn"))
        self._mixer_norm = _maybe_norm(spec.mixer_norm, weights.into("mixer_norm"))
        self._ffn_norm = _maybe_norm(spec.ffn_norm, weights.into("ffn_norm"))
        self._post_mixer_norm = _maybe_norm(spec.post_mixer_norm, weights.into("post_mixer_norm"))
        self._post_ffn_norm = _maybe_norm(spec.post_ffn_norm, weights.into("post_ffn_norm"))

    def __call__(self, x_TH: Tensor, batch: ForwardBatch, cache: tuple[Tensor, ...]) -> Tensor:
        mixed_TH = self._mixer(x_TH if self._mixer_norm is None else self._mixer_norm(x_TH), batch, cache)
        mixed_TH = self._onto_residual(mixed_TH, self._post_mixer_norm)
        if batch.tap is not None:
            batch.tap(f"{self.name}.mixer", mixed_TH)
        if self._ffn_norm is None:
            x_TH = x_TH + mixed_TH
            normed_TH = x_TH
        else:
            normed_TH, x_TH = self._ffn_norm.after_add(mixed_TH, x_TH)
        x_TH = x_TH + self._onto_residual(self._ffn(normed_TH, batch), self._post_ffn_norm)
        if batch.tap is not None:
            batch.tap(self.name, x_TH)
        return x_TH

    def _onto_residual(self, out_TH: Tensor, norm: Norm | None) -> Tensor:
        out_TH = out_TH if norm is None else norm(out_TH)
        return out_TH if self.spec.residual_scale == 1.0 else out_TH * self.spec.residual_scale


def _maybe_norm(spec: specs.Norm | None, weights: Access) -> Norm | None:
    return None if spec is None else Norm(spec, weights)
