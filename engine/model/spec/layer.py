"""One layer: mixer and feed-forward around the residual stream, as data. No torch."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from firstlight.engine.model.spec.attention import Attention
from firstlight.engine.model.spec.cache import CacheSpec
from firstlight.engine.model.spec.gated_delta import GatedDelta
from firstlight.engine.model.spec.lightning import Lightning
from firstlight.engine.model.spec.mamba import Mamba
from firstlight.engine.model.spec.mamba2 import Mamba2
from firstlight.engine.model.spec.mla import MLA
from firstlight.engine.model.spec.mlp import MLP
from firstlight.engine.model.spec.moe import MoE
from firstlight.engine.model.spec.norm import Norm
from firstlight.engine.model.spec.param import Param, Scope
from firstlight.engine.model.spec.residual import Residual
from firstlight.engine.model.spec.rope import Rope
from firstlight.engine.model.spec.short_conv import ShortConv

Mixer = Attention | MLA | GatedDelta | Mamba2 | Lightning | ShortConv | Mamba


FeedForward = MLP | MoE


class Blend(msgspec.Struct, frozen=True, kw_only=True):
    """How a block's output joins what it read: `keep` normed x + `add` block(normed x)."""

    keep: float
    add: float


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """x += post_mixer_norm(mixer(mixer_norm x)); x += post_ffn_norm(ffn(ffn_norm x)); what is absent is left out.

    `parallel`: both read the layer's input, x += mixer(mixer_norm x) + ffn(ffn_norm x); without an `ffn_norm` both read
    mixer_norm x. `residual` replaces the single
    stream x by the planes of that topology. What is added is multiplied by `residual_scale` first.
    """

    mixer: Mixer | None
    ffn: FeedForward | None
    mixer_norm: Norm | None = None
    ffn_norm: Norm | None = None
    post_mixer_norm: Norm | None = None
    post_ffn_norm: Norm | None = None
    residual_scale: float = 1.0
    parallel: bool = False
    residual: Residual | None = None
    blends: tuple[Blend, Blend] | None = None

    def parameters(self, scope: Scope) -> Iterator[Param]:
        for name in ("mixer_norm", "ffn_norm", "post_mixer_norm", "post_ffn_norm"):
            norm: Norm | None = getattr(self, name)
            if norm is not None:
                yield from norm.parameters(scope.into(name), scope.hidden)
        if self.residual is not None:
            yield from self.residual.layer_parameters(scope.into("residual"))
        if self.mixer is not None:
            yield from self.mixer.parameters(scope.into("mixer"))
        if self.ffn is not None:
            yield from self.ffn.parameters(scope.into("ffn"))

    @property
    def rope(self) -> Rope | None:
        """The mixer's rotary positions, if it has any."""
        return getattr(self.mixer, "rope", None)

    def cache(self) -> CacheSpec:
        """What the layer keeps of the sequences that run."""
        return CacheSpec() if self.mixer is None else self.mixer.cache()
