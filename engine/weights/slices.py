"""Computes the byte runs of any slice of a stored tensor in its file. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from firstlight.engine.weights.files.header import DTYPE_BITS, TensorInfo


def byte_runs(tensor: TensorInfo, slices: Sequence[slice]) -> Iterator[tuple[int, int]]:
    """(offset in the file, bytes) of each run of `tensor[slices]`, in row-major order; neighbours are joined.

    `slices` counts as in numpy, one a leading dim, with positive steps; dims without a slice are whole. Raises
    `ValueError` for a negative step, for more slices than dims, and for a dtype whose elements are no whole bytes.
    """
    if len(slices) > len(tensor.shape) or any((cut.step or 1) < 1 for cut in slices):
        raise ValueError(f"{tensor.name} {list(tensor.shape)} cannot be cut by {list(slices)}")
    bits = DTYPE_BITS[tensor.dtype]
    if bits % 8:
        raise ValueError(f"{tensor.name} is packed as {tensor.dtype}: its elements are no whole bytes")
    cuts = [range(size)[cut] for size, cut in zip(tensor.shape, slices, strict=False)]
    cuts += [range(size) for size in tensor.shape[len(cuts) :]]
    if not all(map(len, cuts)):
        return
    start = end = -1
    for offset, nbytes in _runs(tensor.shape, cuts, bits // 8):
        if offset != end:
            if end >= 0:
                yield tensor.offset_bytes + start, end - start
            start = offset
        end = offset + nbytes
    yield tensor.offset_bytes + start, end - start


def _runs(shape: tuple[int, ...], cuts: list[range], item: int) -> Iterator[tuple[int, int]]:
    """Runs below the last dim that is cut, from the start of the tensor."""
    last = next((dim for dim in reversed(range(len(shape))) if len(cuts[dim]) != shape[dim]), -1)
    if last < 0:
        yield 0, math.prod(shape) * item
        return
    below = math.prod(shape[last + 1 :]) * item
    strides = [math.prod(shape[dim + 1 :]) * item for dim in range(last + 1)]
    row = cuts[last]
    for lead in _leads(cuts[:last], strides):
        if row.step == 1:
            yield lead + row.start * below, len(row) * below
        else:
            yield from ((lead + index * below, below) for index in row)


def _leads(cuts: list[range], strides: list[int]) -> Iterator[int]:
    """Byte offsets of the chosen indices of leading dims, in order."""
    if not cuts:
        yield 0
        return
    for index in cuts[0]:
        yield from (index * strides[0] + rest for rest in _leads(cuts[1:], strides[1:]))
