"""Layers: time per block and operator, what each must read and compute, and how near it is to the memory's limit."""

from __future__ import annotations

from typing import Any

from firstlight.dashboards import figures, html
from firstlight.dashboards.store import Snapshot
from firstlight.dashboards.views.view import Chart, Page, column, not_yet, pane, put
from firstlight.workbench.report import Report

EXPLAINED = ("decode_ms", "decode_timed_ms", "decode_limit_ms", "decode_of_limit")  # figures that are easily confused
PER_BLOCK = "time per block on its slowest rank, collectives within it included"

ROOF = (
    "Work that lies on the dashed line waits for memory alone; far below it, time goes elsewhere: to collectives, to"
    " small calls, to arithmetic. What arithmetic allows is not measured."
)


class Layers:
    title = "Layers"

    def __init__(self, page: Page) -> None:
        self._top, self._rest = pane(), pane()
        self._charts = {phase: Chart(f"{phase.capitalize()}: {PER_BLOCK}") for phase in ("decode", "prefill")}
        self._roof = Chart("What a block makes of a byte, and how near it is to memory's limit", height=320)
        self._version = -1

    def panel(self) -> Any:
        charts = (chart.panel() for chart in (*self._charts.values(), self._roof))
        return column(self._top, *charts, self._rest)

    def draw(self, snapshot: Snapshot) -> None:
        if snapshot.reports_version == self._version:
            return
        self._version = snapshot.reports_version
        profile = snapshot.figures("profile")
        rows = profile.tables.get("layers", []) if profile is not None else []
        for phase, chart in self._charts.items():
            chart.show(figures.layer_bars(rows, phase) if rows else None)
        roof = figures.roofline(rows, _bandwidth(profile, rows))
        self._roof.show(roof, html.nothing(ROOF) if roof is not None else "")
        put(self._top, html.page(_summary(profile) if profile is not None else not_yet(snapshot, "Layers", "profile")))
        put(self._rest, html.page(_tables(profile, rows)))


def _bandwidth(profile: Report | None, rows: list[dict[str, Any]]) -> float | None:
    """What one rank may read in a second: all share the machine's memory, in bytes; None where it was not measured."""
    found = profile.metrics.get("memory_bandwidth") if profile is not None else None
    ranks = len({row["rank"] for row in rows})
    return float(found.value) / ranks if found is not None and isinstance(found.value, int | float) and ranks else None


def _summary(profile: Report) -> str:
    return html.card(profile.title, html.metrics(profile.metrics) + html.explained(profile.metrics, EXPLAINED))


def _tables(profile: Report | None, rows: list[dict[str, Any]]) -> str:
    if profile is None:
        return ""
    parts = [html.card("Operators, rank 0", html.table(profile.tables.get("operators", [])))]
    if rows:
        parts.append(html.card("Blocks", html.table(rows)))
    return "".join(parts)
