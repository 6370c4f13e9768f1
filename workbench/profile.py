"""The rung `profile`: where the time of a token goes on every rank, and how near that is to the memory's limit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from firstlight.engine.errors import Refused
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.serving.api import EngineInfo, EngineLike
from firstlight.engine.serving.profile_data import PhaseProfile, RankProfile
from firstlight.workbench.costs import BlockCost, block_costs
from firstlight.workbench.plan import read_config
from firstlight.workbench.progress import Progress
from firstlight.workbench.report import Draft, Report

PHASES = ("prefill", "decode")
DEFAULT_PROMPT = 128  # tokens


def profile(
    engine: EngineLike,
    *,
    prompt_tokens: int | None = None,
    decode_steps: int = 8,
    batch: int = 1,
    bandwidth: bool = True,
    progress: Progress | None = None,
) -> Report:
    """Times prefill and decode of made-up sequences: compute, communication and waiting, by operator and by layer.

    `prompt_tokens` None: 128, or as many as the context has room for; more than that is `Refused`. `bandwidth`: also
    measures what this machine reads from memory in a second, and states decode as a part of it.
    """
    progress = progress or Progress("profile")
    info = engine.info()
    draft = Draft("profile", f"{info.model}, {info.mesh.describe()}, {info.dtype} on {info.device}")
    progress("measure prefill and decode")
    if prompt_tokens is None:
        prompt_tokens = max(1, min(DEFAULT_PROMPT, info.max_context - decode_steps - 1))
    ranks: Sequence[RankProfile] = engine.profile(prompt_tokens, decode_steps, batch)
    _figures(draft, ranks, batch)
    measured = None
    if bandwidth and "cpu" in info.device:
        progress("measure memory bandwidth")
        measured = _limit(draft, engine, ranks, info.mesh.world_size)
    costs = {phase: _costs(info, tokens) for phase, tokens in (("prefill", ranks[0].prefill.tokens), ("decode", batch))}
    draft.table("steps", _step_rows(ranks))
    draft.table("operators", _operator_rows(ranks))
    draft.table("layers", _layer_rows(ranks, costs, measured))
    draft.table("collectives", _collective_rows(ranks))
    draft.table("timeline", _timeline_rows(ranks))
    return draft.close()


def _figures(draft: Draft, ranks: Sequence[RankProfile], batch: int) -> None:
    slow = _slowest(ranks, "decode")
    prefill = _slowest(ranks, "prefill")
    draft.check("every rank was measured", len(ranks) > 0 and slow.undisturbed_ms > 0, value=len(ranks), unit="ranks")
    draft.metric("decode_ms", slow.undisturbed_ms, "ms", f"a step of {batch} at once, the slowest rank")
    draft.metric("decode_tokens_per_s", batch * 1000 / slow.undisturbed_ms, "tokens/s", f"{batch} at once")
    draft.metric("prefill_ms", prefill.undisturbed_ms, "ms", f"{prefill.tokens} tokens")
    draft.metric("prefill_tokens_per_s", prefill.tokens * 1000 / prefill.undisturbed_ms, "tokens/s")
    draft.metric(
        "decode_timed_ms",
        slow.total_ms,
        "ms",
        "a step whose parts are timed: computing, communicating and waiting together",
    )
    for part in ("compute", "communication", "waiting"):
        draft.metric(f"decode_{part}_ms", getattr(slow, f"{part}_ms"), "ms", "of a timed step")


def _slowest(ranks: Sequence[RankProfile], phase: str) -> PhaseProfile:
    found: PhaseProfile = max((getattr(rank, phase) for rank in ranks), key=lambda one: one.undisturbed_ms)
    return found


def _limit(draft: Draft, engine: EngineLike, ranks: Sequence[RankProfile], world_size: int) -> float:
    """Decode reads every weight once a step: bytes over bandwidth is the least time."""
    from firstlight.workbench.bandwidth import read_bandwidth

    read_bytes = sum(_read_in_decode(rank.bytes_by_role) for rank in engine.memory())
    measured = read_bandwidth()
    least_ms = read_bytes / measured * 1000
    step_ms = _slowest(ranks, "decode").undisturbed_ms
    draft.metric("memory_bandwidth", measured, "B/s", "measured here, all threads")
    draft.metric("weight_bytes", read_bytes, "B", f"read for a step, {world_size} ranks together")
    draft.metric("decode_limit_ms", least_ms, "ms", "weight bytes over bandwidth")
    share = 100 * least_ms / step_ms
    above = "; more: caches held a part, or memory was busy when it was measured" if share > 100 else ""
    draft.metric("decode_of_limit", share, "%", f"100 % is as fast as memory allows at batch 1{above}")
    return measured


NOT_READ = ("vision", "projector", "cache", "embedding")  # by a decode step; one row of the embedding is


def _read_in_decode(by_role: dict[str, int]) -> int:
    """Weights of a rank that a decode step reads; an embedding that is the head as well is read whole."""
    tied = "head" not in by_role
    return sum(n for role, n in by_role.items() if role not in NOT_READ or (role == "embedding" and tied))


def _step_rows(ranks: Sequence[RankProfile]) -> Iterator[dict[str, Any]]:
    for phase in PHASES:
        for rank in ranks:
            one: PhaseProfile = getattr(rank, phase)
            yield {
                "phase": phase,
                "rank": rank.rank,
                "tokens": one.tokens,
                "undisturbed_ms": one.undisturbed_ms,
                "timed_ms": one.total_ms,
                "compute_ms": one.compute_ms,
                "communication_ms": one.communication_ms,
                "waiting_ms": one.waiting_ms,
                "communication_bytes": one.communication_bytes,
            }


def _operator_rows(ranks: Sequence[RankProfile]) -> Iterator[dict[str, Any]]:
    """Rank 0's operators, the dearest first; times of both phases side by side."""
    prefill, decode = ranks[0].prefill.operators_ms, ranks[0].decode.operators_ms
    for name in sorted(set(prefill) | set(decode), key=lambda name: -decode.get(name, 0.0)):
        yield {"operator": name, "prefill_ms": prefill.get(name), "decode_ms": decode.get(name)}


def _costs(info: EngineInfo, tokens: int) -> dict[str, BlockCost]:
    """What the blocks must read and compute; nothing where the model is not described by a family here."""
    try:
        spec, _ = FAMILIES.describe(read_config(info.checkpoint)[1])
    except Refused:
        return {}
    return block_costs(spec, info.mesh, info.dtype, tokens)


def _layer_rows(
    ranks: Sequence[RankProfile], costs: Mapping[str, Mapping[str, BlockCost]], bandwidth: float | None
) -> Iterator[dict[str, Any]]:
    """A row a block and rank: time, bytes of weights and FLOPs of each phase, and decode as a part of its limit."""
    share = bandwidth / len(ranks) if bandwidth else None  # ranks of one machine read side by side
    for rank in ranks:
        for name in dict.fromkeys((*rank.prefill.layers_ms, *rank.decode.layers_ms)):
            cost, prefill = costs["decode"].get(name), costs["prefill"].get(name)
            decode_ms = rank.decode.layers_ms.get(name)
            limit_ms = 1e3 * cost.weight_bytes / share if cost is not None and share else None
            yield {
                "rank": rank.rank,
                "block": name,
                "prefill_ms": rank.prefill.layers_ms.get(name),
                "decode_ms": decode_ms,
                "weight_bytes": cost.weight_bytes if cost else None,
                "decode_flops": cost.flops if cost else None,
                "prefill_flops": prefill.flops if prefill else None,
                "decode_of_limit": 100 * limit_ms / decode_ms if limit_ms is not None and decode_ms else None,
            }


def _timeline_rows(ranks: Sequence[RankProfile]) -> Iterator[dict[str, Any]]:
    """What followed what in the last timed step of each phase, rank by rank; times count from the step's start."""
    for phase in PHASES:
        for rank in ranks:
            for span in getattr(rank, phase).timeline:
                yield {
                    "phase": phase,
                    "rank": rank.rank,
                    "name": span.name,
                    "kind": span.kind,
                    "start_ms": span.start_ms,
                    "duration_ms": span.duration_ms,
                    "moved_bytes": span.nbytes,
                }


def _collective_rows(ranks: Sequence[RankProfile]) -> Iterator[dict[str, Any]]:
    for phase in PHASES:
        for name, calls in getattr(ranks[0], phase).collectives.items():
            yield {"phase": phase, "collective": name, "calls_per_step": calls}
