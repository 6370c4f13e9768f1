"""Topology: the mesh as a grid of ranks, what each holds and is doing, the axes and what moves along them."""

from __future__ import annotations

from typing import Any

from firstlight.dashboards import html
from firstlight.dashboards.store import Snapshot
from firstlight.dashboards.views.communication import waits
from firstlight.dashboards.views.view import Page, column, mesh_of, not_yet, pane, put
from firstlight.engine.parallel.mesh import AXES, HEADS, Mesh
from firstlight.workbench.render import words

MOST_RANKS = 512
FEW_RANKS = 8
WHAT = {
    "dp": "replicas, each with its own requests",
    "pp": "pipeline stages, by layer",
    "ep": "experts",
    "sp": "sequence",
    "tp": "heads, channels and vocabulary",
}
BESIDE_WHOLE_HEADS = "channels and vocabulary; heads are whole on every rank"


class Topology:
    title = "Topology"

    def __init__(self, page: Page) -> None:
        self._all = pane()

    def panel(self) -> Any:
        return column(self._all)

    def draw(self, snapshot: Snapshot) -> None:
        mesh = mesh_of(snapshot)
        if mesh is None:
            put(
                self._all,
                html.page(not_yet(snapshot, "Topology", "up")),
            )
            return
        axes = [
            {"axis": axis, "size": mesh.size(axis), "divides": _divides(axis, mesh)}
            for axis in AXES
            if mesh.size(axis) > 1
        ]
        body = html.table(axes) if axes else html.nothing("one rank")
        parts = [html.card(f"Mesh: {mesh.describe()}", body), html.card("Ranks", _ranks(snapshot, mesh))]
        plan = snapshot.latest("plan")
        if plan is not None and plan.tables.get("communication_bytes_per_token"):
            parts.append(
                html.card("What moves for a token, planned", html.table(plan.tables["communication_bytes_per_token"]))
            )
        parts.append(_links(snapshot))
        put(self._all, html.page(*parts))


def _divides(axis: str, mesh: Mesh) -> str:
    return BESIDE_WHOLE_HEADS if axis == "tp" and mesh.size(HEADS) < mesh.tp else WHAT[axis]


def _ranks(snapshot: Snapshot, mesh: Mesh) -> str:
    """A tile a rank: coordinates, layers, weights, and what its process says it is doing."""
    plan = snapshot.latest("plan")
    planned = {row["rank"]: row for row in plan.tables.get("ranks", [])} if plan is not None else {}
    beats = {beat.rank: beat for beat in snapshot.health.ranks} if snapshot.health is not None else {}
    failure = snapshot.health.failure if snapshot.health is not None else None
    tiles: dict[str, list[str]] = {}  # by their place on every axis but the last
    axes = [axis for axis in AXES if mesh.size(axis) > 1]
    for rank in range(min(mesh.world_size, MOST_RANKS)):
        at = mesh.coordinates(rank)
        row, beat = planned.get(rank, {}), beats.get(rank)
        lines = [f"{axes[-1]} {at.on(axes[-1])}" if axes else "alone"]  # the other axes head its row
        if row:
            layers = str(row.get("layers"))
            held = f"layer {layers}" if layers.isdecimal() else f"layers {layers}"
            lines.append(f"{held}, {words.in_bytes(row.get('weight_bytes', 0))}")
        if beat is not None:
            lines.append(f"{beat.machine}, process {beat.pid}: {beat.phase or beat.stage}")
        bad = failure is not None and failure.rank == rank
        if bad and failure is not None:
            lines.append(f"{failure.phase}: {failure.reason}")
        body = "".join(f"<p class='quiet'>{html.with_units(line)}</p>" for line in lines)
        row_of = ", ".join(f"{axis} {at.on(axis)}" for axis in axes[:-1])
        tiles.setdefault(row_of, []).append(html.card(f"rank {rank}", body, "alarm" if bad else ""))
    more = html.nothing(f"and {mesh.world_size - MOST_RANKS:,} more") if mesh.world_size > MOST_RANKS else ""
    in_row = mesh.size(axes[-1]) if axes else 1
    kind = _grid(mesh.world_size, in_row)
    rows = (
        f'<div style="--row:{in_row}">'
        + (f"<h3>{html.said(name)}</h3>" if name else "")
        + f'<div class="{kind}">{"".join(found)}</div></div>'
        for name, found in tiles.items()
    )
    return f'<div class="{_groups(mesh.world_size, in_row)}">{"".join(rows)}</div>{more}'


def _grid(ranks: int, in_row: int) -> str:
    """Class names of a grid: many ranks get small tiles, and rows of eight are not broken at five."""
    return "grid ranks" + " many" * (ranks > FEW_RANKS) + " eights" * (in_row % 8 == 0)


def _groups(ranks: int, in_row: int) -> str:
    """Class names of what holds the rows: many short ones stand side by side."""
    return "rows" * (ranks > FEW_RANKS and in_row < FEW_RANKS)


def _links(snapshot: Snapshot) -> str:
    """Axes with what their collectives really reached, as the last profile saw it."""
    profile = snapshot.latest("profile")
    calls = (
        [row for row in profile.tables.get("timeline", []) if row["kind"] == "collective"]
        if profile is not None
        else []
    )
    found: dict[str, dict[str, Any]] = {}
    for row in calls:
        if waits(row["name"]):
            continue
        best = row["moved_bytes"] / row["duration_ms"] * 1e3 if row["duration_ms"] else 0.0
        known = found.setdefault(
            row["name"], {"link": row["name"], "calls": 0, "largest_bytes": 0, "best_bytes_per_s": 0.0}
        )
        known["calls"] += 1
        known["largest_bytes"] = max(known["largest_bytes"], row["moved_bytes"])
        known["best_bytes_per_s"] = max(known["best_bytes_per_s"], best)
    return html.card("Links, measured", html.table(list(found.values()))) if found else ""
