"""One decoder layer: mixer and feed-forward around the residual stream. Legend: T tokens, P planes, H hidden."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from firstlight.engine.model import spec as specs
from firstlight.engine.model.batch import ForwardBatch
from firstlight.engine.model.layers.access import Access
from firstlight.engine.model.layers.attention import Attention
from firstlight.engine.model.layers.compressed import CompressedAttention
from firstlight.engine.model.layers.dense_and_experts import DenseAndExperts
from firstlight.engine.model.layers.gated_delta import GatedDelta
from firstlight.engine.model.layers.lightning import Lightning
from firstlight.engine.model.layers.mamba import Mamba
from firstlight.engine.model.layers.mamba2 import Mamba2
from firstlight.engine.model.layers.mla import MLA
from firstlight.engine.model.layers.mlp import MLP
from firstlight.engine.model.layers.moe import MoE
from firstlight.engine.model.layers.norm import Norm
from firstlight.engine.model.layers.per_layer import PerLayerGate
from firstlight.engine.model.layers.residual import TOPOLOGIES, Site
from firstlight.engine.model.layers.rg_lru import RgLru
from firstlight.engine.model.layers.short_conv import ShortConv
from firstlight.engine.model.layers.side_by_side import SideBySide

MIXERS = {  # one line a block
    specs.Attention: Attention,
    specs.CompressedAttention: CompressedAttention,
    specs.GatedDelta: GatedDelta,
    specs.Lightning: Lightning,
    specs.MLA: MLA,
    specs.Mamba2: Mamba2,
    specs.Mamba: Mamba,
    specs.RgLru: RgLru,
    specs.ShortConv: ShortConv,
    specs.SideBySide: SideBySide,
}
FEED_FORWARDS = {specs.MLP: MLP, specs.MoE: MoE, specs.DenseAndExperts: DenseAndExperts}


class Layer:
    """x [T, H], or [T, P, H] -> the same; see `LayerSpec` for the formula. `name` is what taps are called with."""

    def __init__(self, spec: specs.LayerSpec, weights: Access, index: int) -> None:
        self.spec = spec
        self.name = f"layers.{index}"
        self._mixer = MIXERS[type(spec.mixer)](spec.mixer, weights.into("mixer")) if spec.mixer else None
        self._ffn = FEED_FORWARDS[type(spec.ffn)](spec.ffn, weights.into("ffn")) if spec.ffn else None
        self._mixer_norm = _maybe_norm(spec.mixer_norm, weights.into("mixer_norm"))
        self._ffn_norm = _maybe_norm(spec.ffn_norm, weights.into("ffn_norm"))
        if (spec.parallel or spec.mixer is None) and spec.ffn_norm is None:
            self._ffn_norm = self._mixer_norm
        self._post_mixer_norm = _maybe_norm(spec.post_mixer_norm, weights.into("post_mixer_norm"))
        self._post_ffn_norm = _maybe_norm(spec.post_ffn_norm, weights.into("post_ffn_norm"))
        self._streams = (
            TOPOLOGIES[type(spec.residual)](spec.residual, weights.into("residual"), index) if spec.residual else None
        )
        self._parts = [Layer(part, weights.into(f"parts.{i}"), index) for i, part in enumerate(spec.parts)]
        self._shortcut = MoE(spec.shortcut, weights.into("shortcut")) if spec.shortcut else None
        self._per_layer = PerLayerGate(spec.per_layer, weights.into("per_layer")) if spec.per_layer else None
        self._output_scale_1 = weights.maybe("output_scale")
        self._run = self._choose()

    def __call__(self, x_TH: Tensor, batch: ForwardBatch, cache: tuple[Tensor, ...]) -> Tensor:
        x_TH = self._run(x_TH, batch, cache)
        if self._per_layer is not None:
            x_TH = self._per_layer(x_TH, batch.handed["input"])
        if self._output_scale_1 is not None:
            x_TH = x_TH * self._output_scale_1
        if batch.tap is not None:
            batch.tap(self.name, x_TH if self._streams is None else self._streams.shown(x_TH))
        return x_TH

    def _choose(self) -> Callable[[Tensor, ForwardBatch, tuple[Tensor, ...]], Tensor]:
        if self._parts:
            return self._part_by_part
        if self._streams is not None:
            return self._through_planes
        if self.spec.parallel:
            return self._side_by_side
        if self.spec.blends is not None:
            return self._over_norms
        if self._mixer is not None and self._ffn is not None:
            return self._one_after_another
        return self._alone

    def _one_after_another(self, x_TH: Tensor, batch: ForwardBatch, cache: tuple[Tensor, ...]) -> Tensor:
        x_TH, seen_TH = self.up_to_ffn(x_TH, batch, cache)
        return x_TH + self.from_ffn(seen_TH, batch)

    def _part_by_part(self, x_TH: Tensor, batch: ForwardBatch, cache: tuple[Tensor, ...]) -> Tensor:
        quiet, joins_TH = replace(batch, tap=None), None
        for part in self._parts:
            count = len(part.spec.cache().tensors)
            own, cache = cache[:count], cache[count:]
            if part is self._parts[0] and self._shortcut is not None:
                x_TH, seen_TH = part.up_to_ffn(x_TH, quiet, own)
                joins_TH = self._shortcut(seen_TH, quiet)
                x_TH = x_TH + part.from_ffn(seen_TH, quiet)
            else:
                x_TH = part(x_TH, quiet, own)
        return x_TH if joins_TH is None else x_TH + joins_TH

    def up_to_ffn(self, x_TH: Tensor, batch: ForwardBatch, cache: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """(the stream behind the mixer, what the feed-forward reads of it)."""
        mixed_TH = self._mixed(x_TH, batch, cache)
        if self._ffn_norm is None:
            x_TH = x_TH + mixed_TH
            return x_TH, x_TH
        normed_TH, x_TH = self._ffn_norm.after_add(mixed_TH, x_TH)
        return x_TH, normed_TH

    def from_ffn(self, normed_TH: Tensor, batch: ForwardBatch) -> Tensor:
        """What the feed-forward adds, given what it reads."""
        assert self._ffn is not None
        return self._onto_residual(self._ffn(normed_TH, batch), self._post_ffn_norm)

    def _side_by_side(self, x_TH: Tensor, batch: ForwardBatch, cache: tuple[Tensor, ...]) -> Tensor:
        return x_TH + self._mixed(x_TH, batch, cache) + self._fed(x_TH, batch)

    def _over_norms(self, x_TH: Tensor, batch: ForwardBatch, cache: tuple[Tensor, ...]) -> Tensor:
        assert self.spec.blends is not None
        assert self._mixer is not None
        assert self._ffn is not None
        assert self._mixer_norm is not None
        assert self._ffn_norm is not None
        mixed, fed = self.spec.blends
        x_TH = self._mixer_norm(x_TH)
        out_TH = self._mixer(x_TH, batch, cache)
        if batch.tap is not None:
            batch.tap(f"{self.name}.mixer", out_TH)
        x_TH = self._ffn_norm(x_TH * mixed.keep + out_TH * mixed.add)
        return x_TH * fed.keep + self._ffn(x_TH, batch) * fed.add

    def _alone(self, x_TH: Tensor, batch: ForwardBatch, cache: tuple[Tensor, ...]) -> Tensor:
        return x_TH + (self._fed(x_TH, batch) if self._mixer is None else self._mixed(x_TH, batch, cache))

    def _through_planes(self, x_TPH: Tensor, batch: ForwardBatch, cache: tuple[Tensor, ...]) -> Tensor:
        streams = self._streams
        assert streams is not None
        blocks: list[tuple[Site, Callable[[Tensor], Tensor]]] = []
        if self._mixer is not None:
            blocks.append(("mixer", lambda seen_TH: self._mixed(seen_TH, batch, cache)))
        if self._ffn is not None:
            blocks.append(("ffn", lambda seen_TH: self._fed(seen_TH, batch)))
        for site, block in blocks:
            seen_TH, join = streams.read(x_TPH, site)
            x_TPH = join(block(seen_TH))
        return x_TPH

    def _mixed(self, x_TH: Tensor, batch: ForwardBatch, cache: tuple[Tensor, ...]) -> Tensor:
        """What the mixer adds to its input."""
        assert self._mixer is not None
        mixed_TH = self._mixer(x_TH if self._mixer_norm is None else self._mixer_norm(x_TH), batch, cache)
        mixed_TH = self._onto_residual(mixed_TH, self._post_mixer_norm)
        if batch.tap is not None:
            batch.tap(f"{self.name}.mixer", mixed_TH)
        return mixed_TH

    def _fed(self, x_TH: Tensor, batch: ForwardBatch) -> Tensor:
        """What the feed-forward adds to its input."""
        assert self._ffn is not None
        out_TH = self._ffn(x_TH if self._ffn_norm is None else self._ffn_norm(x_TH), batch)
        return self._onto_residual(out_TH, self._post_ffn_norm)

    def _onto_residual(self, out_TH: Tensor, norm: Norm | None) -> Tensor:
        out_TH = out_TH if norm is None else norm(out_TH)
        return out_TH if self.spec.residual_scale == 1.0 else out_TH * self.spec.residual_scale


def _maybe_norm(spec: specs.Norm | None, weights: Access) -> Norm | None:
    return None if spec is None else Norm(spec, weights)
