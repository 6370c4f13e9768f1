"""Per-layer input embeddings, from the token and from its embedding (Gemma 3n and 4), as data. No torch."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from firstlight.engine.model.spec.norm import Norm
from firstlight.engine.model.spec.param import Param, Scope
from firstlight.engine.parallel.placement import Vocab


class PerLayerInputs(msgspec.Struct, frozen=True, kw_only=True):
    """input_i = (norm(W_i x / sqrt(hidden)) + sqrt(width) E_i[token]) / sqrt(2) for each of `layers`, [width] each.

    x is the token's embedding as the first layer sees it, E_i a table of `vocab_size` rows. All of them are made on the
    first pipeline stage and handed on.
    """

    layers: int
    width: int
    vocab_size: int
    norm: Norm

    def parameters(self, scope: Scope) -> Iterator[Param]:
        columns = self.layers * self.width
        yield scope.param("embed.weight", self.vocab_size, columns, role="embedding", place=(Vocab(0),))
        yield scope.param("project.weight", columns, scope.hidden, role="mlp")
        yield from self.norm.parameters(scope.into("norm"), self.width)


class PerLayerGate(msgspec.Struct, frozen=True, kw_only=True):
    """What a layer does with its input, behind its feed-forward: x += norm(project(act(gate x) * input))."""

    width: int
    activation: str
    norm: Norm

    def parameters(self, scope: Scope) -> Iterator[Param]:
        """Every rank has all of it."""
        yield scope.param("gate.weight", self.width, scope.hidden, role="mlp")
        yield scope.param("project.weight", scope.hidden, self.width, role="mlp")
        yield from self.norm.parameters(scope.into("norm"), scope.hidden)
