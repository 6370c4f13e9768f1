"""Verify: error per layer against the noise floor, the first bad block, and the likeliest tokens side by side."""

from __future__ import annotations

from typing import Any

import panel as pn

from firstlight.dashboards import figures, html
from firstlight.dashboards.store import Snapshot
from firstlight.dashboards.theme import FIELDS
from firstlight.dashboards.views.view import Page, column, pane, plot, put, show
from firstlight.workbench.report import Report


class Verify:
    title = "Verify"

    def __init__(self, page: Page) -> None:
        self._case = pn.widgets.RadioButtonGroup(name="Input", options=[""], stylesheets=[FIELDS], width=320)
        self._case.param.watch(lambda _: self._draw(), "value")
        self._top, self._plot, self._rest = pane(), plot(330), pane()
        self._report: Report | None = None
        self._version = -1

    def panel(self) -> Any:
        return column(self._top, self._case, self._plot, self._rest)

    def draw(self, snapshot: Snapshot) -> None:
        if snapshot.reports_version == self._version:
            return
        self._version = snapshot.reports_version
        self._report = snapshot.latest("verify")
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
            put(
                self._top,
                html.page(html.card("Verify", html.nothing("not verified yet: firstlight verify CKPT --run RUN"))),
            )
            show(self._plot, None)
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
        show(self._plot, figures.errors(rows) if rows else None)
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
