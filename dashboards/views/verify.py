"""Verify: error per layer against the noise floor, the first bad block, and the likeliest tokens side by side."""

from __future__ import annotations

from typing import Any

import panel as pn

from firstlight.dashboards import figures, html
from firstlight.dashboards.store import Snapshot
from firstlight.dashboards.views.view import FIELD, Chart, Page, column, not_yet, pane, put
from firstlight.workbench.report import Report


class Verify:
    title = "Verify"

    def __init__(self, page: Page) -> None:
        self._case = pn.widgets.RadioButtonGroup(name="Input", options=[""], width=320, **FIELD)
        self._case.param.watch(lambda _: self._draw(), "value")
        self._top, self._rest = pane(), pane()
        self._errors = Chart("Error per layer against the reference", height=330)
        self._report: Report | None = None
        self._missing = ""
        self._version = -1

    def panel(self) -> Any:
        return column(self._case, self._top, self._errors.panel(), self._rest)

    def draw(self, snapshot: Snapshot) -> None:
        if snapshot.reports_version == self._version:
            return
        self._version = snapshot.reports_version
        self._report = snapshot.figures("verify")
        self._missing = not_yet(snapshot, "Verify", "verify")
        cases = (
            [n.removesuffix("layers").strip() for n in self._report.tables if n.endswith("layers")]
            if self._report
            else []
        )
        self._case.options = cases or [""]
        self._case.value = self._case.options[0]
        self._draw()

    def _draw(self) -> None:
        report, case = self._report, self._case.value or ""
        self._case.visible = len(self._case.options) > 1
        if report is None:
            put(self._top, html.page(self._missing))
            put(self._rest, "")
            self._errors.show(None)
            return
        failed = [check for check in report.checks if check.status == "failed"]
        said = f"{html.status(report.status)} · {len(report.checks) - len(failed)} of {len(report.checks)} checks"
        put(
            self._top,
            html.page(
                html.card(report.title, f"<p>{said}</p>{html.metrics(report.metrics, case.strip())}"),
                _first_fault(report, case),
            ),
        )
        rows = next(
            (rows for name, rows in report.tables.items() if name.startswith(case) and name.endswith("layers")), []
        )
        self._errors.show(figures.errors(rows) if rows else None)
        checks = [
            {
                "status": c.status,
                "check": c.name,
                "value": c.value,
                "limit": c.limit,
                "unit": c.unit,
                "detail": c.detail,
            }
            for c in sorted(report.checks, key=lambda c: c.status != "failed")
            if c.name.startswith(case) or c.status == "failed"
        ]
        others = [n for n, found in report.tables.items() if found and n.startswith(case) and "first fault" not in n]
        put(
            self._rest,
            html.page(
                *(html.named(name, html.table(report.tables[name])) for name in others),
                html.card("Checks", html.table(checks)),
            ),
        )


def _first_fault(report: Report, case: str) -> str:
    rows = [
        row for name, found in report.tables.items() if "first fault" in name and name.startswith(case) for row in found
    ]
    wrong = [finding for finding in report.findings if finding.severity == "fatal"]
    if not rows and not wrong:
        return ""
    return html.card("First bad block", (html.table(rows) if rows else "") + html.findings(wrong), "alarm")
