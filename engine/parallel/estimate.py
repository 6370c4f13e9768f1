"""Time and communication of a layout from facts: a roofline to rank layouts by and to stand beside measurements.

Not covered: overlap of compute and communication, kernels' own efficiency beyond one factor, attention's quadratic part
in prefill, prefix caching. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from firstlight.engine.model.spec import LayerSpec, ModelSpec
from firstlight.engine.parallel.hardware import Cluster
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.parallel.pieces import stages

MEMORY_FACTOR = 0.8  # of the data sheet's bandwidth that decode kernels reach; source: data/hardware.json, _empirical
LATENCY_S = 10e-6  # of one collective; source: data/hardware.json, _empirical


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """What one kind of collective moves for one token: bytes sent by a rank, and how often it is called in a step."""

    axis: str
    operation: str
    bytes_per_token: int
    calls_per_step: int


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """One step of `tokens` tokens on one replica; milliseconds, None where the facts lack a figure."""

    phase: str
    tokens: int
    memory_ms: float | None
    compute_ms: float | None
    communication_ms: float | None

    @property
    def step_ms(self) -> float | None:
        if self.memory_ms is None or self.compute_ms is None or self.communication_ms is None:
            return None
        return max(self.memory_ms, self.compute_ms) + self.communication_ms


def traffic(spec: ModelSpec, mesh: Mesh, element_bytes: int = 2) -> tuple[Traffic, ...]:
    """The collectives of one step. A ring all-reduce over n ranks sends 2 (n - 1) / n of the message.

    Between stages goes what enters a layer for a token, all planes of it; of several cuts the widest counts.
    """
    rows = []
    of_stage = -(-spec.num_layers // mesh.pp) / spec.num_layers  # the longest stage's share of all layers
    if mesh.tp > 1:
        widths = [width for layer in spec.layers for width in _summed_over_tp(layer, spec.hidden)]
        rows.append(_summed("tp", widths, mesh.tp, of_stage, element_bytes))
        rows.append(_row("tp", "all_gather", spec.vocab_size * element_bytes * (mesh.tp - 1) / mesh.tp, 1))
    if mesh.ep > 1:
        widths = [_routed_width(layer, spec.hidden) for layer in spec.layers if layer.experts is not None]
        rows.append(_summed("ep", widths, mesh.ep, of_stage, element_bytes))
    if mesh.pp > 1:
        handed = max(math.prod(spec.stream_shape(first)) for first, _ in stages(spec, mesh.pp)[1:])
        rows.append(_row("pp", "send", handed * element_bytes, 1))
    return tuple(rows)


def _summed_over_tp(layer: LayerSpec, hidden: int) -> tuple[int, ...]:
    """Widths of what a layer sums over tp: of its mixer and of its feed-forward; experts of their own width apart."""
    if layer.experts is None or layer.experts.latent is None:
        return hidden, hidden
    return (hidden, _routed_width(layer, hidden), *((hidden,) if layer.experts.shared else ()))


def _routed_width(layer: LayerSpec, hidden: int) -> int:
    """Width of what routed experts give."""
    experts = layer.experts
    return hidden if experts is None or experts.latent is None else experts.latent.width


def _summed(axis: str, widths: Sequence[int], ranks: int, of_stage: float, element_bytes: int) -> Traffic:
    """All sums of a stage's layers over an axis, by a ring."""
    moved = sum(widths) * of_stage * element_bytes * 2 * (ranks - 1) / ranks
    return Traffic(
        axis=axis,
        operation="all_reduce",
        bytes_per_token=round(moved),
        calls_per_step=math.ceil(len(widths) * of_stage),
    )


def _row(axis: str, operation: str, message_bytes: float, calls: int) -> Traffic:
    return Traffic(axis=axis, operation=operation, bytes_per_token=round(message_bytes * calls), calls_per_step=calls)


def bytes_read(spec: ModelSpec, weights: Mapping[str, int], cache_bytes: int, tokens: int) -> int:
    """What a rank reads from memory for a step of `tokens`: its weights by role and the cache.

    Of the experts those that at least one token chose, if tokens choose independently; one row of the embedding and no
    vision tower.
    """
    moes = [layer.experts for layer in spec.layers if layer.experts is not None]
    chosen = 1 - (1 - moes[0].router.top_k / moes[0].num_experts) ** tokens if moes else 1.0
    shares = {"expert": chosen, "vision": 0.0, "projector": 0.0, "embedding": 1.0 if spec.tied_head else 0.0}
    return round(sum(nbytes * shares.get(role, 1.0) for role, nbytes in weights.items())) + cache_bytes


def step_time(
    spec: ModelSpec, mesh: Mesh, cluster: Cluster, phase: str, tokens: int, active_parameters: int, read_bytes: int
) -> StepTime:
    """The larger of reading `read_bytes` on a rank and computing 2 FLOPs a parameter and token, plus traffic.

    Stages of a pipeline work one after another on one step, so their times add up.
    """
    device = cluster.device
    bandwidth, flops = device.memory_bandwidth_Bps, device.bf16_flops
    ranks = mesh.world_size // mesh.dp
    link = device.link_Bps if mesh.tp * mesh.ep <= cluster.per_node else device.nic_Bps
    communication = None
    rows = traffic(spec, mesh)
    if not rows:
        communication = 0.0
    elif link:
        calls = sum(row.calls_per_step for row in rows) * mesh.pp
        moved = sum(row.bytes_per_token for row in rows) * mesh.pp * tokens
        communication = calls * LATENCY_S + moved / link
    return StepTime(
        phase=phase,
        tokens=tokens,
        memory_ms=_ms(read_bytes * mesh.pp / (bandwidth * MEMORY_FACTOR)) if bandwidth else None,
        compute_ms=_ms(2 * active_parameters * tokens / (flops * ranks / mesh.pp)) if flops else None,
        communication_ms=_ms(communication) if communication is not None else None,
    )


def _ms(seconds: float) -> float:
    return seconds * 1000
