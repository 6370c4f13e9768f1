"""Residual topologies with more than one stream between layers, as data. No torch.

What flows between layers is one tensor [tokens, planes, hidden]: `planes(i)` of them enter layer i (layer
`num_layers`: the end of the stack), and a pipeline stage hands on exactly these. A model without such a topology hands
on [tokens, hidden].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import msgspec

from firstlight.engine.model.spec.param import Param, Scope


class AttentionResidual(msgspec.Struct, frozen=True, kw_only=True, tag="attention_residual"):
    """Every block reads a softmax mixture of the finished spans of layers and of the running sum (Kimi K3).

    The planes are the bank, oldest first, and the running sum behind it. Layers whose number is a multiple of
    `block_size` move the running sum into the bank, once they have read it, and begin a new one.
    """

    block_size: int
    eps: float
    shows_planes: ClassVar[bool] = False  # whether a hidden state is all planes

    def planes(self, layer: int) -> int:
        """Planes that enter `layer`: spans that were finished before it, and the running sum."""
        return 1 + -(-layer // self.block_size)

    def sources(self, layer: int) -> tuple[int, ...] | None:
        """The hidden states that are the planes in front of `layer`, oldest first; None if they are not among those.

        Hidden state 0 is the embedding, i what layer i - 1 shows of its output.
        """
        return (*range(0, layer, self.block_size), layer)

    def words(self) -> str:
        """`attention residuals: every block reads the finished spans of 12 layers and the running sum`."""
        return (
            f"attention residuals: every block reads the finished spans of {self.block_size} layers and the running sum"
        )

    def layer_parameters(self, scope: Scope) -> Iterator[Param]:
        """Of one layer: a norm and a projection in front of the mixer and of the feed-forward."""
        for site in ("mixer", "ffn"):
            yield from self._reader(scope.into(f"{site}_read"))

    def end_parameters(self, scope: Scope) -> Iterator[Param]:
        """Behind the last layer, in front of the final norm."""
        yield from self._reader(scope.into("read"))

    def _reader(self, scope: Scope) -> Iterator[Param]:
        yield scope.param("norm.weight", scope.hidden, role="norm")
        yield scope.param("project.weight", 1, scope.hidden, role="norm")


class HyperConnections(msgspec.Struct, frozen=True, kw_only=True, tag="hyper_connections"):
    """Several streams that every block reads as a mixture and writes to by shares (DeepSeek-V4).

    The shares come from the streams themselves, by one small projection a block; the matrix that mixes the streams
    with one another is made doubly stochastic by `iterations` of Sinkhorn-Knopp (arXiv 2512.24880).
    """

    streams: int
    iterations: int
    eps: float
    norm_eps: float
    shows_planes: ClassVar[bool] = True

    def planes(self, layer: int) -> int:
        """Planes that enter `layer`: always all streams."""
        return self.streams

    def sources(self, layer: int) -> tuple[int, ...] | None:
        """A hidden state holds all streams, one behind the other; hidden state 0 is the embedding, of which each is a
        copy."""
        return (layer,)

    def words(self) -> str:
        """`hyper-connections: 4 streams, mixed by doubly stochastic matrices`."""
        return f"hyper-connections: {self.streams} streams, mixed by doubly stochastic matrices"

    def layer_parameters(self, scope: Scope) -> Iterator[Param]:
        """Of one layer: what mixes and shares around the mixer and around the feed-forward."""
        for site in ("mixer", "ffn"):
            yield from self._shares(scope.into(site), (2 + self.streams) * self.streams, 3)

    def end_parameters(self, scope: Scope) -> Iterator[Param]:
        """Behind the last layer, in front of the final norm."""
        yield from self._shares(scope.into("read"), self.streams, 1)

    def _shares(self, scope: Scope, rows: int, scales: int) -> Iterator[Param]:
        yield scope.param("project", rows, self.streams * scope.hidden, role="norm", dtype="F32")
        yield scope.param("base", rows, role="norm", dtype="F32")
        yield scope.param("scale", scales, role="norm", dtype="F32")


Residual = AttentionResidual | HyperConnections
