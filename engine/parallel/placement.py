"""How one parameter is divided over the mesh: placements as data, and the slice each rank gets. No torch."""

from __future__ import annotations

import msgspec

from firstlight.engine.parallel.mesh import HEADS, Coordinates, Mesh, axis_of


class Shard(msgspec.Struct, frozen=True, tag="shard"):
    """Dimension `dim` is cut into `units` equal units (heads, channels); each rank of `axis` takes consecutive units.

    With fewer units than ranks and `replicate`, each unit is held by `ranks / units` neighbouring ranks (KV heads).
    """

    dim: int
    units: int
    axis: str = "tp"
    replicate: bool = False
    unit_name: str = "units"

    def refusal(self, ranks: int) -> str | None:
        """Why this placement cannot be cut for `ranks`, or None."""
        if self.units % ranks == 0 or (self.replicate and ranks % self.units == 0):
            return None
        return f"{self.units} {self.unit_name} do not divide by {axis_of(self.axis, 'divided')} {ranks}"

    def bounds(self, size: int, index: int, ranks: int) -> tuple[int, int]:
        """[start, stop) along `dim` of extent `size` for rank `index` of `ranks`."""
        width = size // self.units
        if self.units >= ranks:
            per_rank = self.units // ranks
            return index * per_rank * width, (index + 1) * per_rank * width
        unit = index * self.units // ranks
        return unit * width, (unit + 1) * width


def over_heads(units: int, unit_name: str, replicate: bool = False) -> Shard:
    """Dimension 0 of a token mixer's parameter in `units` heads or channels: over tp, unless mixers are whole."""
    return Shard(0, units, axis=HEADS, replicate=replicate, unit_name=unit_name)


class Vocab(msgspec.Struct, frozen=True, tag="vocab"):
    """Dimension `dim` holds the vocabulary: every rank of `axis` owns ceil(V / ranks) rows, the last ones padded."""

    dim: int = 0
    axis: str = "tp"

    def refusal(self, ranks: int) -> str | None:
        return None

    def bounds(self, size: int, index: int, ranks: int) -> tuple[int, int]:
        """Rows of the vocabulary on the rank, without padding; the local extent is `padded(size, ranks)`."""
        per_rank = self.padded(size, ranks)
        return min(index * per_rank, size), min((index + 1) * per_rank, size)

    @staticmethod
    def padded(size: int, ranks: int) -> int:
        return -(-size // ranks)


class Expert(msgspec.Struct, frozen=True, tag="expert"):
    """The whole parameter belongs to expert `index` of `count`; the rank of `axis` that owns the expert holds it."""

    index: int
    count: int
    axis: str = "ep"

    def refusal(self, ranks: int) -> str | None:
        return None if self.count % ranks == 0 else f"{self.count} experts do not divide by {self.axis} {ranks}"

    def owner(self, ranks: int) -> int:
        return self.index // (self.count // ranks)

    def local_index(self, ranks: int) -> int:
        return self.index % (self.count // ranks)


Placement = Shard | Vocab | Expert  # a parameter without placements is replicated


class Local(msgspec.Struct, frozen=True):
    """A rank's part of a parameter: `bounds` per dim in global coordinates, `shape` allocated (padding included)."""

    bounds: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]


def localize(shape: tuple[int, ...], placements: tuple[Placement, ...], mesh: Mesh, at: Coordinates) -> Local | None:
    """The part of a parameter of global `shape` that the rank at `at` holds, or None when it holds nothing of it."""
    for placement in placements:  # most experts are another rank's
        if isinstance(placement, Expert) and placement.owner(mesh.size(placement.axis)) != at.on(placement.axis):
            return None
    bounds = [(0, size) for size in shape]
    local = list(shape)
    for placement in placements:
        if isinstance(placement, Expert):
            continue
        ranks, index, dim = mesh.size(placement.axis), mesh.index(placement.axis, at), placement.dim
        bounds[dim] = placement.bounds(shape[dim], index, ranks)
        if isinstance(placement, Vocab):
            local[dim] = placement.padded(shape[dim], ranks)
        else:
            local[dim] = bounds[dim][1] - bounds[dim][0]
    return Local(tuple(bounds), tuple(local))
