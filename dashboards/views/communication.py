"""Communication: a step as a timeline per rank, how much of its collectives is hidden, who waits, and what moves."""

from __future__ import annotations

from typing import Any

import panel as pn

from firstlight.dashboards import figures, html
from firstlight.dashboards.store import Snapshot
from firstlight.dashboards.views.view import FIELD, Chart, Page, column, not_yet, pane, put
from firstlight.workbench.report import Report

RECEIVES = "A receive holds the waiting for the stage before it, so that it says nothing of the link's rate."


class Communication:
    title = "Communication"

    def __init__(self, page: Page) -> None:
        self._phase = pn.widgets.RadioButtonGroup(name="Phase", options=["decode", "prefill"], width=200, **FIELD)
        self._phase.param.watch(lambda _: self._draw(), "value")
        self._top, self._rest = pane(), pane()
        self._timeline = Chart("One step, rank by rank", height=200)
        self._profile: Report | None = None
        self._missing = ""
        self._version = -1

    def panel(self) -> Any:
        return column(self._phase, self._top, self._timeline.panel(), self._rest)

    def draw(self, snapshot: Snapshot) -> None:
        if snapshot.reports_version == self._version:
            return
        self._version = snapshot.reports_version
        self._profile = snapshot.figures("profile")
        self._missing = not_yet(snapshot, "Communication", "profile")
        self._draw()

    def _draw(self) -> None:
        profile, phase = self._profile, self._phase.value
        rows = profile.tables.get("timeline", []) if profile is not None else []
        self._phase.visible = bool(rows)
        if profile is None:
            put(self._top, html.page(self._missing))
            put(self._rest, "")
            self._timeline.show(None)
            return
        pp = any(row["phase"] == phase and waits(row["name"]) for row in rows)
        steps = [row for row in profile.tables.get("steps", []) if row["phase"] == phase]
        bars = [
            (
                f"rank {row['rank']}",
                {part: row[f"{part}_ms"] for part in ("compute", "communication", "waiting")},
                _ms(row["compute_ms"] + row["communication_ms"] + row["waiting_ms"]),
            )
            for row in steps
        ]
        put(
            self._top,
            html.page(
                html.card(
                    f"Where a {phase} step goes",
                    html.stacked(bars, show=_ms) + _of_which(rows, phase) if bars else html.nothing("no steps"),
                )
            ),
        )
        self._timeline.show(figures.timeline(rows, phase) if rows else None)
        put(
            self._rest,
            html.page(
                html.card("Overlap, by rank", html.table(figures.overlap(rows, phase))),
                html.card("The slow link", _slowest(rows, phase) + (html.nothing(RECEIVES) if pp else "")),
                html.card(
                    "Collectives of a step",
                    html.table(
                        [_without_phase(r) for r in profile.tables.get("collectives", []) if r["phase"] == phase]
                    ),
                ),
                html.card("The step, call by call", html.table(_calls(rows, phase))) if rows else "",
            ),
        )


def _of_which(rows: list[dict[str, Any]], phase: str) -> str:
    """Of which step the bars and the timeline speak: they are of several, and of one."""
    ends_ms = [row["start_ms"] + row["duration_ms"] for row in rows if row["phase"] == phase]
    if not ends_ms:
        return html.nothing("Medians over the steps that were timed.")
    return html.nothing(
        f"Medians over the steps that were timed; the timeline and the tables below are of the last one, which took"
        f" {_ms(max(ends_ms))}."
    )


def _without_phase(row: dict[str, Any]) -> dict[str, Any]:
    """The phase is chosen above all tables."""
    return {name: value for name, value in row.items() if name != "phase"}


def _ms(value: float) -> str:
    return f"{value:.2f} ms"


def _calls(rows: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    """The timeline in words, in the order of time on each rank."""
    names = ("rank", "kind", "name", "start_ms", "duration_ms", "moved_bytes")
    mine = sorted((row for row in rows if row["phase"] == phase), key=lambda row: (row["rank"], row["start_ms"]))
    return [{name: row[name] for name in names} | {"moved_bytes": row["moved_bytes"] or None} for row in mine]


def waits(collective: str) -> bool:
    """Whether its time is that of the other side's work: a receive begins when this rank is ready, not when data is."""
    return collective.startswith("receive")


def _slowest(rows: list[dict[str, Any]], phase: str) -> str:
    """Which collective takes longest for what it moves, and which rank waits least: the others wait for that one."""
    calls = [row for row in rows if row["phase"] == phase and row["kind"] == "collective"]
    if not calls:
        return html.nothing("one rank: nothing is sent")
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in calls:
        by_name.setdefault(row["name"], []).append(row)
    shown = []
    for name, found in by_name.items():
        in_calls = {
            rank: sum(r["duration_ms"] for r in found if r["rank"] == rank) for rank in {r["rank"] for r in found}
        }
        fastest = min(found, key=lambda r: r["duration_ms"])
        shown.append(
            {
                "collective": name,
                "calls": len(found) // max(1, len(in_calls)),
                "longest_ms": max(r["duration_ms"] for r in found),
                "shortest_ms": fastest["duration_ms"],
                "best_bytes_per_s": fastest["moved_bytes"] / fastest["duration_ms"] * 1e3
                if fastest["duration_ms"] and not waits(name)
                else None,
                "last_to_come": f"rank {min(in_calls, key=lambda rank: in_calls[rank])}" if len(in_calls) > 1 else "",
            }
        )
    return html.table(sorted(shown, key=lambda row: -row["longest_ms"]))
