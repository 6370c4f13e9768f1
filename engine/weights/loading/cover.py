"""Which byte ranges of a file to read for a slice of a stored tensor: whole rows or parts of rows. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from firstlight.engine.weights.files.header import DTYPE_BITS, TensorInfo
from firstlight.engine.weights.source import Region
from firstlight.engine.weights.sources.base import Rows

NARROW_BYTES = 512  # a share of a row worth a call of its own, where as much beside it would be read in vain


@dataclass(frozen=True, slots=True)
class Run:
    """Rows [start, stop) of the first dim that varies: whole rows are one run of bytes in the file.

    Of wide rows only a share is read, `span_bytes` of each `row_bytes`: the bounds `inner` of the dim below.
    `offset_bytes` is where the first row, or the share of it, lies in the file.
    """

    dim: int
    start: int
    stop: int
    row_bytes: int
    offset_bytes: int
    span_bytes: int
    inner: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.span_bytes

    def part(self, start: int, stop: int) -> Run:
        """Rows [start, stop) of it."""
        return replace(
            self, start=start, stop=stop, offset_bytes=self.offset_bytes + (start - self.start) * self.row_bytes
        )

    def reads(self, path: str, target: memoryview) -> Iterator[tuple[str, int, memoryview] | Rows]:
        """What is to be read to fill `target`: a range, or shares of rows."""
        if self.inner is None:
            yield path, self.offset_bytes, target
        else:
            yield Rows(path, self.offset_bytes, target, self.span_bytes, self.row_bytes)


def cover(info: TensorInfo, region: Region) -> Run:
    """The smallest run of whole rows that holds the region, or of shares of rows where they are wide."""
    dim = next((d for d, (start, stop, _) in enumerate(region) if stop - start != 1), len(region) - 1)
    if dim < 0:  # a scalar
        return Run(0, 0, 1, info.nbytes, info.offset_bytes, info.nbytes)
    item = DTYPE_BITS[info.dtype] // 8
    row = math.prod(info.shape[dim + 1 :]) * item
    lead = 0
    for size, (start, _, _) in zip(info.shape[:dim], region[:dim], strict=True):
        lead = lead * size + start
    start, stop, _ = region[dim]
    first = info.offset_bytes + (lead * info.shape[dim] + start) * row
    if dim + 1 < len(info.shape):
        low, high, _ = region[dim + 1]
        unit = math.prod(info.shape[dim + 2 :]) * item
        span = (high - low) * unit
        if span >= NARROW_BYTES and row - span >= NARROW_BYTES:
            return Run(dim, start, stop, row, first + low * unit, span, (low, high))
    return Run(dim, start, stop, row, first, row)


def is_whole(info: TensorInfo, region: Region, run: Run) -> bool:
    """Whether the covering run is exactly the region, in order."""
    shape = list(info.shape)
    if run.inner is not None:
        shape[run.dim + 1] = run.inner[1] - run.inner[0]
    below = all(
        step == 1 and stop - start == size
        for (start, stop, step), size in zip(region[run.dim + 1 :], shape[run.dim + 1 :], strict=True)
    )
    return below and (not region or region[run.dim][2] == 1)
