"""The projector between a vision tower and the decoder, as a list of steps. No torch.

Patches come with those of one kernel next to each other. Every merger and projector in use is a short chain of the same
few steps, so that a new one is a new order and not a new block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from firstlight.engine.model.spec.norm import Norm
from firstlight.engine.model.spec.param import Param, Scope


class NormStep(msgspec.Struct, frozen=True, kw_only=True, tag="norm"):
    """A norm over the width as it is at this step."""

    name: str
    norm: Norm

    def out(self, width: int) -> int:
        return width

    def parameters(self, scope: Scope, width: int) -> Iterator[Param]:
        for param in self.norm.parameters(scope.into(self.name), width):
            yield msgspec.structs.replace(param, role="projector")


class LinearStep(msgspec.Struct, frozen=True, kw_only=True, tag="linear"):
    """A linear layer to `width`; `kernel`: stored as a convolution of that many patches a side over merged channels."""

    name: str
    width: int
    bias: bool = True
    kernel: int | None = None

    def out(self, width: int) -> int:
        return self.width

    def parameters(self, scope: Scope, width: int) -> Iterator[Param]:
        side = self.kernel
        shape = (width,) if side is None else (width // side**2, side, side)
        yield scope.param(f"{self.name}.weight", self.width, *shape, role="projector")
        if self.bias:
            yield scope.param(f"{self.name}.bias", self.width, role="projector")


class ActivationStep(msgspec.Struct, frozen=True, kw_only=True, tag="activation"):
    """An activation of kernels/gated_activation."""

    activation: str

    def out(self, width: int) -> int:
        return width

    def parameters(self, scope: Scope, width: int) -> Iterator[Param]:
        yield from ()


class GatedStep(msgspec.Struct, frozen=True, kw_only=True, tag="gated"):
    """down(act(gate x) * up x), to `width` (None: as wide as x)."""

    intermediate: int
    activation: str
    width: int | None = None
    bias: bool = False

    def out(self, width: int) -> int:
        return self.width or width

    def parameters(self, scope: Scope, width: int) -> Iterator[Param]:
        shapes = {"gate": (self.intermediate, width), "up": (self.intermediate, width)}
        for part, shape in {**shapes, "down": (self.out(width), self.intermediate)}.items():
            yield scope.param(f"{part}.weight", *shape, role="projector")
            if self.bias:
                yield scope.param(f"{part}.bias", shape[0], role="projector")


class MergeStep(msgspec.Struct, frozen=True, kw_only=True, tag="merge"):
    """`patches` patches become one: `concatenated`, patch after patch; `interleaved`, channel after channel, as a
    convolution or an unfolding lays them; or their `mean`."""

    patches: int
    how: Literal["concatenated", "interleaved", "mean"] = "concatenated"

    def out(self, width: int) -> int:
        return width if self.how == "mean" else width * self.patches

    def parameters(self, scope: Scope, width: int) -> Iterator[Param]:
        yield from ()


Step = NormStep | LinearStep | ActivationStep | GatedStep | MergeStep


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """Steps from patches [T, width] to features [n, the decoder's width]; `n` is T by the patches merged."""

    width: int
    steps: tuple[Step, ...]

    @property
    def merged(self) -> int:
        """Patches that become one feature."""
        count = 1
        for step in self.steps:
            count *= step.patches if isinstance(step, MergeStep) else 1
        return count

    def parameters(self, scope: Scope) -> Iterator[Param]:
        width = self.width
        for step in self.steps:
            yield from step.parameters(scope, width)
            width = step.out(width)
