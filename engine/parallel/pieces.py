"""What one rank holds (storages) and which slices of stored tensors it reads into them (pieces). No torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial

import msgspec

from firstlight.engine.model.spec import FIRST_STAGE, LAST_STAGE, ModelSpec, Param
from firstlight.engine.parallel.census import census
from firstlight.engine.parallel.kept import Kept, kept_packed, why_of_role
from firstlight.engine.parallel.mesh import Coordinates, Mesh
from firstlight.engine.parallel.placement import Expert, Local, localize
from firstlight.engine.weights.files.header import DTYPE_BITS
from firstlight.engine.weights.formats.grid import Packed, Packing
from firstlight.engine.weights.ledger import Ledger
from firstlight.engine.weights.source import Region, Source, region_of


class Storage(msgspec.Struct, frozen=True, kw_only=True):
    """One allocation on a rank; several parameters may lie in it one after another along dim 0 (dim 1 for experts)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str
    layer: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


class Piece(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A region of a stored tensor and its place: rows [row, row + shape[0]) of `storage`, or of `storage[expert]`.

    `shape` is the local shape after `transpose`; `region` counts in the stored tensor, or in the weight that it is the
    first tensor of, where it is `packed`. Such a weight is unpacked, or with a `packing` held so: then the piece is one
    of the tensors that it is held as, by `role`.
    """

    param: str
    tensor: str
    region: Region
    transpose: bool
    storage: str
    expert: int | None
    row: int
    shape: tuple[int, ...]
    packed: Packed | None = None
    role: str = ""
    packing: Packing | None = None

    @property
    def roles(self) -> tuple[str, ...]:
        """The parts of a packed weight that the piece is made of, in their order: one where it stays packed."""
        parts = () if self.packed is None else self.packed.format.parts
        return tuple(part.role for part in parts if self.packing is None or part.role == self.role)

    @property
    def roles_beside(self) -> tuple[str, ...]:
        """Parts of a weight that stays packed that are read with its codes and not held, its shape for one."""
        if self.packed is None or self.packing is None or self.role != "codes":
            return ()
        return tuple(part.role for part in self.packed.format.parts if part.role not in self.packing.roles)


class RankPieces(msgspec.Struct, frozen=True, kw_only=True):
    """All storages of a rank in forward order and, with a ledger, the pieces that fill them.

    `packings`: storages that hold codes of weights that stay packed -> how operators multiply by them. `unpacked`:
    parameters that are stored packed and do not stay so -> why.
    """

    rank: int
    at: Coordinates
    layers: tuple[int, int]
    storages: tuple[Storage, ...]
    pieces: tuple[Piece, ...]
    tied_head: bool
    dtype: str  # of the run: what storages have unless the architecture pins another
    packings: Mapping[str, Packing] = {}
    unpacked: Mapping[str, str] = {}

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes for storage in self.storages)

    def bytes_by_role(self) -> dict[str, int]:
        totals: dict[str, int] = {}
        for storage in self.storages:
            totals[storage.role] = totals.get(storage.role, 0) + storage.nbytes
        return totals


@lru_cache(maxsize=32)
def layer_elements(spec: ModelSpec) -> tuple[int, ...]:
    """Parameters per layer; what stands before the first and behind the last counts with these."""
    weight = [0] * spec.num_layers
    for kind in census(spec):
        for layer in kind.layers:
            weight[min(max(layer, 0), spec.num_layers - 1)] += kind.param.elements * kind.count
    return tuple(weight)


@lru_cache(maxsize=256)
def stages(spec: ModelSpec, pp: int) -> tuple[tuple[int, int], ...]:
    """Pipeline cuts [start, stop) by layer: the largest stage holds as few parameters as possible, none is empty."""
    runs, elements = spec.together(), layer_elements(spec)
    assert 1 <= pp <= len(runs)
    cuts = _cut([sum(elements[start:stop]) for start, stop in runs], pp)
    return tuple((runs[start][0], runs[stop - 1][1]) for start, stop in cuts)


def _cut(weight: Sequence[int], pp: int) -> tuple[tuple[int, int], ...]:
    low, high = max(weight), sum(weight)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_pack(weight, middle)) <= pp else (middle + 1, high)
    cuts = _pack(weight, low)
    while len(cuts) < pp:  # stages left over: halve the longest
        longest = max(range(len(cuts)), key=lambda index: cuts[index][1] - cuts[index][0])
        start, stop = cuts[longest]
        cuts[longest : longest + 1] = [(start, (start + stop) // 2), ((start + stop) // 2, stop)]
    return tuple(cuts)


def _pack(weight: Sequence[int], limit: int) -> list[tuple[int, int]]:
    cuts, start, load = [], 0, 0
    for index, size in enumerate(weight):
        if load + size > limit and index > start:
            cuts.append((start, index))
            start, load = index, 0
        load += size
    return [*cuts, (start, len(weight))]


def on_stage(param: Param, cut: tuple[int, int], num_layers: int) -> bool:
    """Whether a parameter belongs to the pipeline stage that runs layers [cut)."""
    if param.layer == FIRST_STAGE:
        return cut[0] == 0
    if param.layer == LAST_STAGE:
        return cut[1] == num_layers
    return cut[0] <= param.layer < cut[1]


def rank_pieces(
    spec: ModelSpec,
    mesh: Mesh,
    rank: int,
    dtype: str,
    ledger: Ledger | None = None,
    keep_packed: Collection[str] = (),
    kinds: Collection[str] | None = None,
) -> RankPieces:
    """What `rank` holds in `dtype` and, with a ledger, what it reads. A tied head shares the embedding if both are.

    `keep_packed`: roles of weights that stay as they are stored where an operator multiplies by them so (see `kept`),
    linear layers in these `kinds` of codes alone.
    """
    at = mesh.coordinates(rank)
    cut = stages(spec, mesh.pp)[at.pp]
    tied = _is_tied(spec, ledger)
    held = [one for one in _held(spec, mesh, at, cut) if one[0].name != "head.weight" or not tied or cut[0] != 0]
    filled = held if ledger is not None else []
    sources = ledger.sources_of([param.name for param, _ in filled]) if ledger is not None else []
    kept, hindered = kept_packed(filled, sources, keep_packed, kinds) if keep_packed else ({}, {})
    laid_out = [one for param, local in held for one in _as_kept(kept.get(param.name), param, local)]
    storages, offsets = _storages(laid_out, dtype)
    pieces: list[Piece] = []
    unpacked: dict[str, str] = {}
    cut_of = cache(region_of)  # most are cut like many others
    for (param, local), source in zip(filled, sources, strict=True):
        if param.name in kept:
            pieces += (_kept_piece(one, mesh, offsets[one.param.name]) for one in kept[param.name])
        else:
            if source.packed is not None:
                unpacked[param.name] = hindered.get(param.name) or why_of_role(param, keep_packed)
            region = cut_of(source.region, source.transpose, local.bounds)
            pieces.append(_piece(param, local, mesh, offsets[param.name], source, region))
    return RankPieces(
        rank=rank,
        at=at,
        layers=cut,
        storages=storages,
        pieces=tuple(pieces),
        tied_head=tied and cut == (0, spec.num_layers),
        dtype=dtype,
        packings={one.param.home: one.packing for parts in kept.values() for one in parts if one.role == "codes"},
        unpacked=unpacked,
    )


def _held(spec: ModelSpec, mesh: Mesh, at: Coordinates, cut: tuple[int, int]) -> Iterator[tuple[Param, Local]]:
    """Parameters that a rank has a part of, in forward order, and that part."""
    local_of, num_layers = cache(partial(localize, mesh=mesh, at=at)), spec.num_layers  # most are cut like many others
    for param in spec.parameters(share=(at.ep, mesh.ep)):  # the experts of other ranks may be hundreds of thousands
        if not on_stage(param, cut, num_layers):
            continue
        owner, *cuts = param.placements or (None,)
        if isinstance(owner, Expert):
            local = local_of(param.shape, tuple(cuts)) if owner.owner(mesh.ep) == at.ep else None
        else:
            local = local_of(param.shape, param.placements)
        if local is not None:
            yield param, local


def _is_tied(spec: ModelSpec, ledger: Ledger | None) -> bool:
    if ledger is None:
        return spec.tied_head
    source = ledger.sources.get("head.weight")
    return source is not None and source.tied


def _storages(held: Iterable[tuple[Param, Local]], dtype: str) -> tuple[tuple[Storage, ...], dict[str, int]]:
    """Lays parameters out; returns the storages and the first row of each parameter in its own."""
    shapes: dict[str, list[int]] = {}
    experts: dict[str, set[int]] = {}
    first: dict[str, Param] = {}
    rows: dict[tuple[str, int | None], int] = {}
    offsets: dict[str, int] = {}
    for param, local in held:
        home = param.home
        first.setdefault(home, param)
        row = rows.get((home, param.expert), 0)
        offsets[param.name] = row
        rows[home, param.expert] = row + (local.shape[0] if local.shape else 1)
        shapes.setdefault(home, list(local.shape))[:1] = [rows[home, param.expert]]
        if param.expert is not None:
            experts.setdefault(home, set()).add(param.expert)
    storages = tuple(
        Storage(
            name=home,
            shape=(len(experts[home]), *shape) if home in experts else tuple(shape),
            dtype=first[home].dtype or dtype,
            role=first[home].role,
            layer=first[home].layer,
        )
        for home, shape in shapes.items()
    )
    return storages, offsets


def _as_kept(kept: Sequence[Kept] | None, param: Param, local: Local) -> Iterable[tuple[Param, Local]]:
    """A parameter as it is laid out: itself, or what takes its place."""
    return ((param, local),) if kept is None else ((one.param, one.local) for one in kept)


def _kept_piece(kept: Kept, mesh: Mesh, row: int) -> Piece:
    return Piece(
        param=kept.param.name,
        tensor=kept.tensor,
        region=kept.region,
        transpose=False,
        storage=kept.param.home,
        expert=_local_expert(kept.param, mesh),
        row=row,
        shape=kept.local.shape,
        packed=kept.packed,
        role=kept.role,
        packing=kept.packing,
    )


def _local_expert(param: Param, mesh: Mesh) -> int | None:
    owner = next((place for place in param.placements if isinstance(place, Expert)), None)
    return None if owner is None else owner.local_index(mesh.ep)


def _piece(param: Param, local: Local, mesh: Mesh, row: int, source: Source, region: Region) -> Piece:
    return Piece(
        param=param.name,
        tensor=source.tensor,
        region=region,
        transpose=source.transpose,
        storage=param.home,
        expert=_local_expert(param, mesh),
        row=row,
        shape=tuple(stop - start for start, stop in local.bounds),
        packed=source.packed,
    )
