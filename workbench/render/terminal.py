"""A report as text: aligned, calm, within the width of the terminal. rich is imported when first needed."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from firstlight.engine.findings import Finding
from firstlight.workbench.render import words
from firstlight.workbench.report import Check, Metric, Report

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

STYLES = {
    "passed": "green",
    "failed": "bold red",
    "refused": "bold red",
    "skipped": "dim",
    "fatal": "bold red",
    "warning": "yellow",
    "note": "dim",
}
MOST_ROWS = 32
INDENT = (0, 0, 0, 2)


def print_report(report: Report, console: Console) -> None:
    """Prints every part of the report that has something in it."""
    for part in _parts(report):
        console.print(part)


def report_text(report: Report, width: int = 100) -> str:
    """The report as plain text."""
    from rich.console import Console

    stream = io.StringIO()
    print_report(report, Console(file=stream, width=width, color_system=None, force_terminal=False))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def _parts(report: Report) -> Iterator[RenderableType]:
    from rich.rule import Rule
    from rich.text import Text

    yield Rule(style="dim")
    head = Text.assemble((report.verb, "bold"), "  ", report.title, "  ")
    head.append(report.status, STYLES[report.status])
    if report.status != "refused":
        head.append(f" in {words.seconds(report.duration_s)}")
    if report.forced:
        head.append("  forced: on top of a rung that did not pass", "yellow")
    yield head
    if report.checks:
        yield _block("checks", _checks(report.checks))
    if report.metrics:
        yield _block("figures", _metrics(report.metrics))
    for name, rows in report.tables.items():
        if rows:
            yield _block(name.replace("_", " "), _table(rows))
    if report.findings:
        yield _block("findings", _findings(report.findings))


def _block(title: str, body: RenderableType) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    return Group(Text(""), Text(title, style="dim"), Padding(body, INDENT))


def _grid(*columns: dict[str, Any]) -> Any:
    from rich.table import Table

    grid = Table.grid(padding=(0, 2, 0, 0))
    for column in columns:
        grid.add_column(**column)
    return grid


def _checks(checks: Sequence[Check]) -> RenderableType:
    from rich.text import Text

    grid = _grid({"no_wrap": True}, {}, {"justify": "right"}, {})
    for check in checks:
        value = words.quantity(check.value, check.unit) if check.value is not None else ""
        limit = f"limit {words.quantity(check.limit, check.unit)}" if check.limit is not None else ""
        said = "; ".join(filter(None, (limit, check.detail)))
        grid.add_row(Text(check.status, STYLES[check.status]), Text(check.name), Text(value), Text(said, "dim"))
    return grid


def _metrics(metrics: dict[str, Metric]) -> RenderableType:
    from rich.text import Text

    grid = _grid({}, {"justify": "left"}, {})
    for name, metric in metrics.items():
        value = words.quantity(metric.value, metric.unit) if metric.value is not None else "not available"
        grid.add_row(Text(words.heading(name)), Text(value), Text(metric.detail, "dim"))
    return grid


def _table(rows: list[dict[str, Any]]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    columns = list(dict.fromkeys(key for row in rows for key in row))
    numeric = {column: any(words.is_number(row.get(column)) for row in rows) for column in columns}
    grid = _grid(*({"justify": "right" if numeric[column] else "left"} for column in columns))
    grid.add_row(*(Text(words.heading(column), "dim") for column in columns))
    for row in rows[:MOST_ROWS]:
        grid.add_row(*(Text(words.cell(column, row.get(column))) for column in columns))
    if len(rows) <= MOST_ROWS:
        return grid
    return Group(grid, Text(f"and {len(rows) - MOST_ROWS:,} more rows in the JSON report", "dim"))


def _findings(findings: Sequence[Finding]) -> RenderableType:
    from rich.text import Text

    grid = _grid({"no_wrap": True}, {})
    for finding in findings:
        body = Text(f"{finding.code}: {finding.message}")
        for name, value in finding_fields(finding):
            body.append(f"\n{name}: ", "dim").append(value)
        grid.add_row(Text(finding.severity, STYLES[finding.severity]), body)
    return grid


def finding_fields(finding: Finding) -> Iterator[tuple[str, str]]:
    """The parts of a finding that it has, in the order they are read."""
    if finding.file and finding.file not in finding.message:
        yield "file", finding.file
    if finding.tensors:
        yield "tensors", words.shorten(finding.tensors)
    if finding.expected is not None:
        yield "expected", finding.expected
    if finding.found is not None:
        yield "found", finding.found
    if finding.next:
        yield "next", finding.next
