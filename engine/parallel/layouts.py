"""Memory of every possible layout of a model on one kind of device, and the search for one that fits. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Literal

import msgspec

from firstlight.engine.model.spec import FIRST_STAGE, LAST_STAGE, ModelSpec
from firstlight.engine.parallel.census import Kind, census_by
from firstlight.engine.parallel.constraints import allowed, placements
from firstlight.engine.parallel.hardware import Cluster
from firstlight.engine.parallel.mesh import HEADS, Attention, Coordinates, Mesh
from firstlight.engine.parallel.pieces import stages
from firstlight.engine.parallel.placement import localize
from firstlight.engine.weights.formats.registry import StoredFormat

Objective = Literal["latency", "throughput", "devices"]
MOST_DEVICES = 4096  # of one replica that the search for the fewest looks at
MOST_CLUSTER = 1 << 16  # devices of all replicas
Shape = tuple[int, int, int]  # tp, ep, pp of one replica


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


class Layouts:
    """Memory per rank of every layout, computed once per (tp, ep) and layer and summed over pipeline stages.

    Weights are counted with the same `localize` and `stages` that the loader uses. The tp ranks of a stage differ only
    where quantization blocks are cut. `attention` is the same for all layouts: the user chooses it, not the search.
    """

    def __init__(
        self,
        spec: ModelSpec,
        stored: StoredFormat,
        cluster: Cluster,
        usable_bytes: int,
        context: int,
        element_bytes: int,
        full_window: bool,
        attention: Attention = "divided",
    ) -> None:
        self.spec, self.stored, self.cluster = spec, stored, cluster
        self.usable_bytes, self.context = usable_bytes, context
        self.element_bytes, self.full_window, self.attention = element_bytes, full_window, attention
        self.kinds = census_by(spec, stored.layer_key)
        most = max(cluster.count, MOST_DEVICES)
        places = placements(spec)
        self.widths = allowed(spec, "tp", most, places, attention)
        self.experts = allowed(spec, "ep", most, places)
        self._weights: dict[tuple[int, int, int], list[dict[str, int]]] = {}
        self._roles: dict[tuple[int, int], dict[str, int]] = {}
        self._sums: dict[tuple[int, int], list[list[int]]] = {}
        self._caches: dict[int, list[tuple[int, int]]] = {}
        self._cache_sums: dict[int, list[int]] = {}
        self._cuts: dict[int, tuple[tuple[int, int], ...]] = {}
        self._shapes = self._all_shapes(most)

    def ranks(self, mesh: Mesh, concurrency: int) -> tuple[RankBytes, ...]:
        """Every rank of the layout."""
        sequences = -(-concurrency // mesh.dp)
        seen: dict[tuple[int, int], tuple[dict[str, int], int, int]] = {}
        found = []
        for rank in range(mesh.world_size):
            at = mesh.coordinates(rank)
            cut = self.cuts(mesh.pp)[at.pp]
            if (at.pp, at.tp) not in seen:
                caches = self._cache(mesh.tp)[cut[0] : cut[1]]
                weights = self._stage_weights(mesh, at, cut)
                seen[at.pp, at.tp] = weights, sum(grows for grows, _ in caches), sum(stays for _, stays in caches)
            weights, cache, state = seen[at.pp, at.tp]
            found.append(
                RankBytes(
                    rank=rank, at=at, layers=cut, weights=weights, cache=cache * sequences, state=state * sequences
                )
            )
        return tuple(found)

    def largest(self, shape: Shape, sequences: int) -> int:
        """Bytes of the fullest rank of a replica with `sequences` sequences; equals the maximum over `ranks`."""
        tp, ep, pp = shape
        if tp not in self._cache_sums:
            self._cache_sums[tp] = [0, *accumulate(grows + stays for grows, stays in self._cache(tp))]
        caches = self._cache_sums[tp]
        most = 0
        for sums in self._layer_sums(tp, ep):
            for start, stop in self.cuts(pp):
                weights = sums[stop] - sums[start]
                if stop == self.spec.num_layers and start == 0 and self.spec.tied_head:
                    weights -= self._head(tp)
                most = max(most, weights + sequences * (caches[stop] - caches[start]))
        return most

    def read_weights(self, tp: int, ep: int) -> dict[str, int]:
        """Weight bytes by role, summed over one rank of every stage."""
        if (tp, ep) not in self._roles:
            by_role: dict[str, int] = {}
            for layer in self._by_layer(tp, ep, 0):
                for role, nbytes in layer.items():
                    by_role[role] = by_role.get(role, 0) + nbytes
            self._roles[tp, ep] = by_role
        return self._roles[tp, ep]

    def cache_bytes(self, tp: int) -> int:
        """Cache bytes of one sequence of the context, summed over one rank of every stage."""
        return sum(grows + stays for grows, stays in self._cache(tp))

    def shallowest(self, tp: int, ep: int, sequences: int, devices: int | None = None) -> int | None:
        """The fewest pipeline stages with which tp x ep has room for `sequences` sequences; None if there are none."""
        most = self.cluster.count if devices is None else devices
        for pp in range(1, min(self.spec.most_stages, most // (tp * ep)) + 1):
            if self.largest((tp, ep, pp), sequences) <= self.usable_bytes:
                return pp
        return None

    def most_sequences(self, shape: Shape, limit: int) -> int:
        """How many sequences, up to `limit`, a replica has room for; 0 if the weights alone do not fit."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.largest(shape, middle) <= self.usable_bytes else (low, middle - 1)
        return low if self.largest(shape, low) <= self.usable_bytes else 0

    def cuts(self, pp: int) -> tuple[tuple[int, int], ...]:
        if pp not in self._cuts:
            self._cuts[pp] = stages(self.spec, pp)
        return self._cuts[pp]

    def _layer_sums(self, tp: int, ep: int) -> list[list[int]]:
        """Cumulative weight bytes before each layer, for every tp rank that differs from the others."""
        if (tp, ep) not in self._sums:
            indices = range(tp) if self.cut_blocks(tp) else (0,)
            self._sums[tp, ep] = [
                [0, *accumulate(sum(layer.values()) for layer in self._by_layer(tp, ep, index))] for index in indices
            ]
        return self._sums[tp, ep]

    def _stage_weights(self, mesh: Mesh, at: Coordinates, cut: tuple[int, int]) -> dict[str, int]:
        by_role: dict[str, int] = {}
        index = at.tp if self.cut_blocks(mesh.tp) else 0
        for layer in self._by_layer(mesh.tp, mesh.ep, index)[cut[0] : cut[1]]:
            for role, nbytes in layer.items():
                by_role[role] = by_role.get(role, 0) + nbytes
        if self.spec.tied_head and cut == (0, self.spec.num_layers):
            by_role["head"] -= self._head(mesh.tp)
        return {role: nbytes for role, nbytes in by_role.items() if nbytes}

    def _by_layer(self, tp: int, ep: int, index: int) -> list[dict[str, int]]:
        """Weight bytes of each layer by role on tp rank `index`; embedding and head count with the ends."""
        if (tp, ep, index) not in self._weights:
            layers: list[dict[str, int]] = [{} for _ in self.spec.layers]
            for kind in self.kinds:
                count = kind.count if kind.param.expert is None else kind.count // ep
                nbytes = count * self._bytes(kind, tp, index)
                for layer in kind.layers:
                    slot = layers[{FIRST_STAGE: 0, LAST_STAGE: -1}.get(layer, layer)]
                    slot[kind.param.role] = slot.get(kind.param.role, 0) + nbytes
            self._weights[tp, ep, index] = layers
        return self._weights[tp, ep, index]

    def _bytes(self, kind: Kind, tp: int, index: int) -> int:
        local = localize(kind.param.shape, kind.placements, self.mesh((tp, 1, 1)), Coordinates(tp=index))
        assert local is not None
        return self.stored.nbytes(kind.param, local.shape, tuple(start for start, _ in local.bounds))

    def _head(self, tp: int) -> int:
        """Bytes of a tied output head, which is not stored twice."""
        return sum(self._bytes(kind, tp, 0) for kind in self.kinds if kind.param.name == "head.weight")

    def cut_blocks(self, tp: int) -> list[Kind]:
        """Kinds of parameters whose quantization blocks are cut by tp."""
        return [kind for kind, shape in self._divided(tp) if not self.stored.is_even(kind.param, shape)]

    def kept_whole(self, tp: int) -> list[Kind]:
        """Kinds of parameters that tp divides, but of whose scales every rank needs all."""
        return [kind for kind, shape in self._divided(tp) if self.stored.keeps_all(kind.param, shape)]

    def _divided(self, tp: int) -> Iterator[tuple[Kind, tuple[int, ...]]]:
        """Kinds of parameters with the shape of a shard of each."""
        mesh = self.mesh((tp, 1, 1))
        for kind in self.kinds if tp > 1 else ():
            local = localize(kind.param.shape, kind.placements, mesh, Coordinates(tp=min(1, tp - 1)))
            assert local is not None
            yield kind, local.shape

    def _cache(self, tp: int) -> list[tuple[int, int]]:
        """Cache bytes of one sequence on a rank, per layer: (growing with the context, constant)."""
        if tp not in self._caches:
            self._caches[tp] = [self._layer_cache(index, tp) for index in range(self.spec.num_layers)]
        return self._caches[tp]

    def _layer_cache(self, index: int, tp: int) -> tuple[int, int]:
        cache = self.spec.layers[index].cache()
        heads = self.mesh((tp, 1, 1)).size(HEADS)
        grows, windows = cache.elements(self.context, heads, self.full_window)
        return grows * self.element_bytes, windows * self.element_bytes + cache.state_bytes(self.element_bytes, heads)

    def _all_shapes(self, most: int) -> dict[int, list[Shape]]:
        """Allowed shapes of one replica by number of devices; the widest tp within a node first."""
        found: dict[int, list[Shape]] = {}
        for tp in sorted(self.widths, key=lambda width: (width > max(self.cluster.per_node, 1), -width)):
            for ep in self.experts:
                for pp in range(1, min(self.spec.most_stages, most // (tp * ep)) + 1):
                    found.setdefault(tp * ep * pp, []).append((tp, ep, pp))
        return dict(sorted(found.items()))

    def best(self, objective: Objective, concurrency: int) -> Mesh | None:
        """The layout for the objective that fits the cluster, or None; for hardware whose facts allow no time estimate.

        latency: one replica over as many devices as possible. devices: the fewest. throughput: as many replicas as fit,
        preferring fewer replicas to idle devices.
        """
        count = self.cluster.count
        sizes = [devices for devices in self._shapes if devices <= count]
        if objective == "latency":
            sizes.reverse()
        elif objective == "throughput":
            sizes.sort(key=lambda devices: (count % devices, devices))
        for devices in sizes:
            dp = count // devices if objective == "throughput" else 1
            if (shape := self._first(devices, -(-concurrency // dp))) is not None:
                return self.mesh(shape, dp)
        return None

    def nearest(self, wish: Mesh, concurrency: int) -> Mesh | None:
        """The layout nearest to `wish` that fits the cluster: its axes are the fewest doublings away; or None.

        Ties go to fewer devices. Replicas are those of the wish, or one.
        """
        found = (
            (_doublings(wish, mesh), mesh.world_size, mesh)
            for dp in dict.fromkeys((wish.dp, 1))
            for devices in (size for size in self._shapes if size * dp <= self.cluster.count)
            for mesh in (self.mesh(shape, dp) for shape in self._shapes[devices])
        )
        for _, _, mesh in sorted(found, key=lambda one: one[:2]):
            if self.largest((mesh.tp, mesh.ep, mesh.pp), -(-concurrency // mesh.dp)) <= self.usable_bytes:
                return mesh
        return None

    def thinnest(self) -> Mesh:
        """The layout with the most devices, for when nothing fits."""
        most = max(devices for devices in self._shapes if devices <= self.cluster.count)
        return self.mesh(self._shapes[most][0])

    def fewest(self) -> Mesh | None:
        """The smallest layout on this kind of device with room for one sequence of the context, or None."""
        if self.usable_bytes < 1:
            return None
        least = max(1, -(-self.largest((1, 1, 1), 1) // self.usable_bytes))  # no layout holds less in all
        for devices in (size for size in self._shapes if least <= size <= MOST_DEVICES):
            if (shape := self._first(devices, 1)) is not None:
                return self.mesh(shape)
        return None

    def fewest_for(self, sequences: int) -> Mesh | None:
        """The smallest layout, on a cluster of any size, with room for `sequences` sequences; or None."""
        found: list[tuple[int, Shape, int]] = []
        for tp in self.widths:
            for ep in (one for one in self.experts if tp * one <= MOST_DEVICES):
                least = self.shallowest(tp, ep, 1, MOST_DEVICES)
                for pp in sorted({least * times for times in (1, 2, 4)} if least else ()):
                    room = self.most_sequences((tp, ep, pp), sequences) if pp <= self.spec.most_stages else 0
                    if room:
                        dp = -(-sequences // room)
                        found.append((tp * ep * pp * dp, (tp, ep, pp), dp))
        if not found:
            return None
        devices, shape, dp = min(found)
        return self.mesh(shape, dp) if devices <= MOST_CLUSTER else None

    def _first(self, devices: int, sequences: int) -> Shape | None:
        fitting = (shape for shape in self._shapes[devices] if self.largest(shape, sequences) <= self.usable_bytes)
        return next(fitting, None)

    def mesh(self, shape: Shape, dp: int = 1) -> Mesh:
        """The mesh of `dp` replicas of a shape."""
        tp, ep, pp = shape
        return Mesh(dp=dp, tp=tp, ep=ep, pp=pp, attention=self.attention)


def _doublings(one: Mesh, other: Mesh) -> float:
    """How far two layouts are apart: the doublings of each axis, summed."""
    return sum(abs(math.log2(one.size(axis) / other.size(axis))) for axis in ("dp", "pp", "ep", "sp", "tp"))


def fullest(ranks: Sequence[RankBytes]) -> RankBytes:
    return max(ranks, key=lambda rank: rank.total)
