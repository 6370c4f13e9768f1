"""What a rank does when it is told to: one step, a trace, a profile, an account of its memory.

Every rank carries out the same commands in the same order; the answers meet at rank 0.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import replace

import msgspec
import psutil
import torch
from torch import Tensor

from firstlight.engine.model.batch import ForwardBatch
from firstlight.engine.model.build import Model
from firstlight.engine.parallel.mesh import Coordinates
from firstlight.engine.serving.api import RankMemory
from firstlight.engine.serving.batch import Held, Surroundings, build_batch, tensors_of
from firstlight.engine.serving.boot import Rank
from firstlight.engine.serving.clock import Clock, LayerTap, collective_times
from firstlight.engine.serving.control import Control
from firstlight.engine.serving.health import Pulse
from firstlight.engine.serving.inquest import InquestCommand, run_inquest
from firstlight.engine.serving.profile import run_profile
from firstlight.engine.serving.profile_data import ProfileCommand
from firstlight.engine.serving.sampling import choose_tokens, read_table, table, table_width
from firstlight.engine.serving.sight import Sight
from firstlight.engine.serving.stats import StepSample
from firstlight.engine.serving.steps import Draw, ReplicaPlan, Sampled, StepPlan, StepResult
from firstlight.engine.serving.trace import TraceCommand, run_trace

SAMPLE_EVERY = 64  # steps: one of so many is timed inside, which costs a GPU its overlap and a CPU next to nothing


class Worker:
    """A rank at work: its model, and what it holds of the sequences that run."""

    def __init__(self, rank: Rank, pulse: Pulse) -> None:
        self.rank = rank
        self.pulse = pulse
        mesh, at = rank.mesh, rank.mesh.coordinates(rank.rank)
        self.replica = at.dp
        self.samplers = tuple(mesh.rank(Coordinates(dp=dp, pp=mesh.pp - 1)) for dp in range(mesh.dp))
        self.around = Surroundings(
            cache=rank.cache.layers,
            page_size=rank.limits.page_size,
            comms=rank.comms,
            ops=rank.ops,
            device=rank.device,
            sight=Sight.of(rank.spec),
        )
        self.sample: StepSample | None = None  # the last step that was timed inside
        sees = rank.model.is_first and rank.spec.vision is not None and isinstance(rank.model, Model)
        self._encode = rank.model.encode_images if sees else None  # type: ignore[union-attr]
        self._held: dict[int, Held] = {}  # of this replica
        self._slots = list(range(rank.limits.max_batch))  # rows of the states that no sequence has
        self._draws: dict[int, Draw] = {}  # of all replicas

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step; on rank 0 the result holds the tokens of all replicas, elsewhere it is empty."""
        self.pulse.at(f"step {plan.number} {plan.phase}")
        for part in plan.replicas:
            for number in part.released:
                self._draws.pop(number, None)  # it may have ended before it was ever announced
            for admission in part.admitted:
                self._draws[admission.number] = admission.draw
        table_RC = self._run(plan.replicas[self.replica], plan.number)
        sampled = self._gather(plan, table_RC)
        self.pulse.at("idle")
        return StepResult(sampled)

    def _run(self, part: ReplicaPlan, step: int) -> Tensor | None:
        """This replica's part: forget, start, compute, choose. The table of chosen tokens, on the sampling rank."""
        for number in part.released:
            if (gone := self._held.pop(number, None)) is not None:
                heapq.heappush(self._slots, gone.slot)
        for admission in part.admitted:
            known = self._held.get(admission.number)  # a step that was interrupted is announced again
            slot = known.slot if known is not None else heapq.heappop(self._slots)
            self._held[admission.number] = Held.of(admission, slot, self.rank.spec.vision)
            if not isinstance(self.rank.model, Model):
                self.rank.model.admit(slot, tensors_of(admission.images, self.rank.device))
        if not part.chunks:
            return None
        batch, chosen = build_batch(part.chunks, self._held, self.around, self._encode)
        logits_RV = self._timed(batch, step, part) if step % SAMPLE_EVERY == 0 else self.rank.model.forward(batch)
        if logits_RV is None or not chosen or self.rank.rank != self.samplers[self.replica]:
            return None
        draws = [self._draws[chunk.number] for chunk in chosen]
        steps, may_mask = [chunk.draws for chunk in chosen], not isinstance(self.rank.model, Model)
        ids_R = choose_tokens(logits_RV, draws, steps, self.rank.ops, may_mask)
        return table(logits_RV, ids_R, draws)

    def _timed(self, batch: ForwardBatch, step: int, part: ReplicaPlan) -> Tensor | None:
        """A step with its blocks and collectives timed; all ranks time the same steps, so nobody waits for another."""
        clock, recorder = Clock(self.rank.device), self.rank.comms.recorder
        tap = LayerTap(clock, batch.tap)
        before, recorder.on = len(recorder.records), True
        try:
            tap.begin()
            seconds, logits_RV = clock.took(lambda: self.rank.model.forward(replace(batch, tap=tap)))
            if logits_RV is not None:
                tap.end()
        finally:
            recorder.on = False
            records = recorder.records[before:]
            del recorder.records[before:]
        self.sample = StepSample(
            step=step,
            time_s=time.time(),
            phase=part.phase,
            tokens=part.num_tokens,
            total_ms=1e3 * seconds,
            layers_ms={name: 1e3 * value for name, value in tap.layers_s.items()},
            collectives=collective_times(records),
        )
        return logits_RV

    def _gather(self, plan: StepPlan, mine_RC: Tensor | None) -> tuple[Sampled, ...]:
        """Rank 0 receives the tables of the other sampling ranks, in the order of replicas."""
        control = self.rank.comms.control
        if self.rank.rank != 0:
            if mine_RC is not None:
                control.send(mine_RC.cpu(), 0)
            return ()
        sampled: list[Sampled] = []
        for part, source in zip(plan.replicas, self.samplers, strict=True):
            numbers = [chunk.number for chunk in part.chunks if chunk.draws >= 0]
            if not numbers:
                continue
            draws = [self._draws[number] for number in numbers]
            table_RC = mine_RC
            if source != 0:
                empty_RC = torch.empty((len(numbers), table_width(draws)), dtype=torch.float64)
                table_RC = control.receive(empty_RC, source)
            assert table_RC is not None
            sampled += read_table(table_RC, numbers, draws)
        return tuple(sampled)

    def answer(self, command: Command) -> bytes:
        """Carry out anything but a step; what this rank has to say to it, encoded."""
        try:
            match command:
                case TraceCommand():
                    self.pulse.at("trace")
                    return _encode(run_trace(self.rank, command))
                case ProfileCommand():
                    self.pulse.at("profile")
                    return _encode(run_profile(self.rank, command))
                case InquestCommand():
                    self.pulse.at("inquest")
                    return _encode(run_inquest(self.rank, command))
                case MemoryCommand():
                    return _encode(self.memory(command.pools))
                case _:
                    return b""
        finally:
            self.pulse.at("idle")

    def memory(self, pools: bool = False) -> RankMemory:
        """What this rank holds by role, and what the system says of its process; `pools`: and how they are backed."""
        rank, on_gpu = self.rank, self.rank.device.type == "cuda"
        residency = rank.weights.residency()
        return RankMemory(
            rank=rank.rank,
            device=str(rank.device),
            bytes_by_role={**rank.weights.bytes_by_role(), "cache": rank.cache.pool.reserved_bytes},
            pools=tuple(map(msgspec.to_builtins, (*rank.weights.reports(), rank.cache.report()))) if pools else (),
            resident_bytes=psutil.Process().memory_info().rss,
            pages=rank.limits.num_pages,
            page_size=rank.limits.page_size,
            allocated_bytes=torch.cuda.memory_allocated(rank.device) if on_gpu else None,
            reserved_bytes=torch.cuda.memory_reserved(rank.device) if on_gpu else None,
            residency=None if residency is None else msgspec.to_builtins(residency),
        )


def follow(worker: Worker, control: Control) -> None:
    """The life of every rank but the first: do what rank 0 says until it says stop."""
    while True:
        command = decode_command(control.hear())
        match command:
            case StepPlan():
                worker.execute(command)
            case Stop():
                return
            case Tick():
                pass
            case _:
                control.collect(worker.answer(command))


class Tick(msgspec.Struct, frozen=True, tag=True):
    """Nothing to do; says that rank 0 lives."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave."""


class MemoryCommand(msgspec.Struct, frozen=True, tag=True):
    """Say what memory you hold, and if asked how the pools are backed."""

    pools: bool = False


Command = StepPlan | TraceCommand | InquestCommand | ProfileCommand | MemoryCommand | Tick | Stop

_encode = msgspec.msgpack.encode


def decode_command(message: bytes) -> Command:
    """A command from the bytes that rank 0 sent."""
    return _DECODER.decode(message)


_DECODER: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
