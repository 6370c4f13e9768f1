"""A report as HTML for a notebook: everything escaped, styles of its own, readable on light and dark."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from firstlight.engine.findings import printable
from firstlight.workbench.render import columns, words
from firstlight.workbench.render.terminal import finding_fields, says_something
from firstlight.workbench.report import Report

MOST_ROWS = 200
FOLDED_FROM = 16
SHORT_TEXT, LONG_TEXT = 28, 72  # characters that stay on one line; that want the width of a paragraph
MOST_CHECKS = 24  # beyond so many, those that passed are folded

# Verdicts on a light ground and on a dark one, 4.5 : 1 on either (WCAG 2.1, 1.4.3): no one colour is that on both.
ON_LIGHT = {"good": "#1f7a43", "bad": "#b9252c", "warn": "#855800"}
ON_DARK = {"good": "#56c283", "bad": "#ff8080", "warn": "#dba63a"}


def themed(place: str) -> str:
    """Rules that give elements of a class the colours of verdicts, as `--fl-good`, `--fl-bad` and `--fl-warn`.

    JupyterLab and its saved pages say on `body` whether they are light, VS Code by a class; any other page follows the
    reader's system.
    """
    light, dark = (";".join(f"--fl-{name}:{value}" for name, value in one.items()) for one in (ON_LIGHT, ON_DARK))
    in_dark = f'[data-jp-theme-light="false"] {place},.vscode-dark {place},.vscode-high-contrast {place}'
    elsewhere = f"body:not([data-jp-theme-light],.vscode-light) {place}"
    return (
        f"{place}{{{light}}}{in_dark}{{{dark}}}\n@media (prefers-color-scheme:dark){{{elsewhere}{{{dark}}}}}\n"
        f"@media print{{body {place}{{{light}}}}}\n"
    )


STYLE = (
    themed(".firstlight")
    + """
.firstlight{font-family:system-ui,sans-serif;font-size:13px;line-height:1.45;color:inherit;max-width:72rem}
.firstlight h4{font-size:15px;margin:.4rem 0 .6rem;font-weight:600}
.firstlight h5{font-size:12px;margin:.9rem 0 .25rem;font-weight:600;opacity:.7;text-transform:none}
.firstlight table{border-collapse:collapse;margin:0!important;background:none}
.firstlight tr,.firstlight tr:nth-child(n){background:none!important}
.firstlight summary{cursor:pointer;opacity:.8}
.firstlight th,.firstlight td{padding:.18rem .9rem .18rem 0;border:0;border-bottom:1px solid rgba(127,127,127,.22);
text-align:left!important;vertical-align:top!important;background:none;color:inherit;white-space:normal;max-width:36rem}
.firstlight th{font-weight:500;opacity:.7}
.firstlight td.n,.firstlight th.n{text-align:right!important;font-variant-numeric:tabular-nums;white-space:nowrap}
.firstlight td.t,.firstlight .when{white-space:nowrap}
.firstlight td.w{min-width:12rem;overflow-wrap:anywhere}.firstlight td.x{min-width:15rem;overflow-wrap:anywhere}
.firstlight .s{display:inline-block;min-width:4.2em;font-weight:600}
.firstlight .passed{color:var(--fl-good)}.firstlight .warning{color:var(--fl-warn)}
.firstlight .failed,.firstlight .refused,.firstlight .fatal{color:var(--fl-bad)}
.firstlight .skipped,.firstlight .note{color:inherit;opacity:.65}
.firstlight .quiet{opacity:.7}
.firstlight .scroll{overflow-x:auto}
"""
)


def report_html(report: Report) -> str:
    """The whole report as one element."""
    return f'<div class="firstlight"><style>{STYLE}</style>{"".join(_parts(report))}</div>'


def reports_page(title: str, reports: Iterable[Report]) -> str:
    """A page of its own with several reports, one below the other; it follows the reader's light or dark theme."""
    body = "<hr>".join(report_html(report) for report in reports)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_said(title)}</title>'
        "<style>:root{color-scheme:light dark}body{margin:2rem;font-family:system-ui,sans-serif}"
        "hr{border:0;border-top:1px solid rgba(127,127,127,.4);margin:2rem 0}</style></head>"
        f"<body><h1>{_said(title)}</h1>{body}</body></html>\n"
    )


def _parts(report: Report) -> Iterator[str]:
    is_timed = report.status != "refused" and report.duration_s >= 1e-3
    when = f' <span class="quiet when">in {words.seconds(report.duration_s)}</span>' if is_timed else ""
    forced = ' <span class="warning">forced: on top of a rung that did not pass</span>' if report.forced else ""
    status = f'<span class="{report.status}">{report.status}</span>'
    yield f"<h4>{_said(report.verb)} · {_said(report.title)} · {status}{when}{forced}</h4>"
    if report.checks:
        yield _section("checks", _checks(report))
    if report.findings:
        yield _section("findings", _findings(report))
    if report.metrics:
        yield _section("figures", _metrics(report))
    for name, rows in report.tables.items():
        if rows:
            yield _section(name.replace("_", " "), _folded(rows))


def _section(title: str, body: str) -> str:
    return f'<h5>{_said(title)}</h5><div class="scroll">{body}</div>'


def _folded(rows: list[dict[str, Any]]) -> str:
    """A long table is folded, so that what was checked stays in sight; it opens without scripts."""
    body = table_html(rows)
    return body if len(rows) <= FOLDED_FROM else f"<details><summary>{len(rows):,} rows</summary>{body}</details>"


def _rows(rows: Iterable[Iterable[str]]) -> str:
    return "<table>" + "".join(f"<tr>{''.join(cells)}</tr>" for cells in rows) + "</table>"


def _td(text: str, kind: str = "") -> str:
    if kind != "n":
        width = "t" if len(text) <= SHORT_TEXT else "w" if len(text) <= LONG_TEXT else "x"
        kind = f"{kind} {width}".strip()
    said = _said(text) if kind.endswith(("n", "t")) else words.ENDS.sub(r"\1<wbr>", _said(text))
    return f'<td class="{kind}">{said}</td>'


def _checks(report: Report) -> str:
    rows: dict[bool, list[tuple[str, ...]]] = {False: [], True: []}  # by whether it may be folded
    for check in report.checks:
        value = words.quantity(check.value, check.unit) if check.value is not None else ""
        limit = f"limit {words.quantity(check.limit, check.unit)}" if check.limit is not None else ""
        said = "; ".join(filter(None, (limit, check.detail)))
        status = f'<td><span class="s {check.status}">{check.status}</span></td>'
        cells = status, _td(check.name), _td(value, "n"), _td(said, "quiet")
        rows[check.status == "passed" and len(report.checks) > MOST_CHECKS].append(cells)
    passed = rows[True]
    folded = f"<details><summary>{len(passed):,} passed</summary>{_rows(passed)}</details>" if passed else ""
    return (_rows(rows[False]) if rows[False] else "") + folded


def _metrics(report: Report) -> str:
    rows = []
    names = words.titles({name: metric.unit for name, metric in report.metrics.items()})
    for name, metric in zip(names, report.metrics.values(), strict=True):
        value = words.quantity(metric.value, metric.unit) if metric.value is not None else "not available"
        kind = "n" if words.is_number(metric.value) else ""
        rows.append((_td(name), _td(value, kind), _td(metric.detail, "quiet")))
    return _rows(rows)


def table_html(rows: list[dict[str, Any]]) -> str:
    """Rows by column as a table, the numbers of a column with as many decimals; long ones are cut, and say so."""
    found = [column for column in dict.fromkeys(key for row in rows for key in row) if says_something(column, rows)]
    made = [_column(column, [row.get(column) for row in rows[:MOST_ROWS]]) for column in found]
    head = "".join(f'<th class="{kind}">{_said(name)}</th>' for name, kind, _ in made)
    body = "".join(f"<tr>{''.join(cells)}</tr>" for cells in zip(*(cells for _, _, cells in made), strict=True))
    more = f'<div class="quiet">and {len(rows) - MOST_ROWS:,} more rows</div>' if len(rows) > MOST_ROWS else ""
    return f"<table><tr>{head}</tr>{body}</table>{more}"


def _column(column: str, values: list[Any]) -> tuple[str, str, list[str]]:
    """A column as its heading, the class of its numbers, if it has some, and its cells."""
    kind = "n" if any(map(words.is_number, values)) else ""
    name, texts = columns.cells(column, values)
    return name, kind, [_td(text, kind) for text in texts]


class RowsView:
    """Rows as a notebook shows them: a table of its own, with the look of a report."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self.rows = [dict(row) for row in rows]

    def _repr_html_(self) -> str:
        return f'<div class="firstlight"><style>{STYLE}</style><div class="scroll">{table_html(self.rows)}</div></div>'


def _findings(report: Report) -> str:
    rows = []
    for finding in report.findings:
        lines = [_said(f"{finding.code}: {finding.message}")]
        lines += [f'<span class="quiet">{name}:</span> {_said(value)}' for name, value in finding_fields(finding)]
        severity = f'<td><span class="s {finding.severity}">{finding.severity}</span></td>'
        rows.append((severity, f"<td>{'<br>'.join(lines)}</td>"))
    return _rows(rows)


def _said(text: str) -> str:
    """Foreign text for a page: characters that would change how the rest reads are spelt out, markup is escaped."""
    return html.escape(printable(text))
