"""Where a parameter comes from: a slice of a stored tensor, as data. No torch."""

from __future__ import annotations

import msgspec

from firstlight.engine.weights.formats.grid import Packed

Region = tuple[tuple[int, int, int], ...]  # per dim of the stored tensor: start, stop, step
Bounds = tuple[tuple[int, int], ...]  # per dim of a parameter: start, stop


class Source(msgspec.Struct, frozen=True, gc=False):
    """The part of a stored tensor that is one whole parameter: `region` in the tensor's dims, then `transpose`d.

    Of a `packed` weight, `tensor` is the first of its tensors, and `region` counts in its [..., rows, columns].
    """

    tensor: str
    region: Region
    transpose: bool = False
    tied: bool = False
    packed: Packed | None = None

    def cut(self, bounds: Bounds) -> Region:
        """The region of the stored tensor that holds `bounds` of the parameter."""
        return region_of(self.region, self.transpose, bounds)


def region_of(region: Region, transpose: bool, bounds: Bounds) -> Region:
    """The part of a region that holds `bounds` of the parameter that the whole of it is, transposed or not."""
    own = (*bounds[:-2], bounds[-1], bounds[-2]) if transpose else bounds
    lead = len(region) - len(own)
    inner = tuple(
        (start + low * step, start + (high - 1) * step + 1 if high > low else start + low * step, step)
        for (start, _, step), (low, high) in zip(region[lead:], own, strict=True)
    )
    return region[:lead] + inner
