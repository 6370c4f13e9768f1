"""Loading: bytes over time per phase, the rate beside the limit, and a replay of the load step by step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import panel as pn

from firstlight.dashboards import figures, html
from firstlight.dashboards.store import Snapshot
from firstlight.dashboards.theme import FIELDS
from firstlight.dashboards.views.view import ACROSS, Chart, Page, card, column, not_yet, pane, put
from firstlight.dashboards.views.working import Doing, bars, doing
from firstlight.workbench.events import ProgressEvent
from firstlight.workbench.render import words
from firstlight.workbench.report import Report

LEAST_S, REST = 0.5, 10.0  # between two drawings of what goes on, and how many times as long as one took
MOST_POINTS = 1000
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
        self._busy_until_s = 0.0

    def panel(self) -> Any:
        return column(self._top, self._rates.panel(), self._bytes.panel(), self._replay_card, self._rest)

    def draw(self, snapshot: Snapshot) -> None:
        now = doing(snapshot)
        going_on = now if now is not None and now.verb in RUNGS and now.is_running else None
        load = None if now is not None and now.verb == "load" else snapshot.figures("load")  # what was is no more
        put(self._top, html.page(_starting(going_on), _summary(snapshot, load)))
        heard = sum(int(pace.last.time_s * 1000) for (rung, _), pace in snapshot.progress.items() if rung in RUNGS)
        version = snapshot.reports_version, heard
        is_told = version[0] == self._version[0]  # that there is more of the same can wait
        if version == self._version or (is_told and time.monotonic() < self._busy_until_s):
            return
        self._version, started_s = version, time.monotonic()
        self._draw_events(going_on is not None)
        self._draw_report(load)
        ended_s = time.monotonic()
        self._busy_until_s = ended_s + max(LEAST_S, REST * (ended_s - started_s))

    def _draw_events(self, goes_on: bool) -> None:
        follower = self._page.follower
        told = _last_attempt(follower.progress(RUNGS)) if follower is not None else []
        self._events = [event for event in told if event.unit == "B"]
        self._begun_s = _begun(told)
        points = _points(told)
        self._bytes.show(figures.loading(points) if points else None)
        self._replay_card.visible = len(self._events) > 1 and not goes_on
        self._replay.end = max(1, len(self._events) - 1)
        self._draw_step()

    def _draw_report(self, load: Report | None) -> None:
        tables = {name: found for name, found in load.tables.items() if found} if load is not None else {}
        limit = load.metrics["source_limit"].value if load is not None and "source_limit" in load.metrics else None
        rates = figures.layer_rates(tables.get("by_layer", []), limit if isinstance(limit, int | float) else None)
        self._rates.show(rates, html.nothing(BY_THEN) if rates is not None else "")
        cards = (html.named(TITLES.get(name, name), html.table(_without_roles(name, tables))) for name in tables)
        put(self._rest, html.page(*cards))

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


def _starting(now: Doing | None) -> str:
    """The engine that reads just now; a load that does stands in the place of its report."""
    return html.card(f"The rung {now.sentence}", bars(now)) if now is not None and now.verb != "load" else ""


def _summary(snapshot: Snapshot, load: Report | None) -> str:
    if load is None:
        return not_yet(snapshot, "Loading", "load")
    checks = [
        {"check": c.name, "status": c.status, "value": c.value, "limit": c.limit, "unit": c.unit} for c in load.checks
    ]
    rate = load.metrics.get("read_rate")
    why = html.nothing(rate.detail) if rate is not None and rate.value is None and rate.detail else ""
    return html.card(load.title, html.metrics(load.metrics) + why) + html.card("Checks", html.table(checks))


def _last_attempt(events: list[ProgressEvent]) -> list[ProgressEvent]:
    """A rung that was done again shows its last time only: from where a phase begins that was over."""
    kept: dict[str, list[ProgressEvent]] = {}
    phases: dict[str, dict[str, float]] = {}  # by rung, what is done of each phase, the running one last
    for event in events:
        found, done = kept.setdefault(event.rung, []), phases.setdefault(event.rung, {})
        goes_on = next(reversed(done), event.phase) == event.phase and event.done >= done.get(event.phase, 0.0)
        if event.phase in done and not goes_on:
            found.clear()
            done.clear()
        found.append(event)
        done[event.phase] = event.done
    return [event for found in kept.values() for event in found]


def _begun(events: list[ProgressEvent]) -> dict[str, float]:
    """When each rung began, s since 1970."""
    return {event.rung: event.time_s for event in reversed(events)}


def _without_roles(name: str, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Rows by rank without the bytes of each role, which stand by role below and by rank in Memory."""
    roles = {f"{row.get('role')}_bytes" for row in tables.get("memory", ())} if name == "ranks" else set()
    return [{key: value for key, value in row.items() if key not in roles} for row in tables[name]]


def _points(events: list[ProgressEvent]) -> list[tuple[str, float, float]]:
    """(phase, seconds since its rung began, bytes); a phase begins with nothing, when the one before it ended.

    Of very many events so many as a figure has room for, the last one always.
    """
    points: list[tuple[str, float, float]] = []
    begun_s = _begun(events)
    events = [*events[: -1 : max(1, len(events) // MOST_POINTS)], *events[-1:]]
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
