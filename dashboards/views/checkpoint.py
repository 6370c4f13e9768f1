"""Checkpoint: what the scan found, from findings and storage formats to tensors, and the ledger, page by page."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import panel as pn

from firstlight.dashboards import html
from firstlight.dashboards.store import Snapshot
from firstlight.dashboards.theme import FIELDS
from firstlight.dashboards.views.view import Page, column, pane, put
from firstlight.workbench.ledger_file import FILE, LedgerFile
from firstlight.workbench.runs import own_file

PAGE_ROWS = 200


class Checkpoint:
    title = "Checkpoint"

    def __init__(self, page: Page) -> None:
        self._page = page
        self._top, self._ledger, self._rest = pane(), pane(), pane()
        self._search = pn.widgets.TextInput(
            name="Search the ledger",
            placeholder="part of a tensor's or parameter's name",
            stylesheets=[FIELDS],
            width=360,
        )
        self._at = pn.widgets.IntInput(
            name="from row", value=1, start=1, step=PAGE_ROWS, stylesheets=[FIELDS], width=130
        )
        self._only = pn.widgets.Select(
            name="show",
            options=["all", "consumed", "left out", "unconsumed", "missing"],
            stylesheets=[FIELDS],
            width=130,
        )
        self._file: LedgerFile | None = None
        self._version = -1
        for widget in (self._search, self._at, self._only):
            widget.param.watch(lambda _: self._draw_ledger(), "value")

    def panel(self) -> Any:
        controls = pn.FlexBox(self._search, self._only, self._at, margin=0)
        return column(self._top, controls, self._ledger, self._rest)

    def draw(self, snapshot: Snapshot) -> None:
        if snapshot.reports_version == self._version:
            return
        self._version = snapshot.reports_version
        scan = snapshot.latest("scan")
        if scan is None:
            put(
                self._top,
                html.page(html.card("Checkpoint", html.nothing("not scanned yet: firstlight scan CKPT --run RUN"))),
            )
            return
        checks = [{"check": c.name, "status": c.status, "detail": c.detail} for c in scan.checks]
        put(
            self._top,
            html.page(
                html.card(scan.title, html.metrics(scan.metrics)),
                html.card("Checks", html.table(checks)),
                html.card("Findings", html.findings(scan.findings)),
            ),
        )
        names = [name for name in scan.tables if scan.tables[name]]
        put(self._rest, html.page(*(html.named(n, html.table(scan.tables[n])) for n in names)))
        own_file(Path(snapshot.directory), FILE)
        self._file = LedgerFile.of(snapshot.directory)
        self._draw_ledger()

    def _draw_ledger(self) -> None:
        file = self._file
        there = file is not None and file.exists
        for widget in (self._search, self._at, self._only):
            widget.visible = there
        if file is None or not there:
            put(self._ledger, "")
            return
        verdict = "" if self._only.value == "all" else self._only.value
        try:
            total, rows = file.page(self._search.value.strip(), verdict, max(0, self._at.value - 1), PAGE_ROWS)
        except (sqlite3.Error, OSError) as error:
            put(self._ledger, html.page(html.card("Ledger", html.nothing(f"it cannot be read: {error}"), "alarm")))
            return
        title = f"Ledger: {total:,} rows" + (" of this kind" if verdict or self._search.value else "")
        first = min(self._at.value, max(1, total))
        note = f"<p class='quiet'>rows {first:,} to {min(total, first + PAGE_ROWS - 1):,}</p>" if total else ""
        put(
            self._ledger,
            html.page(html.card(title, note + (html.table(rows) if rows else html.nothing("no such row")))),
        )
