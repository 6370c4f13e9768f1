"""Estimates step time and communication of a layout with a roofline model, to rank layouts. No torch.

Not covered: overlap of compute and communication, kernels' own efficiency beyond one factor, attention's quadratic part
in prefill, prefix caching. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Literal

import msgspec

from firstlight.engine.model.spec import DenseAndExperts, LayerSpec, ModelSpec
from firstlight.engine.parallel.census import census
from firstlight.engine.parallel.hardware import Cluster
from firstlight.engine.parallel.mesh import HEADS, Mesh
from firstlight.engine.parallel.pieces import stages
from firstlight.engine.parallel.rows import row_axes

MEMORY_FACTOR = 0.8  # of the data sheet's bandwidth that decode kernels reach; source: data/hardware.json, _empirical
LATENCY_S = 10e-6  # of one message, or of one collective in a node; source: data/hardware.json, _empirical
ROUTING_BYTES = 8  # of a chosen expert's number and weight, which travel beside the token
EXCHANGE_CALLS = 4  # of one layer's all-to-all: how many, the tokens, where to, and back

Phase = Literal["prefill", "decode"]


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic of one kind of collective: bytes that a rank sends per token of a step, and calls per step.

    In a pipeline these are of a rank of the longest stage. `what` is sent: partial sums, tokens for experts, ...
    """

    axis: str
    operation: str
    what: str
    bytes_per_token: int
    calls_per_step: int


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """One step of `tokens` tokens on one replica; milliseconds, None where the facts lack a figure."""

    phase: Phase
    tokens: int
    memory_ms: float | None
    compute_ms: float | None
    communication_ms: float | None

    @property
    def step_ms(self) -> float | None:
        if self.memory_ms is None or self.compute_ms is None or self.communication_ms is None:
            return None
        return max(self.memory_ms, self.compute_ms) + self.communication_ms

    @property
    def bound_by(self) -> str:
        """Which of compute, memory and communication takes longest."""
        parts = {"memory": self.memory_ms, "compute": self.compute_ms, "communication": self.communication_ms}
        known = {name: value for name, value in parts.items() if value is not None}
        return max(known, key=lambda name: known[name]) if len(known) == len(parts) else "unknown: facts are missing"


class Roofline:
    """Estimates steps of one model on one cluster under any mesh; what depends only on the model is counted once.

    `exchange`: how tokens meet experts of other ranks. `element_bytes` of what is computed with and sent.
    """

    def __init__(self, spec: ModelSpec, cluster: Cluster, exchange: str = "auto", element_bytes: int = 2) -> None:
        self.spec, self.cluster = spec, cluster
        self._exchange, self._element_bytes = exchange, element_bytes
        self._handed: dict[int, int] = {}

    @cached_property
    def _layers(self) -> tuple[LayerSpec, ...]:
        """Every layer, followed by its inner layers where it has a shortcut of its own."""
        return tuple(one for layer in self.spec.layers for one in (layer, *layer.parts))

    @cached_property
    def _summed_widths(self) -> dict[str, tuple[int, ...]]:
        """Widths of the partial sums of one step, by the mesh axis they are reduced over."""
        mixed = tuple(self.spec.hidden for layer in self._layers if layer.mixer is not None)
        fed = tuple(width for layer in self._layers for width in _summed_by_ffn(layer, self.spec.hidden))
        return {HEADS: mixed, "tp": fed}

    @cached_property
    def _routed(self) -> tuple[tuple[int, int, int], ...]:
        """(width, experts, chosen) of every layer with experts."""
        return tuple(
            (_routed_width(layer, self.spec.hidden), layer.experts.num_experts, layer.experts.router.top_k)
            for layer in self._layers
            if layer.experts is not None
        )

    @cached_property
    def _active(self) -> tuple[int, int, int]:
        return active_by_kind(self.spec)

    def traffic(self, mesh: Mesh, phase: Phase = "decode", tokens: int = 1) -> tuple[Traffic, ...]:
        """The collectives of one step of a replica. A ring all-reduce over n ranks sends 2 (n - 1) / n of the message.

        Between stages the residual stream (all planes) is sent; of several cuts the widest counts.
        """
        axes = row_axes(self.spec, mesh, self._exchange, tokens, phase == "prefill")
        ranks = math.prod(mesh.size(axis) for axis in axes)
        rows = [*self._over_tp(mesh, phase, tokens, ranks), *self._experts(mesh, axes)]
        if axes:
            rows += self._gathered(mesh, axes, ranks)
        if mesh.pp > 1:
            rows.append(_row("pp", "send", "stream", self._stream(mesh.pp) * self._element_bytes / ranks, 1))
        return tuple(rows)

    def _over_tp(self, mesh: Mesh, phase: Phase, tokens: int, ranks: int) -> list[Traffic]:
        if mesh.tp == 1:
            return []
        element, others = self._element_bytes, (mesh.tp - 1) / mesh.tp
        widths = [w for axis, some in self._summed_widths.items() if mesh.size(axis) > 1 for w in some]
        of_stage = _of_stage(self.spec, mesh)
        moved = sum(widths) * of_stage * element * 2 * others / ranks
        logits = self.spec.vocab_size * element * others
        blocks = _row("tp", "all_reduce", "blocks", moved, math.ceil(len(widths) * of_stage))
        return [
            *([blocks] if widths else []),
            _row("tp", "all_reduce", "embedding", self.spec.hidden * element * 2 * others / ranks, 1),
            _row("tp", "all_gather", "logits", logits if phase == "decode" else logits / tokens, 1),
        ]

    def _experts(self, mesh: Mesh, axes: Sequence[str]) -> list[Traffic]:
        if mesh.ep == 1:
            return []
        of_stage, element = _of_stage(self.spec, mesh), self._element_bytes
        sp = mesh.sp if "sp" in axes else 1
        calls = math.ceil(len(self._routed) * of_stage)
        if "ep" not in axes:
            moved = sum(width for width, _, _ in self._routed) * element * 2 * (mesh.ep - 1) / mesh.ep
            return [_row("ep", "all_reduce", "experts", moved * of_stage / sp, calls)]
        sent = sum(
            ranks_reached(mesh.ep, experts, chosen) * (2 * width * element + ROUTING_BYTES * chosen)
            for width, experts, chosen in self._routed
        )
        return [_row("ep", "all_to_all", "experts", sent * of_stage / mesh.ep / sp, EXCHANGE_CALLS * calls)]

    def _gathered(self, mesh: Mesh, axes: Sequence[str], ranks: int) -> list[Traffic]:
        """All-gathers of keys and values of every layer, and of the last layer's output."""
        caches = [layer.cache() for layer in self.spec.layers]
        kept = sum(one.local_heads(mesh.size(HEADS)) * one.dim for cache in caches for one in cache.tensors)
        share = self._element_bytes * (ranks - 1) / ranks
        calls = math.ceil(len(caches) * _of_stage(self.spec, mesh))
        name = " x ".join(axes)
        return [
            _row(name, "all_gather", "keys and values", kept * _of_stage(self.spec, mesh) * share, calls),
            _row(name, "all_gather", "stream", math.prod(self.spec.stream_shape(self.spec.num_layers)) * share, 1),
        ]

    def _stream(self, pp: int) -> int:
        """Elements per token that a stage sends to the next."""
        if pp not in self._handed:
            starts = [first for first, _ in stages(self.spec, pp)[1:]]
            inputs = self.spec.per_layer
            own = [0 if inputs is None else (inputs.layers - first) * inputs.width for first in starts]
            widths = [math.prod(self.spec.stream_shape(first)) for first in starts]
            self._handed[pp] = max(map(sum, zip(widths, own, strict=True)))
        return self._handed[pp]

    def step(self, mesh: Mesh, phase: Phase, tokens: int, read_bytes: int) -> StepTime:
        """The larger of reading `read_bytes` and computing 2 FLOPs a parameter and token, plus traffic.

        `read_bytes`: summed over one rank of every stage, since stages work on a step one after another.
        """
        device = self.cluster.device
        bandwidth, flops = device.memory_bandwidth_Bps, device.bf16_flops
        axes = row_axes(self.spec, mesh, self._exchange, tokens, phase == "prefill")
        ranks = math.prod(mesh.size(axis) for axis in axes)
        routed, mixers, others = self._active
        per_rank = (mixers / mesh.size(HEADS) + others / mesh.tp) / ranks
        per_rank += routed / (mesh.tp * mesh.ep * (mesh.sp if "sp" in axes else 1))
        return StepTime(
            phase=phase,
            tokens=tokens,
            memory_ms=_ms(read_bytes / (bandwidth * MEMORY_FACTOR)) if bandwidth else None,
            compute_ms=_ms(2 * per_rank * tokens / flops) if flops else None,
            communication_ms=self._communication_ms(mesh, phase, tokens),
        )

    def _communication_ms(self, mesh: Mesh, phase: Phase, tokens: int) -> float | None:
        seconds = 0.0
        for row in self.traffic(mesh, phase, tokens):
            nodes = mesh.nodes_of(row.axis.split(" x ")[0], self.cluster.per_node)
            link = self.cluster.device.link_Bps if nodes == 1 else self.cluster.device.nic_Bps
            if link is None:
                return None
            hops = 1 if row.axis == "pp" else 1 + 2 * math.ceil(math.log2(nodes))  # up and down a tree of nodes
            once = row.what in ("embedding", "logits") or (row.what == "stream" and row.axis != "pp")
            times = 1 if once else mesh.pp - 1 if row.axis == "pp" else mesh.pp
            seconds += times * (row.calls_per_step * hops * LATENCY_S + row.bytes_per_token * tokens / link)
        return _ms(seconds)


def active_by_kind(spec: ModelSpec) -> tuple[int, int, int]:
    """Parameters used for one text token: (those of chosen experts, of mixers, all others)."""
    routed = mixers = others = 0
    for kind in census(spec):
        if kind.param.role in ("vision", "projector", "embedding"):
            continue
        if kind.param.role == "attention":
            mixers += kind.elements
            continue
        if kind.param.expert is None:
            others += kind.elements
            continue
        experts = spec.layers[kind.param.layer].experts
        assert experts is not None
        routed += kind.elements // experts.num_experts * experts.router.top_k
    return routed, mixers, others


def ranks_reached(ranks: int, experts: int, chosen: int) -> float:
    """Expected number of other ranks a token is sent to, if all sets of `chosen` of `experts` are equally likely."""
    elsewhere = experts - experts // ranks
    missed = math.prod(max(0, elsewhere - i) / (experts - i) for i in range(chosen))
    return (ranks - 1) * (1 - missed)


def _of_stage(spec: ModelSpec, mesh: Mesh) -> float:
    """The longest stage's share of all layers."""
    return -(-spec.num_layers // mesh.pp) / spec.num_layers


def _summed_by_ffn(layer: LayerSpec, hidden: int) -> tuple[int, ...]:
    """Widths of a layer's feed-forward sums over tp, experts with a width of their own not included."""
    if layer.experts is None:
        return (hidden,) if layer.ffn is not None else ()
    if layer.experts.latent is None:
        return (hidden, hidden) if isinstance(layer.ffn, DenseAndExperts) else (hidden,)
    return (_routed_width(layer, hidden), *((hidden,) if layer.experts.shared else ()))


def _routed_width(layer: LayerSpec, hidden: int) -> int:
    """Output width of routed experts."""
    experts = layer.experts
    return hidden if experts is None or experts.latent is None else experts.latent.width


def _row(axis: str, operation: str, what: str, bytes_per_token: float, calls: int) -> Traffic:
    return Traffic(
        axis=axis, operation=operation, what=what, bytes_per_token=round(bytes_per_token), calls_per_step=calls
    )


def bytes_read(spec: ModelSpec, weights: Mapping[str, int], cache_bytes: int, tokens: int) -> int:
    """What a rank reads from memory for a step of `tokens`: its weights by role and the cache.

    Experts count if at least one token is expected to choose them (independent choices). Of the embedding one row
    counts, unless it is the head as well; the vision tower does not count.
    """
    moes = [layer.experts for layer in spec.layers if layer.experts is not None]
    chosen = 1 - (1 - moes[0].router.top_k / moes[0].num_experts) ** tokens if moes else 1.0
    is_head = spec.tied_head and "head" not in weights
    shares = {"expert": chosen, "vision": 0.0, "projector": 0.0, "embedding": 1.0 if is_head else 0.0}
    return round(sum(nbytes * shares.get(role, 1.0) for role, nbytes in weights.items())) + cache_bytes


def _ms(seconds: float) -> float:
    return seconds * 1000
