"""Plans a layout: what every rank would hold, whether it fits, why, and the nearest layout that does. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import get_args

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal, note, warning
from firstlight.engine.model.spec import CacheSpec, ModelSpec, Param
from firstlight.engine.parallel.census import Kind, census_by
from firstlight.engine.parallel.constraints import impossible
from firstlight.engine.parallel.estimate import Roofline, active_by_kind
from firstlight.engine.parallel.hardware import Cluster, local_cluster
from firstlight.engine.parallel.layouts import Layouts, Objective, RankBytes, fullest
from firstlight.engine.parallel.mesh import Attention, Mesh
from firstlight.engine.parallel.ranking import Candidate, Ranker
from firstlight.engine.weights.files.header import DTYPE_BITS
from firstlight.engine.weights.formats.registry import StoredFormat

__all__ = [
    "HEADROOM",
    "Objective",
    "Plan",
    "RankBytes",
    "Totals",
    "active_parameters",
    "make_plan",
    "room_here",
    "totals",
]

HEADROOM = 0.15  # of device memory, for activations, workspace, communication buffers and the framework


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a release that no layout changes. Definitions: `plan --json` in the README."""

    parameters: int
    active_parameters: int
    mtp_parameters: int
    checkpoint_bytes: int
    kv_bytes_per_token: int
    state_bytes_per_sequence: int
    convolution_bytes_per_sequence: int
    by_role: dict[str, int]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A layout on a cluster: bytes per rank, whether it fits, the constraint that decided, the nearest that fits."""

    mesh: Mesh
    cluster: Cluster
    totals: Totals
    ranks: tuple[RankBytes, ...]
    context: int
    concurrency: int
    usable_bytes: int
    fits: bool
    binding: str
    binding_reason: str
    devices_needed: int | None
    nearest: Mesh | None
    findings: tuple[Finding, ...]
    objective: Objective
    estimate: Candidate
    ranking: tuple[Candidate, ...] = ()

    @property
    def weight_bytes_per_device(self) -> int:
        return max(rank.weight_bytes for rank in self.ranks)

    @property
    def largest(self) -> RankBytes:
        return fullest(self.ranks)


def totals(spec: ModelSpec, stored: StoredFormat, cache_dtype: str = "BF16") -> Totals:
    """Counts over the whole release; a tied head counts once, and quantization scales count only as bytes."""
    kinds = [kind for kind in census_by(spec, stored.layer_key) if not _tied_head(spec, kind)]
    by_role: dict[str, int] = {}
    for kind in kinds:
        by_role[kind.param.role] = by_role.get(kind.param.role, 0) + kind.elements
    extra = spec.mtp_parameters()
    element = DTYPE_BITS[cache_dtype] // 8
    caches = [layer.cache() for layer in spec.layers]
    held = sum(_stored_bytes(stored, kind.param) * kind.count * len(kind.layers) for kind in kinds)
    return Totals(
        parameters=sum(by_role.values()),
        active_parameters=active_parameters(spec),
        mtp_parameters=sum(param.elements for param in extra),
        checkpoint_bytes=held + sum(stored.nbytes(param, param.shape) for param in extra),
        kv_bytes_per_token=sum(cache.elements_per_token for cache in caches) * element,
        state_bytes_per_sequence=sum(_state_bytes(cache, element) for cache in caches),
        convolution_bytes_per_sequence=sum(cache.waiting_bytes(element) for cache in caches),
        by_role=by_role,
    )


def _stored_bytes(stored: StoredFormat, param: Param) -> int:
    """Bytes of a parameter in the release, padding included."""
    as_stored = msgspec.structs.replace(param, dtype=None) if param.widened else param
    return stored.nbytes(as_stored, param.stored_shape)


def _tied_head(spec: ModelSpec, kind: Kind) -> bool:
    return spec.tied_head and kind.param.name == "head.weight"


def _state_bytes(cache: CacheSpec, element: int) -> int:
    """Cache bytes of a layer that do not grow with the sequence: a full window and recurrent states."""
    _, windows = cache.elements(1 << 62)
    return windows * element + cache.state_bytes(element) - cache.waiting_bytes(element)


def active_parameters(spec: ModelSpec) -> int:
    """Parameters used for one text token: chosen experts only, with the output head, without the embedding."""
    return sum(active_by_kind(spec))


def make_plan(
    spec: ModelSpec,
    stored: StoredFormat,
    cluster: Cluster,
    mesh: Mesh | None = None,
    *,
    context: int = 4096,
    concurrency: int | None = 1,
    cache_dtype: str = "BF16",
    headroom: float = HEADROOM,
    objective: Objective = "latency",
    full_window: bool = False,
    exchange: str = "auto",
    attention: Attention = "divided",
) -> Plan:
    """Plans the model on the cluster with the layout `mesh` or, without one, the best that fits for `objective`.

    `concurrency` None: one sequence or, for throughput, as many as fit. Layouts are ranked with a roofline model (see
    `ranking.py`) or, where hardware facts are missing, by size. `full_window`: layers with a sliding window cache the
    whole context, as the engine does today. `exchange`: how tokens reach experts on other ranks. `attention`: whether
    the layouts considered divide attention; `mesh` overrides it. Raises `Refused` when the request is impossible:
    sizes that do not divide, or more ranks than devices.
    """
    _refuse_wishes(context, 1 if concurrency is None else concurrency, cache_dtype, headroom, objective)
    attention = attention if mesh is None else mesh.attention
    usable = int(cluster.device.memory_bytes * (1 - headroom))
    layouts = Layouts(spec, stored, cluster, usable, context, DTYPE_BITS[cache_dtype] // 8, full_window, attention)
    if mesh is not None:
        _refuse_mesh(layouts, mesh, exchange, concurrency or 1)
    ranker = Ranker(layouts, Roofline(spec, cluster, exchange), concurrency)
    ranking = ranker.ranked(objective) if mesh is None else ()
    chosen, concurrency = _choose(mesh, ranking, layouts, objective, concurrency)
    return _laid_out(ranker, chosen, concurrency, totals(spec, stored, cache_dtype), objective, ranking)


def _laid_out(
    ranker: Ranker,
    mesh: Mesh,
    concurrency: int,
    facts: Totals,
    objective: Objective,
    ranking: tuple[Candidate, ...],
) -> Plan:
    """The plan of one layout: what each rank holds, whether it fits and, where it does not, the nearest that does."""
    layouts = ranker.layouts
    ranks, needed, usable = layouts.ranks(mesh, concurrency), layouts.fewest(), layouts.usable_bytes
    binding, reason = _binding(mesh, fullest(ranks), usable)
    fits = fullest(ranks).total <= usable
    nearest = None if fits else layouts.nearest(mesh, concurrency) or layouts.fewest_for(concurrency)
    too_much = () if fits else (_does_not_fit(layouts, mesh, ranks, concurrency, nearest),)
    return Plan(
        mesh=mesh,
        cluster=layouts.cluster,
        totals=facts,
        ranks=ranks,
        context=layouts.context,
        concurrency=concurrency,
        usable_bytes=usable,
        fits=fits,
        binding=binding,
        binding_reason=reason,
        devices_needed=needed.world_size if needed else None,
        nearest=nearest,
        findings=(*too_much, *_cut_blocks(layouts, mesh), *_beyond_positions(layouts.spec, layouts.context)),
        objective=objective,
        estimate=ranker.candidate(mesh, concurrency),
        ranking=ranking,
    )


def _choose(
    mesh: Mesh | None, ranking: Sequence[Candidate], layouts: Layouts, objective: Objective, concurrency: int | None
) -> tuple[Mesh, int]:
    """The chosen layout and its number of concurrent sequences."""
    if mesh is not None:
        return mesh, concurrency or 1
    if ranking:
        return ranking[0].mesh, ranking[0].concurrency
    return layouts.best(objective, concurrency or 1) or layouts.thinnest(), concurrency or 1


def _refuse_wishes(context: int, concurrency: int, cache_dtype: str, headroom: float, objective: str) -> None:
    wishes = (
        ("context", context, context >= 1, "at least 1 token"),
        ("concurrency", concurrency, concurrency >= 1, "at least 1 sequence"),
        ("cache dtype", cache_dtype, DTYPE_BITS.get(cache_dtype, 0) >= 8, "BF16, F16, F32, F8_E4M3 or F8_E5M2"),
        ("headroom", headroom, 0 <= headroom < 1, "a share of the device memory, 0 or more and below 1"),
        ("objective", objective, objective in get_args(Objective), ", ".join(get_args(Objective))),
    )
    for name, found, possible, expected in wishes:
        if not possible:
            raise Refused(
                fatal(
                    "usage",
                    f"a plan for {name} {found} is not possible",
                    expected=expected,
                    found=str(found),
                    next=f"give another {name}",
                )
            )


def _refuse_mesh(layouts: Layouts, mesh: Mesh, exchange: str, concurrency: int) -> None:
    """Raises `Refused` if the model or the cluster does not allow the mesh, with the nearest layout that fits."""
    cluster = layouts.cluster
    problems = list(impossible(layouts.spec, mesh, exchange))
    if mesh.world_size > cluster.count:
        problems.append(
            fatal(
                "does-not-fit",
                f"the mesh {mesh.describe()} has {mesh.world_size} ranks, the cluster {cluster.describe()} "
                f"{cluster.count} devices",
                expected=f"at most {cluster.count} ranks",
                found=f"{mesh.world_size} ranks",
                next="make the mesh smaller or the cluster larger",
            )
        )
    if problems:
        way = _way_out(layouts, layouts.nearest(mesh, concurrency) or layouts.fewest_for(concurrency))
        raise Refused(msgspec.structs.replace(problem, next=f"{problem.next}; {way}") for problem in problems)


def _way_out(layouts: Layouts, nearest: Mesh | None) -> str:
    """The nearest layout that fits, in words."""
    name = layouts.cluster.device.name
    if nearest is None:
        return "no layout of this device fits"
    return f"nearest that fits: {nearest.describe()} on {nearest.world_size:,} x {name}"


def _binding(mesh: Mesh, worst: RankBytes, usable_bytes: int) -> tuple[str, str]:
    """The binding constraint: its name, and a sentence with the figures."""
    kind = "weights" if worst.weight_bytes >= worst.cache + worst.state else "cache"
    verb = "needs" if worst.total > usable_bytes else "takes"
    share = f", {100 * worst.total / usable_bytes:.0f} %" if usable_bytes else ""
    return (
        f"{kind}-memory",
        f"rank {worst.rank} {verb} {worst.total / 2**30:.2f} GiB ({worst.weight_bytes / 2**30:.2f} weights, "
        f"{(worst.cache + worst.state) / 2**30:.2f} cache) of {usable_bytes / 2**30:.2f} GiB usable{share}, "
        f"on {mesh.describe()}",
    )


def _most_at_once(layouts: Layouts, mesh: Mesh, concurrency: int) -> int:
    """How many sequences the layout has room for, over all replicas."""
    return mesh.dp * layouts.most_sequences((mesh.tp, mesh.ep, mesh.pp), concurrency)


def _does_not_fit(
    layouts: Layouts, mesh: Mesh, ranks: Sequence[RankBytes], concurrency: int, nearest: Mesh | None
) -> Finding:
    """By how much it does not fit, and what does: the nearest layout, and fewer sequences on this one."""
    cluster, usable_bytes, worst = layouts.cluster, layouts.usable_bytes, fullest(ranks)
    ways = [] if nearest is None else [_way_out(layouts, nearest)]
    fewer = 0 if concurrency == 1 else _most_at_once(layouts, mesh, concurrency)
    if fewer:
        ways.append(f"{mesh.describe()} has room for --concurrency {fewer}")
    return fatal(
        "does-not-fit",
        f"{_binding(mesh, worst, usable_bytes)[1]} of {cluster.describe()}",
        expected=f"at most {usable_bytes:,} bytes a device",
        found=f"{worst.total:,} bytes on rank {worst.rank}",
        next="; or ".join(ways) or _way_out(layouts, None),
    )


def _cut_blocks(layouts: Layouts, mesh: Mesh) -> Iterator[Finding]:
    """Notes shards that end inside a quantization block: they work, and both ranks keep the block's scale."""
    cut = layouts.cut_blocks(mesh.tp)
    if every := layouts.kept_whole(mesh.tp):
        yield note(
            "cut-block",
            f"tp {mesh.tp} divides inputs of {', '.join(_kinds(every))} whose groups are listed one by one (g_idx); "
            "every rank keeps all scales of its rows, and the plan counts them",
            found=f"scales that are not divided, of {len(_kinds(every))} kinds of parameters",
            next="nothing: all scales are needed everywhere",
        )
    if cut:
        names = _kinds(cut)
        whole = max((tp for tp in layouts.widths if tp <= mesh.tp and not layouts.cut_blocks(tp)), default=1)
        yield note(
            "cut-block",
            f"tp {mesh.tp} cuts through quantization blocks of {', '.join(names)}; the scale of a cut block is kept on "
            "both ranks, and counted on both",
            expected="shards of whole blocks",
            found=f"shards that end inside a block, of {len(names)} kinds of parameters",
            next=f"nothing, or --tp {whole}, the largest that cuts between blocks",
        )


def _kinds(found: Iterable[Kind]) -> list[str]:
    """Distinct names of parameters, with `*` for layer numbers."""
    return list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", kind.param.name) for kind in found))


def _beyond_positions(spec: ModelSpec, context: int) -> Iterator[Finding]:
    if 0 < spec.max_positions < context:
        yield warning(
            "context-too-long",
            f"the plan holds {context:,} tokens a sequence, the model has {spec.max_positions:,} positions",
            expected=f"at most {spec.max_positions:,} tokens",
            found=f"{context:,} tokens",
            next=f"plan with --context {spec.max_positions} or less",
        )


def room_here(ranks: int) -> int:
    """Memory in bytes that each of `ranks` CPU processes on this machine may use, less the headroom."""
    return int(local_cluster(ranks).device.memory_bytes * (1 - HEADROOM))
