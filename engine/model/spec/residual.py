"""How layers hand on what they computed when it is more than one residual stream, as data. No torch.

What flows between layers is one tensor [tokens, planes, hidden]: `planes(i)` of them enter layer i (layer
`num_layers`: the end of the stack), and a pipeline stage hands on exactly these. A model without such a topology hands
on [tokens, hidden].
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from firstlight.engine.model.spec.param import Param, Scope


class AttentionResidual(msgspec.Struct, frozen=True, kw_only=True, tag="attention_residual"):
    """Every block reads a softmax mixture of the finished spans of layers and of the running sum (Kimi K3).

    The planes are the bank, oldest first, and the running sum behind it. Layers whose number is a multiple of
    `block_size` move the running sum into the bank, once they have read it, and begin a new one.
    """

    block_size: int
    eps: float

    def planes(self, layer: int) -> int:
        """Planes that enter `layer`: spans that were finished before it, and the running sum."""
        return 1 + -(-layer // self.block_size)

    def sources(self, layer: int) -> tuple[int, ...] | None:
        """The hidden states that are the planes in front of `layer`, oldest first; None if they are not among those.

        Hidden state 0 is the embedding, i what layer i - 1 shows of its output.
        """
        return (*range(0, layer, self.block_size), layer)

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


Residual = AttentionResidual
