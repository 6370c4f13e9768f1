"""Whether a model can be divided over a mesh: every violation at once, and the sizes each axis allows. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal
from firstlight.engine.model.foreign import ForeignSpec
from firstlight.engine.model.spec import ModelSpec
from firstlight.engine.parallel.census import census
from firstlight.engine.parallel.mesh import AXES, HEADS, Attention, Mesh, axis_of
from firstlight.engine.parallel.placement import Expert, Placement, Vocab
from firstlight.engine.parallel.rows import undivided


def placements(spec: ModelSpec) -> tuple[Placement, ...]:
    """Every distinct placement of the model's parameters; of experts, only the first expert's."""
    return tuple(dict.fromkeys(place for kind in census(spec) for place in kind.param.placements))


def allowed(
    spec: ModelSpec,
    axis: str,
    limit: int = 1024,
    places: tuple[Placement, ...] | None = None,
    attention: Attention = "divided",
) -> tuple[int, ...]:
    """Sizes of `axis`, up to `limit`, that every placement of the model allows."""
    if axis == "dp":
        return tuple(range(1, limit + 1))
    if axis == "pp":
        return tuple(range(1, min(limit, spec.most_stages) + 1))
    if axis == "sp":
        return (1,) if undivided(spec) else tuple(range(1, limit + 1))
    mine = _along(axis, placements(spec) if places is None else places, attention)
    if not mine:
        return (1,)
    units = [count for place in mine if (count := _units(place)) is not None]
    if not units:
        return (1,)
    common = math.gcd(*units)
    sizes = (size for size in range(1, min(common, limit) + 1) if common % size == 0)
    return tuple(size for size in sizes if all(place.refusal(size) is None for place in mine))


def _along(axis: str, places: tuple[Placement, ...], attention: Attention) -> list[Placement]:
    """The placements that are divided over `axis`."""
    return [place for place in places if axis_of(place.axis, attention) == axis]


def _units(place: Placement) -> int | None:
    """The count that the axis size must divide; None if any size is possible (padding or replication)."""
    if isinstance(place, Expert):
        return place.count
    return None if isinstance(place, Vocab) or place.replicate else place.units


def violations(spec: ModelSpec, mesh: Mesh) -> tuple[Finding, ...]:
    """Why the model cannot be laid out on the mesh; empty when it can."""
    return tuple(_violations(spec, mesh))


def _one_rank(spec: ForeignSpec, mesh: Mesh) -> Iterator[Finding]:
    if mesh.world_size > 1:
        yield fatal(
            "unsupported-axis",
            f"{spec.family} runs in the reference's own modules, which are not divided",
            expected="one rank",
            found=mesh.describe(),
            next="run it on one rank, or write a family file (engine/model/families)",
        )


def _violations(spec: ModelSpec, mesh: Mesh) -> Iterator[Finding]:
    if isinstance(spec, ForeignSpec):
        yield from _one_rank(spec, mesh)
        return
    places = placements(spec)
    if mesh.sp > 1 and (why := undivided(spec)):
        yield fatal(
            "unsupported-axis",
            f"a prompt of this model cannot be divided over sp ranks: {why}",
            expected="sp 1",
            found=f"sp {mesh.sp}",
            next=_instead_of_sp(spec, mesh, places),
        )
    if mesh.pp > (most := spec.most_stages):
        which = f"{spec.num_layers} layers"
        if most < spec.num_layers:
            which += f", of which {most} groups can be parted (a layer stays with those that attend to its keys),"
        yield fatal(
            "indivisible",
            f"{which} do not fill {mesh.pp} pipeline stages",
            expected=f"pp 1 to {most}",
            found=f"pp {mesh.pp}",
            next=f"use --pp {most} or less",
        )
    for axis in ("tp", "ep"):
        size = mesh.size(axis)
        mine = _along(axis, places, mesh.attention)
        if axis == "ep" and size > 1 and not mine:
            yield fatal(
                "unsupported-axis",
                "expert parallelism needs experts, and this model has none",
                expected="ep 1",
                found=f"ep {size}",
                next="use --tp or --pp",
            )
        reasons = dict.fromkeys(reason for place in mine if (reason := place.refusal(size)) is not None)
        if reasons:
            sizes = allowed(spec, axis, 256, places, mesh.attention)
            shown = ", ".join(map(str, sizes[:12])) + (", ..." if len(sizes) > 12 else "")
            yield fatal(
                "indivisible",
                f"{axis} {size} is not possible: {'; '.join(reasons)}",
                expected=f"{axis} in {shown}",
                found=f"{axis} {size}",
                next=_way_out(axis, size, sizes, spec) + _with_whole_mixers(axis, size, mine),
            )


def _instead_of_sp(spec: ModelSpec, mesh: Mesh, places: tuple[Placement, ...]) -> str:
    """The nearest possible mesh without sp, with the same number of ranks if there is one."""
    wanted = mesh.tp * mesh.sp
    tp = max((good for good in allowed(spec, "tp", wanted, places, mesh.attention) if wanted % good == 0), default=1)
    pp = min(mesh.pp * (wanted // tp), spec.most_stages)
    near = msgspec.structs.replace(mesh, sp=1, tp=tp, pp=pp)
    return "use " + (" ".join(f"--{axis} {near.size(axis)}" for axis in AXES if near.size(axis) > 1) or "one rank")


def _way_out(axis: str, size: int, sizes: tuple[int, ...], spec: ModelSpec) -> str:
    below = max((good for good in sizes if good < size), default=1)
    above = min((good for good in sizes if good > size), default=None)
    ways = [f"--{axis} {below}"] + ([f"--{axis} {above}"] if above else [])
    if (stages := min(size, spec.most_stages)) > 1:
        ways.append(f"--pp {stages} instead, by layers")
    return "use " + ", or ".join(ways)


def _with_whole_mixers(axis: str, size: int, places: list[Placement]) -> str:
    """Suggests `--attention whole` where only the mixers forbid the size."""
    if any(place.refusal(size) is not None for place in places if place.axis != HEADS):
        return ""
    return f", or --attention whole, with every head on each rank and the rest divided by {axis} {size}"


def impossible(spec: ModelSpec, mesh: Mesh, exchange: str) -> Iterator[Finding]:
    """Every violation; `exchange` is how tokens are asked to meet experts of other ranks."""
    yield from _violations(spec, mesh)
    yield from _no_exchange(spec, mesh, exchange)


def refuse_impossible(spec: ModelSpec, mesh: Mesh, exchange: str = "auto") -> None:
    """Raises `Refused` with every violation."""
    if found := tuple(impossible(spec, mesh, exchange)):
        raise Refused(found)


def _no_exchange(spec: ModelSpec, mesh: Mesh, exchange: str) -> Iterator[Finding]:
    if exchange != "all-to-all" or isinstance(spec, ForeignSpec):
        return
    why = undivided(spec) if mesh.ep > 1 else "the mesh has one ep rank"
    if why:
        yield fatal(
            "unsupported-axis",
            f"tokens cannot be sent to experts of other ranks: {why}",
            expected="--expert-exchange auto or reduce" if mesh.ep > 1 else "--ep of 2 or more",
            found="--expert-exchange all-to-all",
            next="leave --expert-exchange out",
        )
