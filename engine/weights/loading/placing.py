"""Places a piece: read straight into its destination, or through staging memory and then cut, converted or unpacked.

Every piece is a run of steps. A step has reads to be carried out and, behind them, something to do.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.parallel.pieces import Piece
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.files.header import DTYPE_BITS, TensorInfo
from firstlight.engine.weights.formats.grid import Axis, Box, Packed
from firstlight.engine.weights.loading.cover import Run, cover, is_whole
from firstlight.engine.weights.loading.laying import begins_with_a_block, lay
from firstlight.engine.weights.memory import Pool, aligned, writable_bytes
from firstlight.engine.weights.source import Region
from firstlight.engine.weights.sources.base import Rows

TORCH_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
    "I64": torch.int64,  # tables
}
STORED_DTYPES = {
    **TORCH_DTYPES,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
}
STAGING_BYTES = 16 << 20  # of one step: what is read and, beside it, the numbers that come out of it
MAPPED_BYTES = 1 << 20  # of staging memory that is mapped for itself
Read = tuple[str, int, memoryview] | Rows


@dataclass(frozen=True, slots=True)
class Step:
    """`nbytes` to be read; `begin` reserves staging memory, gives the reads, one of each of `tensors`, and what to do
    once they are done.
    """

    tensors: tuple[str, ...]
    nbytes: int
    begin: Callable[[], tuple[list[Read], Callable[[], None]]]
    is_staged: bool = True


class Placing:
    """The steps of a rank's pieces, in order. `places`: parameter -> the tensor that it fills."""

    def __init__(
        self, checkpoint: Checkpoint, places: dict[str, Tensor], device: torch.device, pool: Pool | None = None
    ) -> None:
        """`pool`: what the places are memory of, if its pages are backed as they are written to."""
        self.checkpoint = checkpoint
        self.places = places
        self.device = device
        self.pool = pool

    def steps(self, piece: Piece) -> Iterator[Step]:
        """The steps for a piece; none for an empty one."""
        if not math.prod(piece.shape):
            return
        place = self.places[piece.param]
        if piece.packed is not None:
            yield from self._checked(piece, piece.packed)
            lies = self._as_it_lies(piece, piece.packed, place)
            yield from self._packed(piece, piece.packed) if lies is None else self._straight(*lies, place)
            return
        info = self.checkpoint.tensors[piece.tensor]
        run = cover(info, piece.region)
        same = STORED_DTYPES[info.dtype] == place.dtype and place.is_contiguous() and self.device.type == "cpu"
        if same and not piece.transpose and is_whole(info, piece.region, run):
            yield from self._straight(info, run, place)
            return
        yield from self._staged(piece, info, run)

    def _straight(self, info: TensorInfo, run: Run, place: Tensor) -> Iterator[Step]:
        """Reads directly into place."""
        bytes_of = writable_bytes if self.pool is None else self.pool.bytes_of
        yield Step((info.name,), run.nbytes, lambda: (list(run.reads(info.file, bytes_of(place))), _nothing), False)

    def _as_it_lies(self, piece: Piece, packed: Packed, place: Tensor) -> tuple[TensorInfo, Run] | None:
        """What is read of a weight that stays packed where its bytes are those in the file; None where they are not."""
        if piece.packing is None or not packed.format.lies(piece.role) or self.device.type != "cpu":
            return None
        if any(step != 1 for _, _, step in piece.region) or not place.is_contiguous():
            return None
        ((part, info),) = packed.stored((piece.role,))
        bounds = part.bounds(_box(piece.region), packed.shape)
        run = cover(info, _region(bounds))
        is_held = run.nbytes == place.nbytes and begins_with_a_block(part, piece.region)
        return (info, run) if is_held and is_whole(info, _region(bounds), run) else None

    def read_bytes(self, piece: Piece) -> int:
        """Bytes that are read for a piece, including what is cut away."""
        return sum(step.nbytes for step in self.steps(piece))

    def needed_bytes(self, piece: Piece) -> int:
        """Bytes as stored that a piece needs."""
        if not math.prod(piece.shape):
            return 0
        if piece.packed is None:
            return math.prod(piece.shape) * DTYPE_BITS[self.checkpoint.tensors[piece.tensor].dtype] // 8
        return piece.packed.box_bytes(_box(piece.region), piece.roles + piece.roles_beside)

    def _checked(self, piece: Piece, packed: Packed) -> Iterator[Step]:
        """What stands beside codes that stay packed and is not held, its shape for one, held against the weight."""
        for part, info in packed.stored(piece.roles_beside):
            region = _region(part.bounds(_box(piece.region), packed.shape))
            run = cover(info, region)
            yield Step((info.name,), run.nbytes, self._holding(packed, part.role, info, run, region))

    def _holding(
        self, packed: Packed, role: str, info: TensorInfo, run: Run, region: Region
    ) -> Callable[[], tuple[list[Read], Callable[[], None]]]:
        def begin() -> tuple[list[Read], Callable[[], None]]:
            reads, (view,) = self._stage([(info, run)])
            return reads, lambda: refuse_if_wrong(packed, {role: cut(info, region, run, view)})

        return begin

    def _staged(self, piece: Piece, info: TensorInfo, run: Run) -> Iterator[Step]:
        """Rows at a time, as many as staging memory takes."""
        step = piece.region[run.dim][2] if piece.region else 1
        rows = max(1, STAGING_BYTES // max(1, run.span_bytes))
        rows = max(step, rows - rows % step)
        for start in range(run.start, run.stop, rows):
            part = run.part(start, min(start + rows, run.stop))
            yield Step((info.name,), part.nbytes, self._copying(piece, info, part, (start - run.start) // step))

    def _copying(
        self, piece: Piece, info: TensorInfo, run: Run, first: int
    ) -> Callable[[], tuple[list[Read], Callable[[], None]]]:
        def begin() -> tuple[list[Read], Callable[[], None]]:
            reads, views = self._stage([(info, run)])
            return reads, lambda: _copy(piece, cut(info, piece.region, run, views[0]), first, self._ready(piece))

        return begin

    def _ready(self, piece: Piece) -> Tensor:
        """The place of a piece, in memory that is there."""
        place = self.places[piece.param]
        if self.pool is not None:
            self.pool.provide(place)
        return place

    def _stage(self, wanted: list[tuple[TensorInfo, Run]]) -> tuple[list[Read], list[Tensor]]:
        """Staging memory for runs of tensors, and the reads that fill it."""
        size = sum(aligned(run.nbytes) for _, run in wanted)
        staging = self._staging(size)
        reads: list[Read] = []
        views, start = [], 0
        for info, run in wanted:
            view = staging[start : start + run.nbytes]
            reads.extend(run.reads(info.file, writable_bytes(view)))
            views.append(view)
            start += aligned(run.nbytes)
        return reads, views

    def _staging(self, size: int) -> Tensor:
        """Bytes that go back to the system with their last view; what an allocator keeps would be beyond a budget."""
        if self.device.type == "cuda" or size < MAPPED_BYTES:
            return torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(area, dtype=torch.uint8)

    def _packed(self, piece: Piece, packed: Packed) -> Iterator[Step]:
        """Blocks at a time along the dim that is outermost in the file, as many as staging memory takes."""
        parts = tuple(packed.stored(piece.roles))
        for box, skipped, first, count in _boxes(piece.region, packed):
            regions = [_region(part.bounds(box, packed.shape)) for part, _ in parts]
            wanted = [(info, cover(info, region)) for (_, info), region in zip(parts, regions, strict=True)]
            nbytes = sum(run.nbytes for _, run in wanted)
            work = self._unpacking(piece, packed, box, (skipped, first, count), wanted, regions)
            yield Step(tuple(info.name for info, _ in wanted), nbytes, work)

    def _unpacking(
        self,
        piece: Piece,
        packed: Packed,
        box: Box,
        where: tuple[int, int, int],
        wanted: list[tuple[TensorInfo, Run]],
        regions: list[Region],
    ) -> Callable[[], tuple[list[Read], Callable[[], None]]]:
        def begin() -> tuple[list[Read], Callable[[], None]]:
            reads, views = self._stage(wanted)

            def finish() -> None:
                parts = zip(piece.roles, wanted, regions, views, strict=True)
                stored = {
                    role: cut(info, region, run, view).to(self.device) for role, (info, run), region, view in parts
                }
                refuse_if_wrong(packed, stored)
                if piece.packing is None:
                    _unpack(piece, packed, stored, box, where, self._ready(piece))
                else:
                    lay(piece, stored[piece.role], box, self._ready(piece))

            return reads, finish

        return begin


def _nothing() -> None:
    """No operation: the read went straight into place."""


def _box(region: Region) -> Box:
    return tuple((start, stop) for start, stop, _ in region)


def _region(box: Box) -> Region:
    return tuple((start, stop, 1) for start, stop in box)


def cut(info: TensorInfo, region: Region, run: Run, raw: Tensor) -> Tensor:
    """Cuts a region out of the bytes that cover its rows."""
    dtype = STORED_DTYPES[info.dtype]
    if not info.shape:
        return raw.view(dtype).view(())
    shape, inside = list(info.shape[run.dim + 1 :]), list(region[run.dim + 1 :])
    if run.inner is not None:  # the share of each row was read alone: bounds count from its start
        low, high = run.inner
        shape[0], inside[0] = high - low, (0, high - low, inside[0][2])
    rows = raw.view(dtype).view(run.stop - run.start, *shape)
    below = tuple(slice(start, stop, step) for start, stop, step in inside)
    values = rows[(slice(None, None, region[run.dim][2]), *below)]
    return values[(None,) * run.dim]


def _copy(piece: Piece, values: Tensor, first: int, place: Tensor) -> None:
    """Copies rows of a region, counted from `first`, into place."""
    target = place.mT if piece.transpose else place
    if not target.dim() or not values.dim():  # a single number
        target.copy_(values.reshape(target.shape))
        return
    values = values.reshape(values.shape[values.dim() - target.dim() :])
    along = next((dim for dim, size in enumerate(target.shape) if size != 1), 0)
    target.narrow(along, first, values.shape[along]).copy_(values)


def _boxes(region: Region, packed: Packed) -> Iterator[tuple[Box, int, int, int]]:
    """Boxes of the weight that hold the region, block by block.

    With each: how many of its indices along the cut dim come before the first of the region, which of the region's
    that one is, and how many there are.
    """
    major = next(axis.dim for axis in packed.format.parts[0].dims if isinstance(axis, Axis))
    start, stop, step = region[major]
    blocks = [
        axis.block
        for part in packed.format.parts
        for axis in part.dims
        if isinstance(axis, Axis) and axis.dim == major and not axis.whole
    ]
    unit = math.lcm(step, *blocks)
    across = region[-1 if major == -2 else -2]
    most = STAGING_BYTES // 4 // max(1, across[1] - across[0])
    length = max(unit, most - most % unit)
    low = start
    while low < stop:
        high = min(stop, (low // length + 1) * length)
        skipped = (start - low) % step
        count = -(-(high - low - skipped) // step)
        if count > 0:
            box = list(_box(region))
            box[major] = (low, high)
            yield tuple(box), skipped, (low + skipped - start) // step, count
        low = high


def _unpack(
    piece: Piece, packed: Packed, stored: dict[str, Tensor], box: Box, where: tuple[int, int, int], place: Tensor
) -> None:
    """Unpacks a box of a weight and copies the region of it into place."""
    skipped, first, count = where
    major = next(axis.dim for axis in packed.format.parts[0].dims if isinstance(axis, Axis))
    values = packed.format.unpack(stored, box, packed.shape)
    values = values.reshape(values.shape[-2:])
    steps = [step for _, _, step in piece.region[-2:]]
    cuts = [slice(None, None, step) for step in steps]
    cuts[major] = slice(skipped, None, steps[major])
    values = values[tuple(cuts)]
    target = place.mT if piece.transpose else place
    target.narrow(major, first, count).copy_(values)


def refuse_if_wrong(packed: Packed, stored: Mapping[str, Tensor]) -> None:
    """Raises `Refused` if a companion tensor (order, zero points, shape) does not fit its weight."""
    problem = packed.format.problem(stored, packed.shape)
    if problem is None:
        return
    role, expected, found = problem
    info = next(t for part, t in zip(packed.format.parts, packed.tensors, strict=True) if part.role == role)
    raise Refused(
        fatal(
            "shape-mismatch",
            f"{info.name} does not fit the weight {packed.name} {list(packed.shape)} in {packed.format.describe()}",
            file=info.file,
            tensors=(info.name, packed.tensors[0].name),
            expected=expected,
            found=found,
            next="fetch the file again: a weight and what says how to unpack it belong to different releases",
        )
    )
