"""Carries out a rank's read plan: reserve the memory of every parameter, then read each piece into its place."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
from torch import Tensor

from firstlight.engine.parallel.pieces import Piece, RankPieces, Storage
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.header import DTYPE_BITS
from firstlight.engine.weights.memory import Pool, PoolReport, aligned, writable_bytes
from firstlight.engine.weights.readers import read_pieces

TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
NARROW_BYTES = 4 << 10  # a share of a row worth a read of its own, where as much beside it would be read in vain
GROUP_BYTES = 64 << 20  # read by one call: enough to keep every reader busy
STAGING_BYTES = 16 << 20  # what may be in memory besides the weights while pieces are converted or cut


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a rank has come: bytes of the checkpoint read of all it will read, and the layer that was just filled."""

    layer: int
    bytes_done: int
    bytes_total: int
    elapsed_s: float


Progress = Callable[[LoadProgress], None]


@dataclass(frozen=True, slots=True)
class Weights:
    """A rank's weights: tensors by storage name and by parameter name (views of the former), and how they came.

    `bytes_read` exceeds `bytes_needed`, both as stored, where shares of narrow rows are cut out of whole rows.
    """

    storages: dict[str, Tensor]
    params: dict[str, Tensor]
    pieces: RankPieces
    bytes_read: int
    bytes_needed: int
    read_s: float
    tied_head: bool
    pools: tuple[Pool, ...] = field(repr=False, default=())

    @property
    def pool(self) -> PoolReport:
        """How the memory is backed now; asking takes the system tens of milliseconds."""
        return self.pools[0].report()

    @property
    def nbytes(self) -> int:
        """Bytes resident in storages; equals the plan's."""
        unique = {tensor.data_ptr(): tensor.nbytes for tensor in self.storages.values()}  # a tied head counts once
        return sum(unique.values())


def load(
    checkpoint: Checkpoint,
    pieces: RankPieces,
    device: torch.device | str = "cpu",
    threads: int = 4,
    progress: Progress | None = None,
) -> Weights:
    """Reserves every storage of the rank on `device`, then reads all pieces, in the order of the forward pass.

    Pieces stored in the run's dtype in one run of bytes are read straight into place; others pass through a staging
    buffer of at most 16 MiB. Raises `Refused` when memory or bytes are not there.
    """
    device = torch.device(device)
    pool = Pool.reserve(sum(aligned(storage.nbytes) for storage in pieces.storages), "weights", device)
    storages = {storage.name: _allocate(pool, storage, device) for storage in pieces.storages}
    params = {piece.param: _place(storages, piece) for piece in pieces.pieces}
    total = sum(_read_bytes(checkpoint, piece) for piece in pieces.pieces)
    layer_of = {storage.name: storage.layer for storage in pieces.storages}
    started, done = time.perf_counter(), 0
    for layer, group in _groups(checkpoint, pieces.pieces, layer_of):
        for nbytes in _fill(checkpoint, group, params, device, threads):
            done += nbytes
            if progress is not None:
                progress(LoadProgress(layer, done, total, time.perf_counter() - started))
    pool.join_pages()
    if pieces.tied_head:
        storages["head.weight"] = storages["embed.weight"]
    return Weights(
        storages=storages,
        params=params,
        pieces=pieces,
        bytes_read=done,
        bytes_needed=sum(_needed_bytes(checkpoint, piece) for piece in pieces.pieces),
        read_s=time.perf_counter() - started,
        tied_head=pieces.tied_head,
        pools=(pool,),
    )


def _groups(
    checkpoint: Checkpoint, pieces: Iterable[Piece], layer_of: dict[str, int]
) -> Iterator[tuple[int, list[Piece]]]:
    """Whole layers of at least `GROUP_BYTES` together, with the last one's number: small layers are not read alone."""
    group: list[Piece] = []
    size, last = 0, 0
    for layer, own in groupby(pieces, key=lambda piece: layer_of[piece.storage]):
        of_layer = list(own)
        group += of_layer
        size += sum(_read_bytes(checkpoint, piece) for piece in of_layer)
        last = layer
        if size >= GROUP_BYTES:
            yield last, group
            group, size = [], 0
    if group:
        yield last, group


def _allocate(pool: Pool, storage: Storage, device: torch.device) -> Tensor:
    tensor = pool.take(storage.shape, TORCH_DTYPES[storage.dtype])
    return tensor.zero_() if device.type != "cpu" else tensor  # a CPU pool is zero: rows of padding stay so


def _place(storages: dict[str, Tensor], piece: Piece) -> Tensor:
    """Where a piece goes: a view of its storage, without the padding."""
    home = storages[piece.storage]
    if piece.expert is not None:
        home = home[piece.expert]
    if not piece.shape:
        return home
    return home[piece.row : piece.row + piece.shape[0]]


@dataclass(frozen=True, slots=True)
class _Run:
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

    def part(self, start: int, stop: int) -> _Run:
        """Rows [start, stop) of it."""
        return replace(
            self, start=start, stop=stop, offset_bytes=self.offset_bytes + (start - self.start) * self.row_bytes
        )

    def reads(self, path: str, target: memoryview) -> Iterator[tuple[str, int, memoryview]]:
        """The reads that fill `target`: one, or one a row."""
        if self.inner is None:
            yield path, self.offset_bytes, target
            return
        for row in range(self.stop - self.start):
            share = target[row * self.span_bytes : (row + 1) * self.span_bytes]
            yield path, self.offset_bytes + row * self.row_bytes, share


def _cover(checkpoint: Checkpoint, piece: Piece) -> _Run:
    """The smallest run of whole rows that holds the piece's region, or of shares of rows where they are wide."""
    info = checkpoint.tensors[piece.tensor]
    dim = next((d for d, (start, stop, _) in enumerate(piece.region) if stop - start != 1), len(piece.region) - 1)
    if dim < 0:  # a scalar
        return _Run(0, 0, 1, info.nbytes, info.offset_bytes, info.nbytes)
    item = DTYPE_BITS[info.dtype] // 8
    row = math.prod(info.shape[dim + 1 :]) * item
    lead = 0
    for size, (start, _, _) in zip(info.shape[:dim], piece.region[:dim], strict=True):
        lead = lead * size + start
    start, stop, _ = piece.region[dim]
    first = info.offset_bytes + (lead * info.shape[dim] + start) * row
    if dim + 1 < len(info.shape):
        low, high, _ = piece.region[dim + 1]
        unit = math.prod(info.shape[dim + 2 :]) * item
        span = (high - low) * unit
        if span >= NARROW_BYTES and row - span >= NARROW_BYTES:
            return _Run(dim, start, stop, row, first + low * unit, span, (low, high))
    return _Run(dim, start, stop, row, first, row)


def _is_whole(checkpoint: Checkpoint, piece: Piece, run: _Run) -> bool:
    """Whether the covering run is exactly the region, in order."""
    shape = list(checkpoint.tensors[piece.tensor].shape)
    if run.inner is not None:
        shape[run.dim + 1] = run.inner[1] - run.inner[0]
    below = all(
        step == 1 and stop - start == size
        for (start, stop, step), size in zip(piece.region[run.dim + 1 :], shape[run.dim + 1 :], strict=True)
    )
    return below and not piece.transpose and (not piece.region or piece.region[run.dim][2] == 1)


def _needed_bytes(checkpoint: Checkpoint, piece: Piece) -> int:
    return math.prod(piece.shape) * DTYPE_BITS[checkpoint.tensors[piece.tensor].dtype] // 8


def _read_bytes(checkpoint: Checkpoint, piece: Piece) -> int:
    return _cover(checkpoint, piece).nbytes if math.prod(piece.shape) else 0


def _fill(
    checkpoint: Checkpoint, group: list[Piece], params: dict[str, Tensor], device: torch.device, threads: int
) -> Iterator[int]:
    """Fills the places of a layer's pieces; yields bytes read."""
    direct: list[tuple[str, int, memoryview]] = []
    staged: list[tuple[Piece, _Run]] = []
    for piece in group:
        if not math.prod(piece.shape):
            continue
        run, place = _cover(checkpoint, piece), params[piece.param]
        same_dtype = TORCH_DTYPES[checkpoint.tensors[piece.tensor].dtype] == place.dtype
        if device.type == "cpu" and same_dtype and place.is_contiguous() and _is_whole(checkpoint, piece, run):
            path = str(checkpoint.path(checkpoint.tensors[piece.tensor].file))
            direct.extend(run.reads(path, writable_bytes(place)))
        else:
            staged.append((piece, run))
    if direct:
        yield read_pieces(direct, threads)
    for batch in _batches(_chunks(staged)):
        yield _fill_staged(checkpoint, batch, params, device, threads)


def _chunks(staged: Iterable[tuple[Piece, _Run]]) -> Iterator[tuple[Piece, _Run, int]]:
    """Runs cut so that none exceeds the staging buffer; with each, how many rows of its run came before."""
    for piece, run in staged:
        rows = max(1, STAGING_BYTES // max(1, run.span_bytes))
        step = piece.region[run.dim][2] if piece.region else 1
        rows = max(step, rows - rows % step)
        for start in range(run.start, run.stop, rows):
            yield piece, run.part(start, min(start + rows, run.stop)), start - run.start


def _batches(chunks: Iterable[tuple[Piece, _Run, int]]) -> Iterator[list[tuple[Piece, _Run, int]]]:
    batch: list[tuple[Piece, _Run, int]] = []
    size = 0
    for chunk in chunks:
        if batch and size + chunk[1].nbytes > STAGING_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(chunk)
        size += chunk[1].nbytes
    if batch:
        yield batch


def _fill_staged(
    checkpoint: Checkpoint,
    batch: list[tuple[Piece, _Run, int]],
    params: dict[str, Tensor],
    device: torch.device,
    threads: int,
) -> int:
    """Reads a batch of runs into a staging buffer, then cuts, converts and copies each to its place."""
    size = sum(aligned(run.nbytes) for _, run, _ in batch)
    staging = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    reads: list[tuple[str, int, memoryview]] = []
    views, start = [], 0
    for piece, run, _ in batch:
        view = staging[start : start + run.nbytes]
        info = checkpoint.tensors[piece.tensor]
        reads.extend(run.reads(str(checkpoint.path(info.file)), writable_bytes(view)))
        views.append(view)
        start += aligned(run.nbytes)
    delivered = read_pieces(reads, threads)
    for (piece, run, skipped), view in zip(batch, views, strict=True):
        _copy(checkpoint, piece, run, skipped, view, params[piece.param])
    return delivered


def _copy(checkpoint: Checkpoint, piece: Piece, run: _Run, skipped: int, raw: Tensor, place: Tensor) -> None:
    info = checkpoint.tensors[piece.tensor]
    if not info.shape:
        place.copy_(raw.view(TORCH_DTYPES[info.dtype]).view(()))
        return
    shape, region = list(info.shape[run.dim + 1 :]), list(piece.region[run.dim + 1 :])
    if run.inner is not None:  # the share of each row was read alone: bounds count from its start
        low, high = run.inner
        shape[0], region[0] = high - low, (0, high - low, region[0][2])
    rows = raw.view(TORCH_DTYPES[info.dtype]).view(run.stop - run.start, *shape)
    step = piece.region[run.dim][2]
    below = tuple(slice(start, stop, by) for start, stop, by in region)
    values = rows[(slice(None, None, step), *below)]
    first = skipped // step
    target = place.mT if piece.transpose else place
    lead = target.dim() - values.dim()  # dims of extent one that stand before the run
    target = target[(0,) * lead] if lead > 0 else target
    if values.dim() > target.dim():
        values = values.reshape(values.shape[values.dim() - target.dim() :])
    target[first : first + values.shape[0]].copy_(values)
