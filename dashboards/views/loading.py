"""Loading: bytes over time per phase, the rate beside the limit, and a replay of the load step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import panel as pn

from firstlight.dashboards import figures, html
from firstlight.dashboards.store import Snapshot
from firstlight.dashboards.theme import FIELDS
from firstlight.dashboards.views.view import ACROSS, Chart, Page, card, column, not_yet, pane, put
from firstlight.workbench.events import ProgressEvent
from firstlight.workbench.render import words

RUNGS = ("load", "start")
BY_THEN = "The rate of everything that was there by the end of the layer: layers are read ahead, several at a time."
TITLES = {"ranks": "By rank", "memory": "By role", "by_layer": "By layer"}


class Loading:
    title = "Loading"

    def __init__(self, page: Page) -> None:
        self._page = page
        self._top, self._step, self._rest = pane(), pane(), pane()
        self._rates, self._bytes = Chart("Rate of reading, up to each layer"), Chart("Bytes over time")
        self._replay = pn.widgets.IntSlider(
            name="Event",
            value=0,
            start=0,
            end=1,
            stylesheets=[FIELDS],
            sizing_mode="stretch_width",
            margin=ACROSS,
        )
        self._replay_card = card("Replay", self._replay, self._step)
        self._replay.param.watch(lambda _: self._draw_step(), "value")
        self._events: list[ProgressEvent] = []
        self._begun_s: dict[str, float] = {}
        self._version: tuple[int, int] = (-1, -1)

    def panel(self) -> Any:
        return column(self._top, self._rates.panel(), self._bytes.panel(), self._replay_card, self._rest)

    def draw(self, snapshot: Snapshot) -> None:
        count = sum(int(pace.last.time_s * 1000) for (rung, _), pace in snapshot.progress.items() if rung in RUNGS)
        if (snapshot.reports_version, count) == self._version:
            return
        self._version = snapshot.reports_version, count
        follower = self._page.follower
        told = _last_attempt(follower.progress(RUNGS)) if follower is not None else []
        self._events = [event for event in told if event.unit == "B"]
        self._begun_s = _begun(told)
        load = snapshot.latest("load")
        put(self._top, html.page(self._summary(snapshot)))
        points = _points(told)
        self._bytes.show(figures.loading(points) if points else None)
        rows = load.tables.get("by_layer", []) if load is not None else []
        limit = load.metrics["source_limit"].value if load is not None and "source_limit" in load.metrics else None
        bars = figures.layer_rates(rows, limit if isinstance(limit, int | float) else None)
        self._rates.show(bars, html.nothing(BY_THEN) if bars is not None else "")
        self._replay_card.visible = len(self._events) > 1
        self._replay.end = max(1, len(self._events) - 1)
        self._draw_step()
        tables = {name: found for name, found in load.tables.items() if found} if load is not None else {}
        cards = (html.named(TITLES.get(name, name), html.table(_without_roles(name, tables))) for name in tables)
        put(self._rest, html.page(*cards))

    def _summary(self, snapshot: Snapshot) -> str:
        load = snapshot.latest("load")
        if load is None:
            return not_yet(snapshot, "Loading", "load")
        checks = [
            {"check": c.name, "status": c.status, "value": c.value, "limit": c.limit, "unit": c.unit}
            for c in load.checks
        ]
        rate = load.metrics.get("read_rate")
        why = html.nothing(rate.detail) if rate is not None and rate.value is None and rate.detail else ""
        return html.card(load.title, html.metrics(load.metrics) + why) + html.card("Checks", html.table(checks))

    def _draw_step(self) -> None:
        if len(self._events) < 2:
            return
        event = self._events[min(self._replay.value, len(self._events) - 1)]
        share = event.done / event.total if event.total else 0.0
        amount = f"{words.in_bytes(event.done)} of {words.in_bytes(event.total or 0)}"
        said = " · ".join(part for part in (f"{event.rung}: {event.phase}", amount, event.detail) if part)
        at_s = event.time_s - self._begun_s[event.rung]
        put(
            self._step,
            html.page(f"<p>after {html.said(html.amount(at_s, 's'))} · {html.said(said)}</p>{html.track(share)}"),
        )


def _last_attempt(events: list[ProgressEvent]) -> list[ProgressEvent]:
    """A rung that was done again shows its last time only: from where a phase has less done than before."""
    kept: dict[str, list[ProgressEvent]] = {}
    done: dict[tuple[str, str], float] = {}
    for event in events:
        key = event.rung, event.phase
        if event.done <= done.get(key, -1.0):
            kept[event.rung] = []
            done = {other: value for other, value in done.items() if other[0] != event.rung}
        done[key] = event.done
        kept.setdefault(event.rung, []).append(event)
    return [event for found in kept.values() for event in found]


def _begun(events: list[ProgressEvent]) -> dict[str, float]:
    """When each rung began, s since 1970."""
    return {event.rung: event.time_s for event in reversed(events)}


def _without_roles(name: str, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Rows by rank without the bytes of each role, which stand by role below and by rank in Memory."""
    roles = {f"{row.get('role')}_bytes" for row in tables.get("memory", ())} if name == "ranks" else set()
    return [{key: value for key, value in row.items() if key not in roles} for row in tables[name]]


def _points(events: list[ProgressEvent]) -> list[tuple[str, float, float]]:
    """(phase, seconds since its rung began, bytes); a phase begins with nothing, when the one before it ended."""
    points: list[tuple[str, float, float]] = []
    begun_s = _begun(events)
    before_s: dict[str, float] = {}
    for event in events:
        at_s = event.time_s - begun_s[event.rung]
        name = f"{event.rung}: {event.phase}"
        if event.unit == "B" and all(known != name for known, _, _ in points[-1:]):
            points.append((name, before_s.get(event.rung, at_s), 0.0))
        before_s[event.rung] = at_s
        if event.unit == "B":
            points.append((name, at_s, event.done))
    return points
