"""Runs: all runs of the folder, and two or more of them compared figure by figure."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import panel as pn

from firstlight.dashboards import html
from firstlight.dashboards.store import EVENTS, Snapshot, reports_of
from firstlight.dashboards.views.view import ACROSS, FIELD, Page, card, column, pane, put
from firstlight.dashboards.views.working import RUNNING, state_of
from firstlight.engine.errors import Refused
from firstlight.workbench.compare_runs import compare_reports
from firstlight.workbench.render import words
from firstlight.workbench.report import Report
from firstlight.workbench.runs import Run, RunRecord

MOST = 200
CHOOSE = "Choose two or more to see their figures side by side, and the last to the first."


def _status(record: RunRecord, state: str) -> str | None:
    """As the last reports of its rungs have it, and what has become of the one without a report."""
    if state == RUNNING:
        return state
    last = {rung.verb: rung.status for rung in record.rungs}.values()
    is_bad = bool(state) or any(status != "passed" for status in last)
    return "failed" if is_bad else "passed" if last else None


def _rungs(record: RunRecord, state: str) -> str:
    """The rungs that did not pass, and the one without a report."""
    last = {rung.verb: rung.status for rung in record.rungs}
    found = [f"{verb} {status}" for verb, status in last.items() if status != "passed"]
    found += [f"{record.work.verb} {state}"] if record.work is not None else []
    return ", ".join(found) or ("all passed" if last else "none yet")


def _state(directory: Path, record: RunRecord) -> str:
    """What has become of the rung that has begun, if there is one."""
    if record.work is None:
        return ""
    try:
        told_s = max((directory / name).stat().st_mtime for name in (EVENTS, f"{EVENTS}-wal"))
    except OSError:
        told_s = record.work.began_s
    return state_of(record.work, told_s)


class Runs:
    title = "Runs"

    def __init__(self, page: Page) -> None:
        self._page = page
        self._list, self._table = pane(), pane(html.page(html.nothing(CHOOSE)))
        self._pick = pn.widgets.MultiSelect(
            name="Runs to compare: two or more, with Ctrl or Shift",
            options=[],
            size=6,
            sizing_mode="stretch_width",
            styles={"max-width": "420px"},
            **FIELD | {"margin": ACROSS},
        )
        self._pick.param.watch(lambda _: self._compare(), "value")
        self._names: list[str] = []

    def panel(self) -> Any:
        return column(self._list, card("Compare", self._pick, self._table))

    def draw(self, snapshot: Snapshot) -> None:
        runs = self._page.store.runs()
        names = [name for name, _ in runs]
        if names != self._names:
            self._names = names
            kept = [name for name in self._pick.value if name in names]
            self._pick.options = names
            self._pick.value = kept
        states = {name: _state(self._page.store.root / name, record) for name, record in runs[:MOST]}
        rows = [
            {
                "run": html.Link(name, urlencode({"run": name, "tab": "Overview"})),
                "model": record.model,
                "begun": record.created[:19].replace("T", " "),
                "status": _status(record, states[name]),
                "rungs": _rungs(record, states[name]),
                "command": html.Line(record.command),
            }
            for name, record in runs[:MOST]
        ]
        left_out = sorted(self._page.store.left_out.items())
        strange = [{"folder": name, "why": why} for name, why in left_out]
        put(
            self._list,
            html.page(
                html.card(
                    f"{words.quantity(len(runs), 'runs')} in {self._page.store.root.name}",
                    html.table(rows) if rows else html.nothing("no runs yet"),
                ),
                html.card("Left out: what cannot be read", html.table(strange)) if strange else "",
            ),
        )

    def _compare(self) -> None:
        chosen = [name for name in reversed(self._names) if name in self._pick.value]  # the first in time first
        if len(chosen) < 2:
            put(self._table, html.page(html.nothing(CHOOSE)))
            return
        found: dict[str, tuple[Report, ...]] = {}
        for name in chosen:
            with contextlib.suppress(Refused):  # removed meanwhile
                found[name] = reports_of(Run.attach(self._page.store.root / name))
        rows = [
            {
                "rung": row.verb,
                "figure": words.heading(row.figure),
                **{
                    name: words.quantity(value, row.unit) if value is not None else ""
                    for name, value in zip(found, row.values, strict=True)
                },
                "last_to_first": row.ratio,
            }
            for row in compare_reports(list(found.values()))
        ]
        put(
            self._table,
            html.page(
                "<h3>Figure by figure</h3>", html.table(rows) if rows else html.nothing("these runs share no figure")
            ),
        )
