"""Loading: bytes over time per phase, the rate beside the limit, and a replay of the load step by step."""

from __future__ import annotations

from typing import Any

import panel as pn

from firstlight.dashboards import figures, html
from firstlight.dashboards.store import Snapshot
from firstlight.dashboards.theme import FIELDS
from firstlight.dashboards.views.view import Page, column, pane, plot, put, show
from firstlight.workbench.events import ProgressEvent
from firstlight.workbench.render import words

RUNGS = ("load", "start")


class Loading:
    title = "Loading"

    def __init__(self, page: Page) -> None:
        self._page = page
        self._top, self._plot, self._step, self._rest = pane(), plot(280), pane(), pane()
        self._replay = pn.widgets.IntSlider(
            name="Replay: event", value=0, start=0, end=1, stylesheets=[FIELDS], sizing_mode="stretch_width"
        )
        self._replay.param.watch(lambda _: self._draw_step(), "value")
        self._events: list[ProgressEvent] = []
        self._version: tuple[int, int] = (-1, -1)

    def panel(self) -> Any:
        return column(self._top, self._plot, self._replay, self._step, self._rest)

    def draw(self, snapshot: Snapshot) -> None:
        count = sum(int(pace.last.time_s * 1000) for (rung, _), pace in snapshot.progress.items() if rung in RUNGS)
        if (snapshot.reports_version, count) == self._version:
            return
        self._version = snapshot.reports_version, count
        follower = self._page.follower
        self._events = follower.progress(RUNGS, unit="B") if follower is not None else []
        load = snapshot.latest("load")
        put(self._top, html.page(self._summary(snapshot)))
        first_s = self._events[0].time_s if self._events else 0.0
        points = [(f"{event.rung}: {event.phase}", event.time_s - first_s, event.done) for event in self._events]
        show(self._plot, figures.loading(points) if points else None)
        self._replay.visible = self._step.visible = len(self._events) > 1
        self._replay.end = max(1, len(self._events) - 1)
        self._draw_step()
        tables = {name: rows for name, rows in load.tables.items() if rows} if load is not None else {}
        put(self._rest, html.page(*(html.card(words.heading(name), html.table(rows)) for name, rows in tables.items())))

    def _summary(self, snapshot: Snapshot) -> str:
        load = snapshot.latest("load")
        if load is None:
            return html.card("Loading", html.nothing("nothing was loaded in this run yet"))
        items = [
            (words.heading(name), words.quantity(metric.value, metric.unit))
            for name, metric in load.metrics.items()
            if metric.value is not None
        ]
        checks = [
            {"check": c.name, "status": c.status, "value": c.value, "limit": c.limit, "unit": c.unit}
            for c in load.checks
        ]
        return html.card(load.title, html.figures(items)) + html.card("Checks", html.table(checks))

    def _draw_step(self) -> None:
        if len(self._events) < 2:
            return
        event = self._events[min(self._replay.value, len(self._events) - 1)]
        share = event.done / event.total if event.total else 0.0
        amount = f"{words.in_bytes(event.done)} of {words.in_bytes(event.total or 0)}"
        said = " · ".join(part for part in (f"{event.rung}: {event.phase}", amount, event.detail) if part)
        at_s = event.time_s - self._events[0].time_s
        put(
            self._step,
            html.page(html.card("", f"<p>after {words.seconds(at_s)} · {html.said(said)}</p>{html.track(share)}")),
        )
