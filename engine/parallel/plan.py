"""Plans: what every rank of a layout would hold, whether it fits, why, and the nearest layout that does. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal
from firstlight.engine.model.spec import CacheSpec, ModelSpec, MoE, Param
from firstlight.engine.parallel.constraints import allowed, placements, refuse_impossible
from firstlight.engine.parallel.hardware import Cluster
from firstlight.engine.parallel.mesh import Coordinates, Mesh
from firstlight.engine.parallel.pieces import on_stage, stages
from firstlight.engine.parallel.placement import Expert, Shard, Vocab, localize
from firstlight.engine.weights.formats.registry import StoredFormat
from firstlight.engine.weights.header import DTYPE_BITS

Objective = Literal["latency", "throughput", "devices"]
HEADROOM = 0.15  # of device memory, for activations, workspace, communication buffers and the framework


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a release that no layout changes. Definitions: `plan --json` in the README."""

    parameters: int
    active_parameters: int
    mtp_parameters: int
    checkpoint_bytes: int
    kv_bytes_per_token: int
    state_bytes_per_sequence: int
    by_role: dict[str, int]


class RankBytes(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank holds, in bytes: weights by role, cache for the planned context and concurrency."""

    rank: int
    at: Coordinates
    layers: tuple[int, int]
    weights: dict[str, int]
    cache: int
    state: int

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def total(self) -> int:
        return self.weight_bytes + self.cache + self.state


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

    @property
    def weight_bytes_per_device(self) -> int:
        return max(rank.weight_bytes for rank in self.ranks)

    @property
    def largest(self) -> RankBytes:
        return max(self.ranks, key=lambda rank: rank.total)


def totals(spec: ModelSpec, stored: StoredFormat, cache_dtype: str = "BF16") -> Totals:
    """Counts over the whole release; a tied head counts once and scales not at all, except in bytes."""
    params = [param for param in spec.parameters() if not (param.name == "head.weight" and spec.tied_head)]
    by_role: dict[str, int] = {}
    for param in params:
        by_role[param.role] = by_role.get(param.role, 0) + param.elements
    extra = spec.mtp_parameters()
    element = DTYPE_BITS[cache_dtype] // 8
    caches = [layer.mixer.cache() for layer in spec.layers]
    return Totals(
        parameters=sum(by_role.values()),
        active_parameters=active_parameters(spec),
        mtp_parameters=sum(param.elements for param in extra),
        checkpoint_bytes=sum(stored.nbytes(param, param.shape) for param in (*params, *extra)),
        kv_bytes_per_token=sum(cache.elements_per_token for cache in caches if cache.window is None) * element,
        state_bytes_per_sequence=sum(_state_bytes(cache, element) for cache in caches),
        by_role=by_role,
    )


def _state_bytes(cache: CacheSpec, element: int) -> int:
    """What a layer keeps however long the sequence grows: a full window, and recurrent state in float32."""
    window = cache.elements_per_token * cache.window * element if cache.window else 0
    return window + cache.state_elements * 4


def active_parameters(spec: ModelSpec) -> int:
    """Used for one text token: the chosen experts only; the output head in, the embedding lookup out."""
    count = 0.0
    for param in spec.parameters():
        if param.role in ("vision", "projector", "embedding"):
            continue
        share = 1.0
        if param.expert is not None:
            ffn = spec.layers[param.layer].ffn
            assert isinstance(ffn, MoE)
            share = ffn.router.top_k / ffn.num_experts
        count += param.elements * share
    return round(count)


def make_plan(
    spec: ModelSpec,
    stored: StoredFormat,
    cluster: Cluster,
    mesh: Mesh | None = None,
    *,
    context: int = 4096,
    concurrency: int = 1,
    cache_dtype: str = "BF16",
    headroom: float = HEADROOM,
    objective: Objective = "latency",
    full_window: bool = False,
) -> Plan:
    """Lays the model out on the cluster, by `mesh` or, without one, by the best that fits for `objective`.

    Raises `Refused` when the wish itself is impossible: sizes that do not divide, or more ranks than devices.
    `full_window`: windowed layers keep the whole context, as the engine does today.
    """
    planner = _Planner(spec, stored, cluster, context, concurrency, cache_dtype, headroom, full_window)
    if mesh is not None:
        refuse_impossible(spec, mesh)
        _refuse_too_many(mesh, cluster)
    chosen = mesh or planner.best(objective) or planner.largest_layout()
    ranks = planner.ranks(chosen)
    fits = max(rank.total for rank in ranks) <= planner.usable_bytes
    needed = planner.fewest_devices()
    binding, reason = planner.binding(chosen, ranks)
    nearest = None if fits else planner.best("devices") or needed
    return Plan(
        mesh=chosen,
        cluster=cluster,
        totals=totals(spec, stored, cache_dtype),
        ranks=ranks,
        context=context,
        concurrency=concurrency,
        usable_bytes=planner.usable_bytes,
        fits=fits,
        binding=binding,
        binding_reason=reason,
        devices_needed=needed.world_size if needed else None,
        nearest=nearest,
        findings=() if fits else (planner.does_not_fit(chosen, ranks, nearest),),
    )


def _refuse_too_many(mesh: Mesh, cluster: Cluster) -> None:
    if mesh.world_size > cluster.count:
        raise Refused(
            fatal(
                "does-not-fit",
                f"the mesh {mesh.describe()} has {mesh.world_size} ranks, the cluster {cluster.describe()} "
                f"{cluster.count} devices",
                expected=f"at most {cluster.count} ranks",
                found=f"{mesh.world_size} ranks",
                next="make the mesh smaller or the cluster larger",
            )
        )


class _Planner:
    """Sizes of layouts of one model on one kind of cluster; shapes are computed once per distinct parameter shape."""

    def __init__(
        self,
        spec: ModelSpec,
        stored: StoredFormat,
        cluster: Cluster,
        context: int,
        concurrency: int,
        cache_dtype: str,
        headroom: float,
        full_window: bool,
    ) -> None:
        self.spec, self.stored, self.cluster = spec, stored, cluster
        self.context, self.concurrency = context, concurrency
        self.element = DTYPE_BITS[cache_dtype] // 8
        self.full_window = full_window
        self.usable_bytes = int(cluster.device.memory_bytes * (1 - headroom))
        self.places = placements(spec)
        self.groups = _alike(spec)

    def ranks(self, mesh: Mesh, concurrency: int | None = None) -> tuple[RankBytes, ...]:
        """Every rank of the layout; ranks that hold the same are computed once."""
        cuts = stages(self.spec, mesh.pp)
        sequences = -(-(self.concurrency if concurrency is None else concurrency) // mesh.dp)
        seen: dict[tuple[int, int, int], dict[str, int]] = {}
        found = []
        for rank in range(mesh.world_size):
            at = mesh.coordinates(rank)
            key = (at.pp, at.ep, at.tp)
            if key not in seen:
                seen[key] = self._weights(mesh, at, cuts[at.pp])
            cache, state = self._cache(mesh, cuts[at.pp])
            found.append(
                RankBytes(
                    rank=rank,
                    at=at,
                    layers=cuts[at.pp],
                    weights=seen[key],
                    cache=cache * sequences,
                    state=state * sequences,
                )
            )
        return tuple(found)

    def _weights(self, mesh: Mesh, at: Coordinates, cut: tuple[int, int]) -> dict[str, int]:
        by_role: dict[str, int] = {}
        for param, counts in self.groups:
            if param.name == "head.weight" and self.spec.tied_head and cut[0] == 0:
                continue
            held = sum(
                count for layer, count in counts.items() if on_stage(_at(param, layer), cut, self.spec.num_layers)
            )
            local = localize(param.shape, _without_expert(param), mesh, at)
            assert local is not None
            if param.expert is not None:
                held //= mesh.ep
            if held:
                by_role[param.role] = by_role.get(param.role, 0) + held * self.stored.nbytes(param, local.shape)
        return by_role

    def _cache(self, mesh: Mesh, cut: tuple[int, int]) -> tuple[int, int]:
        """Bytes of one sequence on a rank of this stage: what grows with the context, and what does not."""
        grows = stays = 0
        for layer in self.spec.layers[cut[0] : cut[1]]:
            cache = layer.mixer.cache()
            per_token = sum(tensor.local_heads(mesh.tp) * tensor.dim for tensor in cache.tensors) * self.element
            if cache.window is not None and not self.full_window:
                stays += per_token * min(cache.window, self.context)
            else:
                grows += per_token * self.context
            stays += cache.state_elements * 4 // mesh.tp
        return grows, stays

    def layouts(self, devices: int) -> Iterator[Mesh]:
        """Layouts of one replica over exactly `devices` ranks that the constraints allow; wide tp first, in a node."""
        widths = allowed(self.spec, "tp", devices, self.places)
        experts = allowed(self.spec, "ep", devices, self.places)
        per_node = max(self.cluster.per_node, 1)
        for tp in sorted((w for w in widths if devices % w == 0), key=lambda w: (w > per_node, -w)):
            for ep in (e for e in experts if (devices // tp) % e == 0):
                pp = devices // tp // ep
                if pp <= self.spec.num_layers:
                    yield Mesh(tp=tp, ep=ep, pp=pp)

    def fits(self, mesh: Mesh, concurrency: int | None = None) -> bool:
        return max(rank.total for rank in self.ranks(mesh, concurrency)) <= self.usable_bytes

    def best(self, objective: Objective) -> Mesh | None:
        """The layout for the objective that fits the cluster, or None.

        latency: one replica over as many devices as divide well. devices: the fewest. throughput: as many replicas as
        fit.
        """
        sizes = range(1, self.cluster.count + 1)
        for devices in sizes if objective != "latency" else reversed(sizes):
            for mesh in self.layouts(devices):
                if objective == "throughput":
                    mesh = msgspec.structs.replace(mesh, dp=self.cluster.count // devices)
                if self.fits(mesh):
                    return mesh
        return None

    def largest_layout(self) -> Mesh:
        """When nothing fits: the layout that spreads the weights thinnest."""
        return next(mesh for devices in range(self.cluster.count, 0, -1) for mesh in self.layouts(devices))

    def fewest_devices(self) -> Mesh | None:
        """The smallest layout of this kind of device with one sequence of the context; None if not even 4,096 do."""
        smallest = max(1, -(-self._least_bytes() // self.usable_bytes))
        for devices in range(smallest, 4097):
            for mesh in self.layouts(devices):
                if self.fits(mesh, concurrency=1):
                    return mesh
        return None

    def _least_bytes(self) -> int:
        """Weights once and one sequence: no layout gets by with less in all."""
        (alone,) = self.ranks(Mesh(), concurrency=1)
        tp = max(allowed(self.spec, "tp", 256, self.places))
        return alone.weight_bytes + min(alone.cache, alone.cache // tp)

    def binding(self, mesh: Mesh, ranks: Sequence[RankBytes]) -> tuple[str, str]:
        """Name and sentence of what limits the layout most."""
        worst = max(ranks, key=lambda rank: rank.total)
        share = worst.total / self.usable_bytes
        kind = "weights" if worst.weight_bytes >= worst.cache + worst.state else "cache"
        verb = "needs" if share > 1 else "takes"
        return (
            f"{kind}-memory",
            f"rank {worst.rank} {verb} {worst.total / 2**30:.2f} GiB ({worst.weight_bytes / 2**30:.2f} weights, "
            f"{(worst.cache + worst.state) / 2**30:.2f} cache) of {self.usable_bytes / 2**30:.2f} GiB usable, "
            f"{share:.0%}, on {mesh.describe()}",
        )

    def does_not_fit(self, mesh: Mesh, ranks: Sequence[RankBytes], nearest: Mesh | None) -> Finding:
        worst = max(ranks, key=lambda rank: rank.total)
        return fatal(
            "does-not-fit",
            f"{mesh.describe()} on {self.cluster.describe()}: {self.binding(mesh, ranks)[1]}",
            expected=f"at most {self.usable_bytes:,} bytes a device",
            found=f"{worst.total:,} bytes on rank {worst.rank}",
            next="no layout of this device fits"
            if nearest is None
            else f"nearest that fits: {nearest.describe()} on {nearest.world_size} x {self.cluster.device.name}",
        )


def _at(param: Param, layer: int) -> Param:
    return param if param.layer == layer else msgspec.structs.replace(param, layer=layer)


def _without_expert(param: Param) -> tuple[Shard | Vocab, ...]:
    return tuple(place for place in param.placements if not isinstance(place, Expert))


def _alike(spec: ModelSpec) -> list[tuple[Param, dict[int, int]]]:
    """Parameters of the same shape, role and placement counted per layer: thousands of experts become one row."""
    found: dict[tuple[object, ...], tuple[Param, dict[int, int]]] = {}
    for param in spec.parameters():
        name = param.name.rsplit(".", 2)[-2:] if param.name != "head.weight" else param.name
        key = (str(name), param.shape, param.role, _without_expert(param), param.dtype, param.expert is not None)
        _, counts = found.setdefault(key, (param, {}))
        counts[param.layer] = counts.get(param.layer, 0) + 1
    return list(found.values())
