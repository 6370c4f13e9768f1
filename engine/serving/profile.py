"""Where the time of a step goes: by layer, by operator, and split into computing, communicating and waiting.

The first pass of each kind warms up and is not counted. Operators are timed on the host; on GPUs the device is awaited
around each, so the parts are right and their sum is larger than an undisturbed step, which is measured separately.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from firstlight.engine.parallel.comm import CommRecord
from firstlight.engine.serving.batch import Surroundings, forward_batch
from firstlight.engine.serving.boot import Rank
from firstlight.engine.serving.clock import Clock, LayerTap
from firstlight.engine.serving.profile_data import PhaseProfile, ProfileCommand, RankProfile, Span
from firstlight.kernels.attention.meta import AttentionMeta

NOT_FORWARD = ("sample", "linear", "situation", "rows")  # fields of a Choice that a forward does not call


@dataclass(slots=True)
class _Step:
    """What was seen of one step; times in seconds."""

    total_s: float = 0.0
    layers: dict[str, float] = field(default_factory=dict)
    operators: dict[str, float] = field(default_factory=dict)
    collectives: list[tuple[str, int, float]] = field(default_factory=list)
    timeline: tuple[Span, ...] = ()


def run_profile(rank: Rank, command: ProfileCommand) -> RankProfile:
    """Measure on this rank; every rank of a replica must do the same at the same time."""
    runner = _Runner(rank, command)
    prefills = [runner.prefill(timed=True) for _ in range(command.repeats + 1)][1:]
    plain_prefill = [runner.prefill(timed=False).total_s for _ in range(command.repeats)]
    decodes = [runner.decode(step, timed=True) for step in range(command.decode_steps + 1)][1:]
    plain_decode = [runner.decode(step, timed=False).total_s for step in range(command.decode_steps)]
    return RankProfile(
        rank=rank.rank,
        prefill=_summary(prefills, plain_prefill, command.batch * command.prompt_tokens),
        decode=_summary(decodes, plain_decode, command.batch),
    )


class _Runner:
    """A batch of made-up sequences over a cache of its own."""

    def __init__(self, rank: Rank, command: ProfileCommand) -> None:
        self.rank = rank
        self.command = command
        longest = command.prompt_tokens + command.decode_steps + 1
        self.page_size = longest if rank.device.type == "cpu" else rank.limits.page_size
        per_row = -(-longest // self.page_size)
        self.pages = [tuple(range(row * per_row, (row + 1) * per_row)) for row in range(command.batch)]
        count = command.batch * per_row
        self.cache = rank.cache.small(count, self.page_size, command.batch)

    def prefill(self, timed: bool) -> _Step:
        length = self.command.prompt_tokens
        return self._step([length] * self.command.batch, [length] * self.command.batch, timed)

    def decode(self, step: int, timed: bool) -> _Step:
        length = self.command.prompt_tokens + step + 1
        return self._step([1] * self.command.batch, [length] * self.command.batch, timed)

    def _step(self, query_lens: list[int], kv_lens: list[int], timed: bool) -> _Step:
        rank, seen = self.rank, _Step()
        clock = Clock(rank.device)
        ops = _timed_operators(rank, clock, seen) if timed else rank.ops
        ids = [(7 * position) % rank.spec.vocab_size for length in query_lens for position in range(length)]
        positions = [p for q, kv in zip(query_lens, kv_lens, strict=True) for p in range(kv - q, kv)]
        meta = AttentionMeta.build(query_lens, kv_lens, self.pages, self.page_size, rank.device)
        last = [sum(query_lens[: row + 1]) - 1 for row in range(len(query_lens))]
        tap = LayerTap(clock) if timed else None
        batch = forward_batch(
            ids,
            positions,
            meta,
            Surroundings(self.cache, self.page_size, rank.comms, ops, rank.device),
            range(len(query_lens)),
            logit_rows=torch.tensor(last, device=rank.device),
            tap=tap,
        )
        rank.comms.world.barrier()
        recorder = rank.comms.recorder
        before, recorder.on = len(recorder.records), timed
        started_s = clock.now() if tap is None else tap.begin()
        seen.total_s, logits_RV = clock.took(lambda: rank.model.forward(batch))
        if tap is not None and logits_RV is not None:
            tap.end()
        recorder.on = False
        seen.collectives = [
            (f"{record.operation} {record.axis}", record.nbytes, record.duration_s)
            for record in recorder.records[before:]
        ]
        if tap is not None:
            tap.leave_out(recorder.records[before:])
            seen.layers = tap.layers_s
            seen.timeline = _timeline(tap, recorder.records[before:], started_s)
        del recorder.records[before:]
        return seen


def _timeline(tap: LayerTap, records: list[CommRecord], started_s: float) -> tuple[Span, ...]:
    """Blocks and collectives of a step in the order in which they began; collectives lie inside blocks."""
    spans = [
        Span(name, "compute", 1e3 * (tap.starts_s[name] - started_s), 1e3 * duration_s)
        for name, duration_s in tap.layers_s.items()
    ]
    spans += [
        Span(
            f"{record.operation} {record.axis}",
            "collective",
            1e3 * (record.start_s - started_s),
            1e3 * record.duration_s,
            record.nbytes,
        )
        for record in records
    ]
    return tuple(sorted(spans, key=lambda span: span.start_ms))


def _timed_operators(rank: Rank, clock: Clock, seen: _Step) -> Any:
    """The chosen operators, each adding its time to `seen`."""

    def timed(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def run(*arguments: object, **keywords: object) -> object:
            started_s = clock.now()
            result = call(*arguments, **keywords)
            seen.operators[name] = seen.operators.get(name, 0.0) + clock.now() - started_s
            return result

        return run

    names = [entry.name for entry in fields(rank.ops) if entry.name not in NOT_FORWARD]
    changes: dict[str, Any] = {name: timed(name, getattr(rank.ops, name)) for name in names}
    return replace(rank.ops, **changes)


def _summary(steps: list[_Step], undisturbed_s: list[float], tokens: int) -> PhaseProfile:
    fastest: dict[tuple[str, int], float] = {}
    for step in steps:
        for name, nbytes, duration_s in step.collectives:
            key = name, nbytes
            fastest[key] = min(fastest.get(key, duration_s), duration_s)
    total_s = _median([step.total_s for step in steps])
    in_collectives_s = _median([sum(d for _, _, d in step.collectives) for step in steps])
    moving_s = min(in_collectives_s, _median([sum(fastest[n, b] for n, b, _ in step.collectives) for step in steps]))
    compute_s = max(0.0, total_s - in_collectives_s)
    operators_ms = {name: 1e3 * _median([s.operators.get(name, 0.0) for s in steps]) for name in steps[0].operators}
    operators_ms["other"] = max(0.0, 1e3 * compute_s - sum(operators_ms.values()))
    counts: dict[str, int] = {}
    for name, _, _ in steps[-1].collectives:
        counts[name] = counts.get(name, 0) + 1
    return PhaseProfile(
        tokens=tokens,
        undisturbed_ms=1e3 * _median(undisturbed_s),
        total_ms=1e3 * total_s,
        compute_ms=1e3 * compute_s,
        communication_ms=1e3 * moving_s,
        waiting_ms=1e3 * (in_collectives_s - moving_s),
        communication_bytes=sum(nbytes for _, nbytes, _ in steps[-1].collectives),
        layers_ms={name: 1e3 * _median([step.layers[name] for step in steps]) for name in steps[0].layers},
        operators_ms=operators_ms,
        collectives=counts,
        timeline=steps[-1].timeline,
    )


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0
