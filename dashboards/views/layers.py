"""Layers: time per block and operator, what each must read and compute, and how near it is to the memory's limit."""

from __future__ import annotations

from typing import Any

from firstlight.dashboards import figures, html
from firstlight.dashboards.store import Snapshot
from firstlight.dashboards.views.view import Page, column, heading, pane, plot, put, show
from firstlight.workbench.report import Report


class Layers:
    title = "Layers"

    def __init__(self, page: Page) -> None:
        self._top, self._rest = pane(), pane()
        self._decode, self._prefill = plot(300), plot(300)
        self._decode_title, self._prefill_title = (
            heading("Decode, ms per block on its slowest rank, collectives within it included"),
            heading("Prefill, ms per block on its slowest rank, collectives within it included"),
        )
        self._version = -1

    def panel(self) -> Any:
        return column(self._top, self._decode_title, self._decode, self._prefill_title, self._prefill, self._rest)

    def draw(self, snapshot: Snapshot) -> None:
        if snapshot.reports_version == self._version:
            return
        self._version = snapshot.reports_version
        profile = snapshot.latest("profile")
        rows = profile.tables.get("layers", []) if profile is not None else []
        for part in (self._decode_title, self._prefill_title):
            part.visible = bool(rows)
        show(self._decode, figures.layer_bars(rows, "decode") if rows else None)
        show(self._prefill, figures.layer_bars(rows, "prefill") if rows else None)
        put(self._top, html.page(_summary(profile)))
        put(self._rest, html.page(_tables(profile, rows)))


def _summary(profile: Report | None) -> str:
    if profile is None:
        return html.card("Layers", html.nothing("not profiled yet: firstlight profile CKPT --run RUN"))
    return html.card(profile.title, html.metrics(profile.metrics))


def _tables(profile: Report | None, rows: list[dict[str, Any]]) -> str:
    if profile is None:
        return ""
    parts = [html.card("Operators, rank 0", html.table(profile.tables.get("operators", [])))]
    if rows:
        parts.append(html.card("Blocks", html.table(rows)))
    return "".join(parts)
