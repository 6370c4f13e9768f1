"""Hardware: every reading of every device, with a curve of the last two minutes, and the reason where there is none."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import panel as pn

from firstlight.dashboards import figures, html
from firstlight.dashboards.store import Snapshot
from firstlight.dashboards.trails import SPAN_S, SeriesKey, Trail
from firstlight.dashboards.views.view import FIELD, Chart, Page, column, pane, put
from firstlight.workbench.readings import Series
from firstlight.workbench.render import words

HIDDEN = ("memory",)  # sources with a tab of their own
STALE_S = 30.0
LEFT_OUT_S = 5.0  # behind the newest of its own device, whose readings are taken together
MOST_CURVES = 64
MOST_POINTS = 9600


class Hardware:
    title = "Hardware"

    def __init__(self, page: Page) -> None:
        self._page = page
        self._devices = pane()
        self._metric = pn.widgets.Select(name="Metric", options=[], width=300, **FIELD)
        self._curves = Chart("Over the whole run", self._metric)
        self._metric.param.watch(lambda _: self._page.when_live(self._draw_history), "value")
        self._series: list[Series] = []
        self._sparks = Sparks()
        self._version, self._at = (-1, False), -1
        self._drawn: tuple[str, int] = ("", -1)  # metric and moment of the curves that stand there

    def panel(self) -> Any:
        return column(self._devices, self._curves.panel())

    def draw(self, snapshot: Snapshot) -> None:
        version = snapshot.readings_version, bool(_silence(snapshot))
        if version == self._version:
            return
        self._version = version
        put(self._devices, html.page(devices(snapshot, self._sparks)))
        newest_s = max((trail.last.time_s for trail in snapshot.trails.values()), default=0.0)
        if int(newest_s // 10) != self._at:
            self._at = int(newest_s // 10)
            self._choices()
            self._page.when_live(self._draw_history)

    def _choices(self) -> None:
        follower = self._page.follower
        self._series = follower.series() if follower is not None else []
        kinds = dict.fromkeys(
            _kind(one) for one in self._series if one.source not in HIDDEN and "block" not in one.device
        )
        options = list(kinds)
        if options and options != self._metric.options:
            kept = self._metric.value
            self._metric.options = options
            self._metric.value = kept if kept in options else options[0]

    def _draw_history(self) -> None:
        follower = self._page.follower
        span = follower.span() if follower is not None else None
        if follower is None or span is None or not self._metric.value:
            self._curves.show(None)
            return
        if self._drawn == (self._metric.value, self._at):
            return
        self._drawn = self._metric.value, self._at
        wanted = {s.id: s for s in self._series if _kind(s) == self._metric.value}
        shown = dict(list(wanted.items())[:MOST_CURVES])
        points = max(120, MOST_POINTS // max(1, len(shown)))  # many curves need not be as fine as one
        found = follower.history(list(shown), *span, min(600, points))
        curves = {shown[key].device: buckets for key, buckets in found.items() if any(b.count for b in buckets)}
        unit = next((series.unit for series in shown.values()), "")
        left = len(wanted) - len(shown)
        said = html.nothing(f"{left} more devices are not drawn") if left > 0 else ""
        if curves:
            said += html.table(figures.numbers(curves, unit))
        self._curves.show(figures.curves(curves, self._metric.value, 300) if curves else None, said)


def _kind(series: Series) -> str:
    """What can be chosen to be drawn, of all devices that have it."""
    return f"{words.heading(series.metric)} ({series.unit})"


class Sparks:
    """Small curves of all series; a path is made anew only when a stretch of it has ended."""

    def __init__(self) -> None:
        self._made: dict[SeriesKey, tuple[tuple[float, ...], str]] = {}

    def of(self, trail: Trail, newest_s: float) -> str:
        if not trail.times_s:
            return "<span></span>"
        key = trail.last.source, trail.last.device, trail.last.metric
        times_s, path = self._made.get(key, ((), ""))
        if times_s is not trail.times_s:
            path = html.curve(trail.times_s, trail.values, SPAN_S)
            self._made[key] = trail.times_s, path
        return html.spark(path, trail.times_s[0], newest_s, SPAN_S)


def devices(snapshot: Snapshot, sparks: Sparks) -> str:
    """A card a device: name, curve and value of each metric, or the reason why there is none."""
    by_device: dict[str, list[Trail]] = {}
    for (source, device, _), trail in snapshot.trails.items():
        if source not in HIDDEN and not device.startswith(("block ", "all_", "send", "receive", "broadcast")):
            by_device.setdefault(device, []).append(trail)
    if not by_device:
        return html.card(
            "Hardware", html.nothing("no readings yet: they are taken while a run loads, starts and serves")
        )
    newest_s = max(trail.last.time_s for trails in by_device.values() for trail in trails)
    first = sorted(by_device.items(), key=lambda item: not any(trail.last.alarm for trail in item[1]))  # alarms
    cards = [_device(device, trails, newest_s, sparks) for device, trails in first]
    return f'{_silence(snapshot)}<div class="columns">{"".join(cards)}</div>'


def _silence(snapshot: Snapshot) -> str:
    """That these are the last readings and not those of now, if so; nothing where none were taken."""
    newest_s = max((trail.last.time_s for trail in snapshot.trails.values()), default=0.0)
    if not newest_s or time.time() - newest_s <= STALE_S:
        return ""
    return html.nothing(f"The last readings, of {datetime.fromtimestamp(newest_s, UTC):%Y-%m-%d %H:%M:%S} UTC.")


def _device(device: str, trails: list[Trail], newest_s: float, sparks: Sparks) -> str:
    rows = []
    own_s = max(trail.last.time_s for trail in trails)
    for trail in trails:
        last = trail.last
        name = f'<span title="{html.said(last.source)}">{html.said(words.heading(last.metric))}</span>'
        if last.value is None:
            kind = "bad" if last.alarm else "none"
            why = html.said(f"{last.reason} · {last.source}")
            rows.append(f'{name}<span></span><span class="v {kind}">not available</span><span class="why">{why}</span>')
            continue
        value = words.quantity(round(last.value, 2) if abs(last.value) < 1000 else last.value, last.unit)
        stale = newest_s - last.time_s > STALE_S or own_s - last.time_s > LEFT_OUT_S
        shown = f'<span class="v {"none" if stale else ""}">{html.said(value)}</span>'
        rows.append(f"{name}{sparks.of(trail, newest_s)}{shown}")
    alarm = "alarm" if any(trail.last.alarm for trail in trails) else ""
    return html.card(device, f'<div class="device">{"".join(rows)}</div>', alarm)
