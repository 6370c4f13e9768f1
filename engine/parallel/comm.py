"""Collectives per mesh axis: one `Comm` an axis, timed, with a deadline, over NCCL, gloo and the fake group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

from firstlight.engine.errors import FirstlightError
from firstlight.engine.parallel.mesh import AXES, HEADS, Mesh


class CommFailure(FirstlightError):
    """A collective missed its deadline or lost a peer; names the axis, the operation and the ranks."""

    def __init__(self, axis: str, operation: str, ranks: tuple[int, ...], reason: str) -> None:
        self.axis, self.operation, self.ranks = axis, operation, ranks
        super().__init__(f"{operation} over axis {axis} (ranks {', '.join(map(str, ranks))}) failed: {reason}")


@dataclass(frozen=True, slots=True)
class CommRecord:
    """One collective as one rank saw it. `start_s` is on the clock of `time.perf_counter`."""

    axis: str
    operation: str
    nbytes: int
    start_s: float
    duration_s: float


@dataclass(slots=True)
class Recorder:
    """Collects `CommRecord`s while `on`; on GPUs it waits for the device around each call, so leave it off to serve."""

    on: bool = False
    records: list[CommRecord] = field(default_factory=list)
    phase: Callable[[str], None] | None = None  # told the collective that is about to start; used by heartbeats


class Comm:
    """The ranks that differ from this one along one axis. With one rank every operation returns at once.

    `index` is this rank's position in `ranks`; sources and destinations are such positions. The caller must pass the
    same shape and dtype on all ranks. Failures raise `CommFailure`.
    """

    def __init__(
        self, axis: str, ranks: tuple[int, ...], index: int, group: ProcessGroup | None, recorder: Recorder
    ) -> None:
        self.axis = axis
        self.ranks = ranks
        self.index = index
        self.size = len(ranks)
        self._group = group
        self._recorder = recorder

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place; returns the same tensor."""
        if self.size > 1:
            with self._timed("all_reduce", tensor):
                dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The ranks' tensors joined along `dim`, in rank order."""
        if self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in self.ranks]
        with self._timed("all_gather", tensor):
            dist.all_gather(parts, tensor, group=self._group)
        return torch.cat(parts, dim=dim)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """`source`'s tensor on every rank, in place; returns the same tensor."""
        if self.size > 1:
            with self._timed("broadcast", tensor):
                dist.broadcast(tensor, src=self.ranks[source], group=self._group)
        return tensor

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """The first `sent[0]` rows go to rank 0, the next `sent[1]` to rank 1, ...; what came, in rank order.

        `received` says how many rows come from each, see `tell_counts`.
        """
        if self.size == 1:
            return rows
        rows = rows.contiguous()
        came = rows.new_empty(sum(received), *rows.shape[1:])
        with self._timed("all_to_all", rows):
            dist.all_to_all_single(came, rows, list(received), list(sent), group=self._group)
        return came

    def tell_counts(self, counts: Tensor) -> tuple[list[int], list[int]]:
        """(rows this rank will send to each, rows that will come from each); `counts` [ranks] int64, on its device."""
        came = torch.empty_like(counts)
        with self._timed("all_to_all", counts):
            dist.all_to_all_single(came, counts, group=self._group)
        both = torch.stack((counts, came)).tolist()
        return both[0], both[1]

    def send(self, tensor: Tensor, destination: int) -> None:
        with self._timed("send", tensor):
            dist.send(tensor.contiguous(), dst=self.ranks[destination], group=self._group)

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        """Fills `tensor` with what `source` sent; returns the same tensor."""
        with self._timed("receive", tensor):
            dist.recv(tensor, src=self.ranks[source], group=self._group)
        return tensor

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        if self.size > 1:
            self.all_reduce(torch.zeros(1, device=_barrier_device(self._group)))

    @contextmanager
    def _timed(self, operation: str, tensor: Tensor) -> Iterator[None]:
        recorder = self._recorder
        if recorder.phase is not None:
            recorder.phase(f"{operation} {self.axis}")
        if recorder.on and tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        start_s = time.perf_counter()
        try:
            yield
        except RuntimeError as error:  # what torch.distributed raises for deadlines and lost peers
            raise CommFailure(self.axis, operation, self.ranks, str(error).splitlines()[0]) from error
        if recorder.on:
            if tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)
            nbytes = tensor.numel() * tensor.element_size()
            recorder.records.append(CommRecord(self.axis, operation, nbytes, start_s, time.perf_counter() - start_s))


def _barrier_device(group: ProcessGroup | None) -> torch.device:
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


@dataclass(frozen=True, slots=True)
class Comms:
    """One `Comm` per axis of a rank, one over the whole world, and one on the CPU for control messages.

    `heads`: the ranks that mixers are divided over, those of tp or, where attention is whole, this one alone. `rows`:
    the ranks of ep and sp together, over which the tokens of a step are divided where `exchange` (see
    `engine/parallel/rows.py`) has tokens travel to their experts. `named`: this rank's part of each of the mesh's own
    groups; alone where it is in none.
    """

    dp: Comm
    pp: Comm
    ep: Comm
    sp: Comm
    tp: Comm
    heads: Comm
    world: Comm
    control: Comm
    rows: Comm
    recorder: Recorder
    exchange: str = "auto"
    named: dict[str, Comm] = field(default_factory=dict)

    @classmethod
    def alone(cls) -> Comms:
        """For a single rank: no communication."""
        recorder = Recorder()
        single: dict[str, Any] = {
            axis: Comm(axis, (0,), 0, None, recorder) for axis in (*AXES, HEADS, "world", "control", "rows")
        }
        return cls(**single, recorder=recorder)

    @classmethod
    def connect(
        cls,
        mesh: Mesh,
        rank: int,
        store: Store,
        backend: str = "gloo",
        deadline_s: float = 60.0,
        exchange: str = "auto",
    ) -> Comms:
        """Joins the world through `store` and makes one group per axis; every rank must call it.

        A collective that takes longer than `deadline_s` fails. `backend` is `nccl`, `gloo` or `fake`.
        """
        if mesh.world_size == 1:
            return cls.alone()
        deadline = timedelta(seconds=deadline_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=mesh.world_size, timeout=deadline)
        recorder = Recorder()
        comms: dict[str, Comm] = {axis: _axis_comm(axis, mesh.groups(axis), rank, deadline, recorder) for axis in AXES}
        heads = comms["tp"] if mesh.size(HEADS) == mesh.tp else Comm(HEADS, (rank,), 0, None, recorder)
        rows = comms["ep"] if mesh.sp == 1 else comms["sp"]
        if mesh.ep > 1 and mesh.sp > 1:
            rows = _axis_comm("rows", mesh.groups("ep", "sp"), rank, deadline, recorder)
        named = {one.name: _axis_comm(one.name, one.parts, rank, deadline, recorder) for one in mesh.named}
        everyone = tuple(range(mesh.world_size))
        world = Comm("world", everyone, rank, dist.group.WORLD, recorder)
        control_group = dist.group.WORLD if backend != "nccl" else dist.new_group(backend="gloo", timeout=deadline)
        control = Comm("control", everyone, rank, control_group, Recorder())
        all_of_them: dict[str, Any] = {**comms, "heads": heads, "world": world, "control": control, "rows": rows}
        return cls(**all_of_them, recorder=recorder, exchange=exchange, named=named)

    @staticmethod
    def disconnect() -> None:
        """Destroys the process groups, if this process has joined any."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _axis_comm(
    axis: str, groups: tuple[tuple[int, ...], ...], rank: int, deadline: timedelta, recorder: Recorder
) -> Comm:
    mine = next((ranks for ranks in groups if rank in ranks), (rank,))
    group = None
    for ranks in groups:  # every rank has to make every group
        if len(ranks) > 1:
            made = dist.new_group(list(ranks), timeout=deadline)
            group = made if ranks == mine else group
    return Comm(axis, mine, mine.index(rank), group, recorder)
