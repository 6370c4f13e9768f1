"""Executes a rank's read plan: reserves the memory of every parameter, then reads each piece into place."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from firstlight.engine.parallel.pieces import Piece, RankPieces, Storage
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.loading.pages import Pages, aligned
from firstlight.engine.weights.loading.placing import STORED_DTYPES, TORCH_DTYPES, Placing, Read, Step
from firstlight.engine.weights.loading.readers import Job, read_jobs
from firstlight.engine.weights.memory import Pool, PoolReport

if TYPE_CHECKING:
    from firstlight.engine.weights.loading.expert_cache import ExpertCache
    from firstlight.engine.weights.loading.residency import LayerStream, ResidencyReport

__all__ = ["TORCH_DTYPES", "LoadProgress", "Weights", "load"]

AHEAD_BYTES = 64 << 20  # read, or being read, before they are taken: enough to keep every reader busy
JOB_BYTES = 16 << 20  # small pieces are read together


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Progress of a rank's load: bytes read and to be read in total, and the layer that was just filled."""

    layer: int
    bytes_done: int
    bytes_total: int
    elapsed_s: float


Progress = Callable[[LoadProgress], None]


@dataclass(frozen=True, slots=True)
class Weights:
    """A rank's weights: tensors by storage name and by parameter name (views of the former), with loading statistics.

    `bytes_read` exceeds `bytes_needed` (both as stored) where slices of narrow rows are cut out of whole rows.
    `read_s` is the time for reading, cutting and converting; time spent waiting for pages from the system is in `pool`.
    `origin` describes how the bytes were read. Layers or experts that are loaded and evicted are not among the
    storages, but in `stream` or `experts`.
    """

    storages: dict[str, Tensor]
    params: dict[str, Tensor]
    pieces: RankPieces
    bytes_read: int
    bytes_needed: int
    read_s: float
    tied_head: bool
    origin: str = ""
    stream: LayerStream | None = None
    experts: ExpertCache | None = None
    pools: tuple[Pool, ...] = field(repr=False, default=())

    @property
    def pool(self) -> PoolReport:
        """How the memory is backed now; the query takes tens of milliseconds."""
        return self.pools[0].report()

    @property
    def device(self) -> torch.device:
        return self.pools[0].device

    def residency(self) -> ResidencyReport | None:
        """Statistics of loaded and evicted weights; None if all weights are resident."""
        coming = self.stream or self.experts
        return None if coming is None else coming.report()

    def bytes_by_role(self) -> dict[str, int]:
        """Memory by role; memory of streamed layers or experts is a role of its own."""
        coming = self.stream or self.experts
        if coming is None:
            return self.pieces.bytes_by_role()
        totals = {coming.pool.name: coming.pool.reserved_bytes}
        for storage in self.pieces.storages:
            if storage.name in self.storages:
                totals[storage.role] = totals.get(storage.role, 0) + storage.nbytes
        return totals

    def reports(self) -> tuple[PoolReport, ...]:
        """How each pool is backed now."""
        coming = self.stream or self.experts
        return tuple(pool.report() for pool in (*self.pools, *([coming.pool] if coming else ())))

    def close(self) -> None:
        """Ends background work."""
        for coming in (self.stream, self.experts):
            if coming is not None:
                coming.close()

    @property
    def nbytes(self) -> int:
        """Bytes resident in storages; equals the plan's."""
        unique = {tensor.data_ptr(): tensor.nbytes for tensor in self.storages.values()}  # a tied head counts once
        return sum(unique.values())


def load(
    checkpoint: Checkpoint,
    pieces: RankPieces,
    device: torch.device | str = "cpu",
    threads: int | None = None,
    progress: Progress | None = None,
    reserved: Pages | None = None,
    cancel: threading.Event | None = None,
    by_layer: bool = False,
    ahead_bytes: int = AHEAD_BYTES,
) -> Weights:
    """Reserves every storage of the rank on `device`, then reads all pieces, in the order of the forward pass.

    Pieces stored in the run's dtype in one run of bytes are read straight into place; others pass through staging
    memory, where they are cut, converted and unpacked while what comes behind is being read. On CPUs memory is backed
    in the background, ahead of the reading; `reserved` is such memory from before (`pages.reserve`), of the right size.
    `threads` None: as many readers as suit the source. `by_layer`: small pieces of two layers are never read together,
    so that `progress` is called between layers. `ahead_bytes` may be read, or being read, before they are placed.

    Raises `Refused` when memory or bytes are not there, and `Cancelled` when `cancel` is set; nothing is kept then.
    """
    device = torch.device(device)
    nbytes = sum(aligned(storage.nbytes) for storage in pieces.storages)
    if reserved is None:
        pool = Pool.reserve(nbytes, "weights", device, wait=False)
    else:
        assert (reserved.nbytes, device.type) == (nbytes, "cpu"), "memory for something else"
        pool = Pool.over(reserved, "weights")
    storages = {storage.name: _allocate(pool, storage, device) for storage in pieces.storages}
    filling = Filling(checkpoint, pieces.storages, pieces.pieces, storages, device, pool)
    started_s, waited_s, done, whole = time.perf_counter(), pool.waited_s, 0, 0
    try:
        for layer, nbytes in filling.carry_out(threads, cancel, ahead_bytes, by_layer):
            done += nbytes
            if progress is not None:
                whole = whole or filling.read_bytes  # while readers are at it
                progress(LoadProgress(layer, done, whole, time.perf_counter() - started_s))
        pool.wait()
    except BaseException:
        pool.stop()
        raise
    read_s = time.perf_counter() - started_s - (pool.waited_s - waited_s)
    pool.join_pages()
    if pieces.tied_head:
        storages["head.weight"] = storages["embed.weight"]
    return Weights(
        storages=storages,
        params=filling.params,
        pieces=pieces,
        bytes_read=done,
        bytes_needed=filling.needed_bytes,
        read_s=read_s,
        tied_head=pieces.tied_head,
        origin=checkpoint.source.describe(),
        pools=(pool,),
    )


class Filling:
    """Fills some pieces into existing storages. `params`: the destination of each parameter by name."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        described: Iterable[Storage],
        pieces: Sequence[Piece],
        storages: Mapping[str, Tensor],
        device: torch.device,
        pool: Pool | None = None,
    ) -> None:
        """`pool`: what the storages are taken from; what of it is not backed yet is, as it is written to."""
        self.params = {piece.param: _place(storages, piece) for piece in pieces}
        self._checkpoint = checkpoint
        self._pieces = pieces
        self._storages = storages
        self._layer_of = {storage.name: storage.layer for storage in described}
        self._pool = pool
        self._placing = Placing(checkpoint, self.params, device, pool)

    @property
    def read_bytes(self) -> int:
        """Bytes of the checkpoint that will be read."""
        return sum(self._placing.read_bytes(piece) for piece in self._pieces)

    @property
    def needed_bytes(self) -> int:
        """Bytes as stored that the pieces need."""
        return sum(self._placing.needed_bytes(piece) for piece in self._pieces)

    def staging_bytes(self, most_bytes: int) -> int:
        """Staging memory that all pieces together can take, up to `most_bytes`: bytes read, and numbers unpacked."""
        read = unpacked = 0
        for piece in self._pieces:
            read += sum(step.nbytes for step in self._placing.steps(piece) if step.is_staged)
            if piece.packed is not None:  # one after the other, in float32 and once more on the way there
                unpacked = max(unpacked, 8 * math.prod(piece.shape))
            if read + unpacked >= most_bytes:
                return most_bytes
        return read + unpacked

    def carry_out(
        self,
        threads: int | None = None,
        cancel: threading.Event | None = None,
        ahead_bytes: int = AHEAD_BYTES,
        by_layer: bool = False,
    ) -> Iterator[tuple[int, int]]:
        """Reads all pieces in order; yields (layer, bytes read) after each batch."""
        source, provide = self._checkpoint.source, None
        if self._pool is not None:
            self._pool.take_over()
            provide = self._pool.provide
        jobs = self._jobs(min(JOB_BYTES, ahead_bytes), by_layer)
        for job in read_jobs(jobs, source, threads, cancel=cancel, ahead_bytes=ahead_bytes, provide=provide):
            layer, finishes = job.payload
            while finishes:
                finishes.pop(0)()
            job.pieces = ()  # what was staged goes back before more is reserved
            yield layer, job.nbytes

    def _jobs(self, most_bytes: int, by_layer: bool) -> Iterator[Job]:
        """Steps in order, small ones together, with the last one's layer and what is to be done once they are read.

        Staging memory is reserved when a job is taken.
        """
        batch: list[Step] = []
        size, layer = 0, 0
        for piece in self._pieces:
            crosses = by_layer and self._layer_of[piece.storage] != layer
            for step in self._placing.steps(piece):
                if batch and (crosses or size + step.nbytes > most_bytes):
                    yield _job(batch, layer)
                    batch, size = [], 0
                batch.append(step)
                size += step.nbytes
                crosses = False
                layer = self._layer_of[piece.storage]
        if batch:
            yield _job(batch, layer)


def _job(steps: Iterable[Step], layer: int) -> Job:
    reads: list[Read] = []
    finishes: list[Callable[[], None]] = []
    tensors: list[str] = []
    for step in steps:
        own, finish = step.begin()
        reads += own
        finishes.append(finish)
        tensors += step.tensors
    return Job(reads, (layer, finishes), tensors)


def _allocate(pool: Pool, storage: Storage, device: torch.device) -> Tensor:
    tensor = pool.take(storage.shape, STORED_DTYPES[storage.dtype])
    return tensor.zero_() if device.type != "cpu" else tensor  # a CPU pool is zero: rows of padding stay so


def _place(storages: Mapping[str, Tensor], piece: Piece) -> Tensor:
    """The destination of a piece: a view of its storage, without padding."""
    home = storages[piece.storage]
    if piece.expert is not None:
        home = home[piece.expert]
    if not piece.shape:
        return home
    return home[piece.row : piece.row + piece.shape[0]]
