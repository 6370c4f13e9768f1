"""Checkpoint: what the scan found, from findings and storage formats to tensors, and the ledger, page by page."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import panel as pn

from firstlight.dashboards import html
from firstlight.dashboards.store import Snapshot
from firstlight.dashboards.views.view import FIELD, Page, card, column, not_yet, pane, put
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
            width=320,
            **FIELD,
        )
        self._at = pn.widgets.IntInput(name="From row", value=1, start=1, step=PAGE_ROWS, width=120, **FIELD)
        self._only = pn.widgets.Select(
            name="Show", options=["all", "consumed", "left out", "unconsumed", "missing"], width=130, **FIELD
        )
        self._file: LedgerFile | None = None
        self._version = -1
        for widget in (self._search, self._at, self._only):
            widget.param.watch(self._choose, "value")
        controls = pn.FlexBox(self._search, self._only, self._at, margin=0)
        self._card = card("Ledger: every tensor, and where it goes", controls, self._ledger)

    def panel(self) -> Any:
        return column(self._top, self._card, self._rest)

    def draw(self, snapshot: Snapshot) -> None:
        if snapshot.reports_version == self._version:
            return
        self._version = snapshot.reports_version
        scan = snapshot.latest("scan")
        if scan is None:
            put(self._top, html.page(not_yet(snapshot, "Checkpoint", "scan")))
            self._card.visible = False
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

    def _choose(self, event: Any) -> None:
        """What is searched for anew is read from its first row."""
        if event.obj is not self._at and self._at.value != 1:
            self._at.value = 1  # which draws
        else:
            self._draw_ledger()

    def _draw_ledger(self) -> None:
        file = self._file
        there = file is not None and file.exists
        self._card.visible = there
        if file is None or not there:
            put(self._ledger, "")
            return
        verdict = "" if self._only.value == "all" else self._only.value
        try:
            first = max(1, self._at.value or 1)
            total, rows = file.page(self._search.value.strip(), verdict, first - 1, PAGE_ROWS)
        except (sqlite3.Error, OSError) as error:
            put(self._ledger, html.page(f"<p class='bad'>{html.said(f'it cannot be read: {error}')}</p>"))
            return
        kind = " of this kind" if verdict or self._search.value else ""
        if rows:
            said = f"rows {first:,} to {first + len(rows) - 1:,} of {total:,}{kind}"
        else:
            said = f"no row {first:,}: there are {total:,}{kind}" if total else "no such row"
        put(self._ledger, html.page(html.nothing(said) + (html.table(rows) if rows else "")))
