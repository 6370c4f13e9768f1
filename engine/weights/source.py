"""Where a parameter comes from: a region of a stored tensor, as data. No torch."""

from __future__ import annotations

import msgspec

from firstlight.engine.weights.formats.grid import Packed

Region = tuple[tuple[int, int, int], ...]  # per dim of the stored tensor: start, stop, step


class Source(msgspec.Struct, frozen=True, gc=False):
    """The part of a stored tensor that is one whole parameter: `region` in the tensor's dims, then `transpose`d.

    Of a `packed` weight, `tensor` is the first of its tensors, and `region` counts in its [..., rows, columns].
    """

    tensor: str
    region: Region
    transpose: bool = False
    tied: bool = False
    packed: Packed | None = None

    def cut(self, bounds: tuple[tuple[int, int], ...]) -> Region:
        """The region of the stored tensor that holds `bounds` of the parameter."""
        own = (*bounds[:-2], bounds[-1], bounds[-2]) if self.transpose else bounds
        lead = len(self.region) - len(own)
        inner = tuple(
            (start + low * step, start + (high - 1) * step + 1 if high > low else start + low * step, step)
            for (start, _, step), (low, high) in zip(self.region[lead:], own, strict=True)
        )
        return self.region[:lead] + inner
