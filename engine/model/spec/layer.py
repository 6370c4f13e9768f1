"""One layer: mixer and feed-forward around the residual stream, as data. No torch."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from firstlight.engine.model.spec.attention import Attention
from firstlight.engine.model.spec.cache import CacheSpec
from firstlight.engine.model.spec.compressed import CompressedAttention
from firstlight.engine.model.spec.dense_and_experts import DenseAndExperts
from firstlight.engine.model.spec.gated_delta import GatedDelta
from firstlight.engine.model.spec.lightning import Lightning
from firstlight.engine.model.spec.mamba import Mamba
from firstlight.engine.model.spec.mamba2 import Mamba2
from firstlight.engine.model.spec.mla import MLA
from firstlight.engine.model.spec.mlp import MLP
from firstlight.engine.model.spec.moe import MoE
from firstlight.engine.model.spec.norm import Norm
from firstlight.engine.model.spec.param import Param, Scope
from firstlight.engine.model.spec.per_layer import PerLayerGate
from firstlight.engine.model.spec.residual import Residual
from firstlight.engine.model.spec.rg_lru import RgLru
from firstlight.engine.model.spec.rope import Rope
from firstlight.engine.model.spec.short_conv import ShortConv
from firstlight.engine.model.spec.side_by_side import SideBySide

Mixer = Attention | CompressedAttention | GatedDelta | Lightning | MLA | Mamba | Mamba2 | RgLru | ShortConv | SideBySide


FeedForward = MLP | MoE | DenseAndExperts


class Blend(msgspec.Struct, frozen=True, kw_only=True):
    """How a block's output joins what it read: `keep` normed x + `add` block(normed x)."""

    keep: float
    add: float


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """x += post_mixer_norm(mixer(mixer_norm x)); x += post_ffn_norm(ffn(ffn_norm x)); what is absent is left out.

    `parallel`: both read the layer's input, x += mixer(mixer_norm x) + ffn(ffn_norm x); without an `ffn_norm` both read
    mixer_norm x. `residual` replaces the single stream x by the planes of that topology. What is added is multiplied by
    `residual_scale` first; `per_layer` takes in an input of the layer's own, and with `output_scale` a learned number
    multiplies what the layer hands on.
    With `blends`, of mixer and feed-forward, the normed x takes the place of x (MiniMax-01, arXiv 2501.08313).

    A layer of `parts` has nothing of its own but a `shortcut`: experts that read what the first part's feed-forward
    reads, and whose output joins behind the last part (LongCat-Flash, arXiv 2509.01322).
    """

    mixer: Mixer | None = None
    ffn: FeedForward | None = None
    mixer_norm: Norm | None = None
    ffn_norm: Norm | None = None
    post_mixer_norm: Norm | None = None
    post_ffn_norm: Norm | None = None
    residual_scale: float = 1.0
    per_layer: PerLayerGate | None = None
    output_scale: bool = False
    parallel: bool = False
    residual: Residual | None = None
    blends: tuple[Blend, Blend] | None = None
    parts: tuple[LayerSpec, ...] = ()
    shortcut: MoE | None = None

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
        if self.per_layer is not None:
            yield from self.per_layer.parameters(scope.into("per_layer"))
        if self.output_scale:
            yield scope.param("output_scale", 1, role="norm")
        for index, part in enumerate(self.parts):
            yield from part.parameters(scope.into(f"parts.{index}"))
        if self.shortcut is not None:
            yield from self.shortcut.parameters(scope.into("shortcut"))

    @property
    def whole(self) -> tuple[LayerSpec, ...]:
        """The pairs of mixer and feed-forward in it, in order: itself, or its parts."""
        return self.parts or (self,)

    @property
    def experts(self) -> MoE | None:
        """Its mixture of experts, if it has one."""
        if isinstance(self.ffn, DenseAndExperts):
            return self.ffn.experts
        return self.ffn if isinstance(self.ffn, MoE) else self.shortcut

    @property
    def rope(self) -> Rope | None:
        """The first mixer's rotary positions, if it has any."""
        return getattr(self.whole[0].mixer, "rope", None)

    @property
    def keys_of(self) -> int | None:
        """The layer whose keys and values its mixer attends to; None: its own."""
        return getattr(self.mixer, "keys_of", None)

    @property
    def knows_positions(self) -> bool:
        """Whether its first mixer rotates, or biases by distance."""
        return self.rope is not None or getattr(self.whole[0].mixer, "alibi", None) is not None

    def cache(self) -> CacheSpec:
        """What the layer keeps of the sequences that run."""
        if not self.parts:
            return CacheSpec() if self.mixer is None else self.mixer.cache()
        caches = [part.cache() for part in self.parts]
        assert not any(cache.states for cache in caches), "parts that keep state have no place in the cache's order yet"
        return CacheSpec(tensors=tuple(one for cache in caches for one in cache.tensors), window=caches[0].window)
