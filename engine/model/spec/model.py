"""The specification of a whole model: layers, embeddings, head and vision tower, as data. No torch."""

from __future__ import annotations

import msgspec

from firstlight.engine.findings import Finding
from firstlight.engine.model.spec.anyres import AnyRes
from firstlight.engine.model.spec.foreign import ForeignVision
from firstlight.engine.model.spec.layer import LayerSpec
from firstlight.engine.model.spec.mla import MLA, Indexer
from firstlight.engine.model.spec.moonvit import MoonViT
from firstlight.engine.model.spec.norm import Norm
from firstlight.engine.model.spec.param import FIRST_STAGE, LAST_STAGE, Param, Scope
from firstlight.engine.model.spec.per_layer import PerLayerInputs
from firstlight.engine.model.spec.residual import Residual
from firstlight.engine.model.spec.tower import PatchTower
from firstlight.engine.model.spec.vision import VisionSpec
from firstlight.engine.parallel.placement import Vocab

Vision = VisionSpec | MoonViT | PatchTower | AnyRes | ForeignVision


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A whole model. `tied_head`: the output head is the embedding unless the checkpoint brings a head of its own.

    `embed_scale` multiplies the embeddings of tokens and, with `scales_pictures`, the features in their places as well.
    `learned_positions` vectors, one a position, are added to the embedding; position 0 has number `position_offset`.
    `embed_norm` stands behind all of that. `per_layer`: every layer has an input of its own.
    """

    family: str
    vocab_size: int
    hidden: int
    layers: tuple[LayerSpec, ...]
    final_norm: Norm
    tied_head: bool
    max_positions: int
    embed_scale: float = 1.0
    scales_pictures: bool = False
    learned_positions: int = 0
    position_offset: int = 0
    embed_norm: Norm | None = None
    per_layer: PerLayerInputs | None = None
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    head_bias: bool = False
    vision: Vision | None = None
    mtp: tuple[LayerSpec, ...] = ()
    mtp_ends: bool = True  # each of them has an embedding and a head of its own
    dtype: str = "BF16"
    findings: tuple[Finding, ...] = ()

    def parameters(self, share: tuple[int, int] = (0, 1)) -> tuple[Param, ...]:
        """Every parameter in global shape, in forward order; a tied head is declared too (`Ledger` says where from).

        `share`: (rank, ranks) of the expert axis: of experts those of that rank alone.
        """
        scope = Scope(prefix="", layer=FIRST_STAGE, hidden=self.hidden)
        found: list[Param] = []
        if self.vision is not None:
            found.extend(self.vision.parameters())
        found.append(scope.param("embed.weight", self.vocab_size, self.hidden, role="embedding", place=(Vocab(0),)))
        if self.learned_positions:
            found.append(scope.param("positions.weight", self.learned_positions, self.hidden, role="embedding"))
        if self.embed_norm is not None:
            found.extend(self.embed_norm.parameters(scope.into("embed_norm"), self.hidden))
        if self.per_layer is not None:
            found.extend(self.per_layer.parameters(scope.into("per_layer")))
        for index, layer in enumerate(self.layers):
            scope_of_it = Scope(prefix=f"layers.{index}.", layer=index, hidden=self.hidden, share=share)
            found.extend(layer.parameters(scope_of_it))
        last = msgspec.structs.replace(scope, layer=LAST_STAGE)
        if self.residual is not None:
            found.extend(self.residual.end_parameters(last.into("residual")))
        found.extend(self.final_norm.parameters(last.into("norm"), self.hidden))
        found.append(last.param("head.weight", self.vocab_size, self.hidden, role="head", place=(Vocab(0),)))
        if self.head_bias:
            found.append(last.param("head.bias", self.vocab_size, role="head", place=(Vocab(0),)))
        return tuple(found)

    def mtp_parameters(self) -> tuple[Param, ...]:
        """Parameters of multi-token-prediction layers, stored behind the last layer; they are counted and never loaded.

        Each is a layer with two norms, a projection of [embedding | hidden], a norm and, with `mtp_ends`, its own
        copies of embedding and head (DeepSeek-V3, arXiv 2412.19437, section 2.2).
        """
        found: list[Param] = []
        for index, layer in enumerate(self.mtp, start=self.num_layers):
            scope = Scope(prefix=f"mtp.{index}.", layer=index, hidden=self.hidden)
            found.extend(layer.parameters(scope))
            for name in ("embedding_norm", "hidden_norm", "norm"):
                found.extend(self.final_norm.parameters(scope.into(name), self.hidden))
            found.append(scope.param("project.weight", self.hidden, 2 * self.hidden, role="router"))
            if self.mtp_ends:
                found.append(scope.param("embed.weight", self.vocab_size, self.hidden, role="embedding"))
                found.append(scope.param("head.weight", self.vocab_size, self.hidden, role="head"))
        return tuple(found)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def residual(self) -> Residual | None:
        """The residual topology, which all layers share; None: a single stream."""
        return self.layers[-1].residual if self.layers else None

    def chooser(self, layer: int) -> int | None:
        """The layer whose indexer chooses the keys that `layer` attends to; None: it attends to all it sees."""
        if self._indexer(layer) is None:
            return None
        return next((i for i in range(layer, -1, -1) if (one := self._indexer(i)) is not None and one.own), None)

    @property
    def shares_choices(self) -> bool:
        """Whether any layer attends to keys that another layer chose or caches."""
        return any(self.chooser(layer) not in (None, layer) for layer in range(self.num_layers)) or any(
            layer.keys_of is not None for layer in self.layers
        )

    @property
    def most_stages(self) -> int:
        """The largest possible number of pipeline stages."""
        return len(self.together())

    def together(self) -> tuple[tuple[int, int], ...]:
        """Runs of layers [start, stop) that must be on one stage, because a layer attends to another's keys."""
        last = {layer.keys_of: index for index, layer in enumerate(self.layers) if layer.keys_of is not None}
        found, start, reach = [], 0, 0
        for index in range(self.num_layers):
            reach = max(reach, last.get(index, index))
            if reach == index:
                found.append((start, index + 1))
                start = index + 1
        return tuple(found)

    def _indexer(self, layer: int) -> Indexer | None:
        mixer = self.layers[layer].mixer
        return mixer.indexer if isinstance(mixer, MLA) else None

    def chosen_keys(self, layer: int) -> tuple[int, int] | None:
        """(layer in front of `layer` that chose keys for one at or behind it, keys a token); None: there is no such.

        A pipeline stage that begins at `layer` is handed them.
        """
        for index in range(layer, self.num_layers):
            indexer, owner = self._indexer(index), self.chooser(index)
            if indexer is not None and owner is not None:
                return (owner, indexer.topk) if owner < layer else None
        return None

    def hidden_width(self, index: int) -> int:
        """How wide hidden state `index` is where it is compared: 0 the embedding, i the output of layer i - 1.

        Behind a layer, all planes of a topology that no earlier hidden state holds; elsewhere one stream.
        """
        inside = 0 < index < self.num_layers and self.residual is not None and self.residual.shows_planes
        return self.hidden * (self.stream_shape(index)[0] if inside else 1)

    def stream_shape(self, layer: int) -> tuple[int, ...]:
        """Shape of the residual stream that enters `layer`, per token: [hidden], or [planes, hidden]."""
        return (self.hidden,) if self.residual is None else (self.residual.planes(layer), self.hidden)
