"""The mesh of ranks: five named axes, rank <-> coordinates, and groups, as pure data. No torch.

Placements may name a sixth axis that follows from the others: `HEADS`, over which attention and every other token mixer
is divided. It is tp, or one rank where the user wants mixers whole.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal

Axis = Literal["dp", "pp", "ep", "sp", "tp"]
AXES: tuple[Axis, ...] = ("dp", "pp", "ep", "sp", "tp")  # outermost first: neighbours in tp are neighbours in rank
HEADS = "heads"
Attention = Literal["divided", "whole"]
"""What tp does with attention and every other mixer of tokens: divide its heads, or leave it whole on every rank.

Where it is whole, tp divides feed-forward, experts, embedding and head: any number of heads will do, every rank caches
all of them, and nothing is summed behind a mixer.
"""
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)


def axis_of(placed: str, attention: Attention) -> str | None:
    """The mesh axis that a placement's axis maps to; None: not divided."""
    if placed != HEADS:
        return placed
    return "tp" if attention == "divided" else None


class Groups(msgspec.Struct, frozen=True, kw_only=True):
    """User-defined groups of ranks: `parts` are disjoint and may omit ranks."""

    name: str
    parts: tuple[tuple[int, ...], ...]


class Mesh(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the five axes; `world_size` is their product.

    dp: replicas, each serving its own requests. pp: pipeline stages by layer. ep: experts are divided; tokens of small
    steps are not: every ep rank sees them all, adds its own experts' share, and the sum is reduced; those of large ones
    are, and travel to the experts they chose (`engine/parallel/rows.py`). sp: the tokens of prefill are divided, keys
    and values gathered; weights and caches are whole on every rank. tp: attention heads, feed-forward width and
    vocabulary; without the first where `attention` is whole. `named`: groups of ranks of the user's own, each of which
    gets a `Comm` (`Comms.named`) and is pinged. Ranks count with tp fastest, then sp, ep, pp, dp.
    """

    dp: int = 1
    pp: int = 1
    ep: int = 1
    sp: int = 1
    tp: int = 1
    attention: Attention = "divided"
    named: tuple[Groups, ...] = ()

    def __post_init__(self) -> None:
        for axis in AXES:
            if self.size(axis) < 1:
                raise Refused(
                    fatal(
                        "usage",
                        f"axis {axis} must be at least 1",
                        expected=">= 1",
                        found=str(self.size(axis)),
                        next=f"drop --{axis} or give a positive number",
                    )
                )
        if self.attention not in ATTENTIONS:
            raise Refused(
                fatal(
                    "usage",
                    f"attention cannot be {self.attention!r}",
                    expected=" or ".join(ATTENTIONS),
                    found=str(self.attention),
                    next="--attention whole keeps it whole on every rank of tp; leave it out to divide its heads",
                )
            )
        for one in self.named:
            self._check_named(one)

    def _check_named(self, one: Groups) -> None:
        ranks = [rank for part in one.parts for rank in part]
        wrong = ""
        if (
            one.name in (*AXES, HEADS, "world", "control", "rows")
            or [other.name for other in self.named].count(one.name) > 1
        ):
            wrong = f"the name {one.name!r} is taken"
        elif not ranks or not all(one.parts):
            wrong = "a part without ranks"
        elif len(set(ranks)) < len(ranks):
            wrong = "a rank that is in two parts, or twice in one"
        elif not 0 <= min(ranks) <= max(ranks) < self.world_size:
            wrong = f"rank {max(ranks) if min(ranks) >= 0 else min(ranks)}"
        if wrong:
            raise Refused(
                fatal(
                    "usage",
                    f"the groups {one.name!r} cannot be made on {self.describe()}",
                    expected=f"a name of their own, and disjoint parts of ranks 0 to {self.world_size - 1}",
                    found=wrong,
                    next="correct the groups",
                )
            )

    def size(self, axis: str) -> int:
        """Ranks along an axis, also along `HEADS`."""
        real = axis_of(axis, self.attention)
        return 1 if real is None else int(getattr(self, real))

    def index(self, axis: str, at: Coordinates) -> int:
        """The position of `at` on an axis, also on `HEADS`."""
        real = axis_of(axis, self.attention)
        return 0 if real is None else at.on(real)

    @property
    def world_size(self) -> int:
        return math.prod(self.size(axis) for axis in AXES)

    def coordinates(self, rank: int) -> Coordinates:
        """The coordinates of a rank."""
        assert 0 <= rank < self.world_size, f"rank {rank} is outside a world of {self.world_size}"
        values: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, values[axis] = divmod(rank, self.size(axis))
        return Coordinates(**values)

    def rank(self, coordinates: Coordinates) -> int:
        """The rank at these coordinates; inverse of `coordinates`."""
        rank = 0
        for axis in AXES:
            rank = rank * self.size(axis) + coordinates.on(axis)
        return rank

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that differ only along `axes`, each in rank order; together they cover the world."""
        fixed = [axis for axis in AXES if axis not in axes]
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            where = self.coordinates(rank)
            groups.setdefault(tuple(where.on(axis) for axis in fixed), []).append(rank)
        return tuple(tuple(ranks) for ranks in groups.values())

    def nodes_of(self, axis: str, per_node: int) -> int:
        """How many nodes (of `per_node` devices) the ranks along `axis` span; 1: they communicate within a node."""
        inner = AXES[AXES.index(axis) :]
        return -(-math.prod(self.size(one) for one in inner) // per_node)

    def describe(self) -> str:
        """Axes larger than one, e.g. `pp 2 x tp 2`, or `1 rank`; whether tp leaves attention whole."""
        parts = [f"{axis} {self.size(axis)}" for axis in AXES if self.size(axis) > 1]
        whole = ", attention whole" if self.size(HEADS) < self.tp else ""
        return (" x ".join(parts) or "1 rank") + whole


class Coordinates(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's position on each axis."""

    dp: int = 0
    pp: int = 0
    ep: int = 0
    sp: int = 0
    tp: int = 0

    def on(self, axis: str) -> int:
        return int(getattr(self, axis))
