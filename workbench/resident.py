"""What quantized weights take once they are loaded: what operators multiply by stays packed, the rest is unpacked."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping
from types import MappingProxyType

from firstlight.engine.findings import Finding, note, warning
from firstlight.engine.model.spec import ModelSpec, Param
from firstlight.engine.parallel.census import census_by
from firstlight.engine.parallel.hardware import CPU
from firstlight.engine.parallel.kept import (
    Keep,
    Room,
    Share,
    Wish,
    held_bytes,
    settled,
    together,
    usually,
    wanted,
    way_of,
)
from firstlight.engine.parallel.layouts import Layouts, fullest
from firstlight.engine.parallel.mesh import Coordinates, Mesh
from firstlight.engine.parallel.pieces import rank_pieces
from firstlight.engine.parallel.placement import Expert, Local, localize
from firstlight.engine.parallel.plan import Plan, room_here
from firstlight.engine.weights.files.header import DTYPE_BITS
from firstlight.engine.weights.formats.grid import Format, Packing
from firstlight.engine.weights.formats.plain import Plain
from firstlight.engine.weights.formats.registry import StoredFormat
from firstlight.engine.weights.ledger import Ledger
from firstlight.kernels.packed.kinds import expected_faster

GPU = "cuda"
NAMES: Mapping[str, str] = MappingProxyType({"expert": "experts", "attention": "attention", "mlp": "dense layers"})


class Resident:
    """Sizes in memory of a rank's weights: what `parallel.kept` keeps packed as it is stored, the rest in `dtype`.

    `keep` says what may stay packed. What one rank of tp cannot keep is counted as unpacked on all; `why` says by role
    what keeps weights from staying packed.
    """

    def __init__(self, stored: StoredFormat, spec: ModelSpec, mesh: Mesh, keep: Keep) -> None:
        self._stored, self._plain = stored, Plain(spec.dtype)
        self._kept, self.why = _kept_homes(stored, spec, mesh, keep)

    def layer_key(self, layer: int) -> Hashable:
        return self._stored.layer_key(layer)

    def format_of(self, param: Param) -> Format | None:
        return self._stored.format_of(param) if self._is_kept(param) else None

    def is_even(self, param: Param, shape: tuple[int, ...]) -> bool:
        return not self._is_kept(param) or self._stored.is_even(param, shape)

    def keeps_all(self, param: Param, shape: tuple[int, ...]) -> bool:
        return self._is_kept(param) and self._stored.keeps_all(param, shape)

    def nbytes(self, param: Param, shape: tuple[int, ...], start: tuple[int, ...] | None = None) -> int:
        """Of what stays packed, codes and scales; what else is stored of it is read and left."""
        found = self.format_of(param)
        if found is None or not math.prod(shape):
            return self._plain.nbytes(param, shape, start)
        usual = {part.role: part.dtypes[0] for part in found.parts}
        return held_bytes(self._kept[param.home][1], usual, shape[0])

    @property
    def roles(self) -> tuple[str, ...]:
        """Of which some stay packed."""
        return tuple(sorted({role for role, _ in self._kept.values()}))

    def _is_kept(self, param: Param) -> bool:
        return len(param.shape) == 2 and param.home in self._kept and self._stored.format_of(param) is not None


def _kept_homes(
    stored: StoredFormat, spec: ModelSpec, mesh: Mesh, keep: Keep
) -> tuple[Mapping[str, tuple[str, Packing]], Mapping[str, tuple[str, ...]]]:
    """The homes of weights that every rank of tp keeps packed, with their role and how; by role, what hinders others.

    Layers alike stand for one another.
    """
    why: dict[str, dict[str, None]] = {}
    lost: set[str] = set()
    found: dict[str, tuple[str, Packing]] = {}
    params = [kind.param for kind in census_by(spec, stored.layer_key)]
    for index in range(mesh.tp):
        held = [(param, _local(param, mesh, index)) for param in params]
        for homes in together(held, keep.roles):
            ways = {home: (group[0][0].role, _way(stored, group, keep)) for home, group in homes.items()}
            found.update({home: (role, way) for home, (role, way) in ways.items() if isinstance(way, Packing)})
            if any(not isinstance(way, Packing) for _, way in ways.values()):
                lost.update(ways)
            for role, way in ways.values():
                if isinstance(way, str) and way:
                    why.setdefault(role, {})[way] = None
    kept = {home: how for home, how in found.items() if home not in lost}
    return kept, {role: tuple(words) for role, words in why.items()}


def _local(param: Param, mesh: Mesh, index: int) -> Local:
    """A rank's share of a parameter along tp, whoever holds it along the other axes."""
    placements = tuple(place for place in param.placements if not isinstance(place, Expert))
    local = localize(param.shape, placements, Mesh(tp=mesh.tp, attention=mesh.attention), Coordinates(tp=index))
    assert local is not None, param.name
    return local


def _way(stored: StoredFormat, group: list[tuple[Param, Local]], keep: Keep) -> Packing | str:
    """How the parameters of a home stay packed, or what keeps them from it; empty: they are stored plain."""
    shares = []
    for param, local in group:
        format_ = stored.format_of(param)
        if format_ is None:
            return ""
        dtypes = tuple(part.dtypes[0] for part in format_.parts)
        rows, columns = ((start, stop, 1) for start, stop in local.bounds)
        shares.append(Share(format_, dtypes, rows, columns, (param.shape[0], param.shape[1])))
    way = wanted(way_of([tuple(shares)]), group[0][0], keep.kinds)
    unlike = isinstance(way, str) and shares[0].format.hindrance(shares[0].dtypes[0])
    return f"{shares[0].format.describe()}: {way}" if unlike else way


def resident_finding(
    spec: ModelSpec, stored: StoredFormat, found: Plan, cache_dtype: str, full_window: bool
) -> tuple[int, Finding]:
    """Bytes of weights on the rank that has most of a plan once they are loaded, and what that means for it."""
    is_cpu = found.cluster.device.name == CPU
    keep = usually("auto", "cpu" if is_cpu else GPU, expected_faster(spec.dtype) if is_cpu else ())
    held = Resident(stored, spec, found.mesh, keep)
    element_bytes = DTYPE_BITS[cache_dtype] // 8
    layouts = Layouts(
        spec, held, found.cluster, found.usable_bytes, found.context, element_bytes, full_window, found.mesh.attention
    )
    ranks = layouts.ranks(found.mesh, found.concurrency)
    heaviest = max(rank.weight_bytes for rank in ranks)  # not always of the rank that is fullest with its cache
    fits = fullest(ranks).total <= found.usable_bytes
    kept = f"{_words(held.roles)} stay packed, the rest is unpacked" if held.roles else "they are unpacked"
    say = note if fits else warning
    return heaviest, say(
        "unpacked-weights",
        f"weights are counted as stored; when this engine loads them {kept} to {spec.dtype}"
        + ("" if fits else ", and then the largest rank does not fit")
        + _since(held.why),
        expected=f"{found.weight_bytes_per_device:,} bytes on the largest rank, as stored",
        found=f"{heaviest:,} bytes as loaded",
        next="nothing to do" if fits else "use more devices, or an engine that computes with packed weights",
    )


def kept_here(
    spec: ModelSpec, mesh: Mesh, ranks: Collection[int], dtype: str, ledger: Ledger, wish: Wish, device_type: str
) -> Keep:
    """What an engine would keep packed whose ranks, each on a machine like this one, are these.

    Without torch, which is imported while memory is being backed.
    """
    if all(source.packed is None for source in ledger.sources.values()):
        return usually(wish, device_type)
    faster = expected_faster(dtype) if wish == "auto" and device_type == "cpu" else ()

    def nbytes_of(keep: Keep) -> int:
        every = (rank_pieces(spec, mesh, rank, dtype, ledger, keep.roles, keep.kinds) for rank in ranks)
        return max(pieces.nbytes for pieces in every)

    return settled(wish, device_type, faster, nbytes_of, Room(room_here(1)))


def _words(roles: Collection[str]) -> str:
    return ", ".join(name for role, name in NAMES.items() if role in roles)


def _since(why: Mapping[str, tuple[str, ...]]) -> str:
    """What is unpacked, by name, and what of its format makes it so; roles with the same reasons together."""
    by_words: dict[tuple[str, ...], list[str]] = {}
    for role, words in why.items():
        by_words.setdefault(words, []).append(role)
    return "".join(f"; unpacked of {_words(roles)}: {' and '.join(words)}" for words, roles in by_words.items())
