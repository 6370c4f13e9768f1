"""Memory: what every rank holds by role, planned beside measured, and how it moved over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import panel as pn

from firstlight.dashboards import figures, html
from firstlight.dashboards.store import Snapshot
from firstlight.dashboards.views.view import FIELD, Chart, Page, column, not_yet, pane, put
from firstlight.workbench.readings import Series
from firstlight.workbench.render import words

KINDS = {"ranks": ("resident", "allocated", "reserved"), "whole devices": ("memory_used",), "by role": ()}
"""What is drawn together: ranks have a scale of their own, beside the machine's. Roles are the rest of `memory`."""
OTHER = frozenset(("process_bytes", "total_bytes", "free_bytes", "weight_bytes"))


class Memory:
    title = "Memory"

    def __init__(self, page: Page) -> None:
        self._page = page
        self._bars = pane()
        self._kind = pn.widgets.RadioButtonGroup(name="Over time", options=list(KINDS), width=320, **FIELD)
        self._over_time = Chart("Over time, as the system and the engine say", self._kind, height=260)
        self._kind.param.watch(lambda _: self._draw_curves(), "value")
        self._version = -1
        self._drawn = -1

    def panel(self) -> Any:
        return column(self._bars, self._over_time.panel())

    def draw(self, snapshot: Snapshot) -> None:
        if snapshot.reports_version != self._version:
            self._version = snapshot.reports_version
            put(self._bars, html.page(_planned(snapshot), _measured(snapshot), _pools(snapshot)))
        if snapshot.readings_version // 10 != self._drawn:  # a curve of an hour does not move ten times a second
            self._drawn = snapshot.readings_version // 10
            self._page.when_live(self._draw_curves)

    def _draw_curves(self) -> None:
        found = self._curves()
        if found:
            said = html.table(figures.numbers(found, "MiB"))
        else:  # there is still another kind to look at
            said = html.nothing("no readings of this kind in this run") if self._has_others() else ""
        self._over_time.show(figures.curves(found, "memory (MiB)") if found else None, said)

    def _has_others(self) -> bool:
        follower = self._page.follower
        return follower is not None and any(_kind(one) for one in follower.series())

    def _curves(self) -> dict[str, Any]:
        follower = self._page.follower
        span = follower.span() if follower is not None else None
        if follower is None or span is None:
            return {}
        wanted = {
            one.id: f"{one.device} {words.heading(one.metric)}"
            for one in follower.series()
            if _kind(one) == self._kind.value
        }
        found = follower.history(list(wanted), *span, 400)
        scale = 1 / 2**20
        return {
            wanted[key]: [
                type(b)(b.time_s, b.count, b.mean * scale if b.mean is not None else None, None, None, b.gaps)
                for b in buckets
            ]
            for key, buckets in found.items()
            if any(bucket.count for bucket in buckets)
        }


def _kind(series: Series) -> str:
    """With which others a series is drawn; empty for one that is no memory."""
    if series.unit != "B":
        return ""
    found = (kind for kind, metrics in KINDS.items() if series.metric in metrics)
    return next(found, "by role" if series.source == "memory" else "")


def _roles(row: Mapping[str, Any]) -> dict[str, float]:
    return {
        key.removesuffix("_bytes"): float(value)
        for key, value in row.items()
        if key.endswith("_bytes") and key not in OTHER and value
    }


def _planned(snapshot: Snapshot) -> str:
    plan = snapshot.latest("plan")
    rows = plan.tables.get("ranks", []) if plan is not None else []
    if plan is None or not rows:
        why = next((one.message for one in plan.findings), "") if plan is not None else ""
        if plan is None or not why:
            return not_yet(snapshot, "Planned", "plan")
        return html.card("Planned", html.nothing(f"{plan.status}: {why}"))
    usable = plan.metrics.get("usable_bytes_per_device")
    longest = float(usable.value) if usable is not None and isinstance(usable.value, int | float) else None
    bars = []
    for row in rows[:64]:
        parts = _roles(row)
        total = sum(parts.values())
        free = max(0.0, longest - total) if longest else 0.0
        said = words.in_bytes(total) + (f", {words.in_bytes(free)} free" if free else "")
        bars.append((f"rank {row['rank']}", parts, said))
    fits = max((sum(parts.values()) for _, parts, _ in bars), default=0.0)
    scale = longest if longest and fits > 0.02 * longest else None  # a toy on a large device would be a hairline
    if scale:
        bars = [(name, {**parts, "free": max(0.0, scale - sum(parts.values()))}, said) for name, parts, said in bars]
    note = "" if scale else "<p class='quiet'>bars are scaled to the fullest rank, not to the device</p>"
    return html.card("Planned, by rank and role", html.stacked(bars, scale, show=words.in_bytes) + note)


def _measured(snapshot: Snapshot) -> str:
    start = snapshot.figures("start")
    rows = start.tables.get("memory", []) if start is not None else []
    if not rows:
        return not_yet(snapshot, "Measured", "up")
    bars = [
        (f"rank {row['rank']} · {row['device']}", _roles(row), words.in_bytes(sum(_roles(row).values())))
        for row in rows[:64]
    ]
    return html.card("Measured: what the running engine holds", html.stacked(bars, show=words.in_bytes))


def _pools(snapshot: Snapshot) -> str:
    start, plan = snapshot.figures("start"), snapshot.latest("plan")
    parts = []
    if start is not None and plan is not None:
        planned = {row["rank"]: row for row in plan.tables.get("ranks", [])}
        rows = []
        for row in start.tables.get("memory", []):
            expected, found = planned.get(row["rank"]), _roles(row)
            weights = sum(size for role, size in found.items() if role != "cache")
            rows.append(
                {
                    "rank": row["rank"],
                    "planned_weight_bytes": expected["weight_bytes"] if expected else None,
                    "measured_weight_bytes": weights,
                    "planned_cache_bytes": expected["cache_bytes"] + expected["state_bytes"] if expected else None,
                    "measured_cache_bytes": found.get("cache", 0.0),
                    "process_bytes": row.get("process_bytes"),
                }
            )
        parts.append(html.card("Planned beside measured", html.table(rows)))
    if start is not None and start.tables.get("pools"):
        parts.append(html.card("Pools", html.table(start.tables["pools"])))
    return "".join(parts)
