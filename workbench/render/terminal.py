"""A report as text: aligned, calm, within the width of the terminal. rich is imported when first needed."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from firstlight.engine.findings import Finding, printable
from firstlight.engine.parallel.mesh import AXES
from firstlight.workbench.render import words
from firstlight.workbench.render.names import Cell, broken
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
MOST_ROWS = 24
NARROW_TEXT = 24
LONG_VALUE = 24
STATUS_WIDTH = 9
GAP = 2
PLACES = ("rank", *AXES)  # columns that say where a rank is
LEFT_TO_THE_FILE = ("hashes", "timeline")  # tables that nobody reads in a terminal
INDENT = (0, 0, 0, 2)


def print_report(report: Report, console: Console) -> None:
    """Prints every part of the report that has something in it."""
    for part in _parts(report, console.width):
        console.print(part)


def report_text(report: Report, width: int = 100) -> str:
    """The report as plain text."""
    from rich.console import Console

    stream = io.StringIO()
    plain = Console(file=stream, width=width, color_system=None, force_terminal=False, force_jupyter=False)
    print_report(report, plain)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def _parts(report: Report, width: int) -> Iterator[RenderableType]:
    """Tables first and the verdict last: the end is what stays in view."""
    from rich.rule import Rule
    from rich.text import Text

    yield Rule(Text.assemble((report.verb, "bold"), "  ", printable(report.title)), align="left", style="dim")
    for name, rows in report.tables.items():
        if rows and name not in LEFT_TO_THE_FILE:
            yield _block(words.heading(name), _table(rows, width))
    if report.metrics:
        yield _block("figures", _metrics(report.metrics, width))
    if report.findings:
        yield _block("findings", _findings(report.findings, width))
    if report.checks:
        yield _block("checks", _checks(report.checks, width))
    yield Text("")
    yield _verdict(report)


def _verdict(report: Report) -> RenderableType:
    from rich.text import Text

    line = Text.assemble(
        (report.status, STYLES[report.status]), "  ", (report.verb, "bold"), "  ", printable(report.title)
    )
    failed = sum(check.status == "failed" for check in report.checks)
    if report.checks:
        line.append(f"  {len(report.checks) - failed} of {len(report.checks)} checks")
    line.append(f"  {words.seconds(report.duration_s)}", "dim")
    if report.forced:
        line.append("  forced: on top of a rung that did not pass", "yellow")
    return line


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


def _checks(checks: Sequence[Check], width: int) -> RenderableType:
    """Status, name, value and limit in columns; then the detail, on the same line if there is room, else below.

    Where the width is too small for the limits beside the values, they go below too.
    """
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    rows = [_check_words(check) for check in checks]
    name_width = max(len(name) for name, *_ in rows)
    value_width = max(len(value) for _, value, *_ in rows)
    limit_width = max(len(limit) for *_, limit, _ in rows)
    room = width - INDENT[3]
    if STATUS_WIDTH + name_width + value_width + limit_width + 2 * GAP > room:
        rows = [(name, value, "", "; ".join(filter(None, (limit, detail)))) for name, value, limit, detail in rows]
        limit_width = 0
    parts: list[RenderableType] = []
    for check, (name, value, limit, detail) in zip(checks, rows, strict=True):
        line = Text.assemble((f"{check.status:<{STATUS_WIDTH}}", STYLES[check.status]), f"{name:<{name_width}}  ")
        line.append(f"{value:>{value_width}}").append(f"  {limit:<{limit_width}}" if limit_width else "", "dim")
        if detail and line.cell_len + GAP + len(detail) <= room:
            line.append(f"  {detail}", "dim")
            detail = ""
        line.rstrip()
        parts += [line, *([Padding(Text(detail, "dim"), (0, 0, 0, STATUS_WIDTH))] if detail else [])]
    return Group(*parts)


def _check_words(check: Check) -> tuple[str, str, str, str]:
    """Name, value, limit and detail of a check; the limit leaves out a unit that the value has said."""
    value = words.quantity(check.value, check.unit) if check.value is not None else ""
    limit = ""
    if check.limit is not None:
        unit = check.unit if check.value is None or words.is_scaled(check.unit) else ""
        limit = f"limit {words.quantity(check.limit, unit)}"
    if len(value) > LONG_VALUE:
        return printable(check.name), "", limit, printable("; ".join(filter(None, (value, check.detail))))
    return printable(check.name), value, limit, printable(check.detail)


def _metrics(metrics: dict[str, Metric], width: int) -> RenderableType:
    """Name, value and detail in columns; below them what is long, a path or a hash, each on a line of its own."""
    from rich.console import Group
    from rich.text import Text

    names = words.titles({name: metric.unit for name, metric in metrics.items()})
    rows = [
        (
            name,
            words.quantity(metric.value, metric.unit) if metric.value is not None else "not available",
            printable(metric.detail),
        )
        for name, metric in zip(names, metrics.values(), strict=True)
    ]
    name_width = max(len(name) for name, *_ in rows)
    grid = _grid({"min_width": min(NARROW_TEXT, name_width)}, {"no_wrap": True}, {})
    parts: list[RenderableType] = []
    for name, value, detail in rows:
        if len(value) <= LONG_VALUE:
            grid.add_row(Text(name), Text(value), Text(detail, "dim"))
        else:
            parts += _long(name, value, detail, min(NARROW_TEXT, name_width), width - INDENT[3])
    return Group(*([grid] if grid.row_count else []), *parts)


def _long(name: str, value: str, detail: str, name_width: int, room: int) -> Iterator[RenderableType]:
    """A long value beside its name, in one piece where there is room; its detail behind it, or below."""
    from rich.padding import Padding
    from rich.text import Text

    first, *others = broken(value, room - max(name_width, len(name)) - GAP)
    line = Text(f"{name:<{name_width}}").append(" " * GAP).append(first)
    left = line.cell_len - len(first)
    if detail and not others and line.cell_len + GAP + len(detail) <= room:
        line.append(" " * GAP).append(detail, "dim")
        detail = ""
    yield line
    for more in others:
        yield Padding(Text(more), (0, 0, 0, left))
    if detail:
        yield Padding(Text(detail, "dim"), (0, 0, 0, left))


def _table(rows: list[dict[str, Any]], width: int) -> RenderableType:
    """Rows by column, ranks that say the same in one row.

    A table too wide for the terminal is turned, its columns one below the other; where that is too wide as well it goes
    on below, the columns repeated that tell its rows apart.
    """
    from rich.console import Group
    from rich.text import Text

    columns = [column for column in dict.fromkeys(key for row in rows for key in row) if says_something(column, rows)]
    rows, room = joined(rows), width - INDENT[3]
    shown = rows[:MOST_ROWS]
    groups = _column_groups(columns, shown, room)
    if len(groups) > 1 and len(shown) == len(rows) and (turned := _turned(columns, rows, room)) is not None:
        return turned
    parts: list[RenderableType] = []
    for group in groups:
        parts += [Text("")] if parts else []
        parts.append(_part_of_table(group, shown))
    if len(rows) > MOST_ROWS:
        parts.append(Text(f"and {len(rows) - MOST_ROWS:,} more rows in the JSON report", "dim"))
    return Group(*parts)


def joined(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of ranks that follow one another and say the same, but for where they are, become one: rank 0 to 7."""
    groups: list[list[dict[str, Any]]] = []
    for row in rows:
        if groups and "rank" in row and _without_place(groups[-1][0]) == _without_place(row):
            groups[-1].append(row)
        else:
            groups.append([row])
    return [{name: _together(name, [row.get(name) for row in group]) for name in group[0]} for group in groups]


def _without_place(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in PLACES}


def _together(name: str, values: list[Any]) -> Any:
    """One value for several: of a place the numbers from the least to the largest, else what they all are."""
    if name not in PLACES or len(found := sorted(set(values))) == 1:
        return values[0]
    is_whole = len(found) == found[-1] - found[0] + 1
    return f"{found[0]} to {found[-1]}" if is_whole else ", ".join(map(str, found))


def _turned(columns: list[str], rows: list[dict[str, Any]], room: int) -> RenderableType | None:
    """A line for each column; None where the rows do not fit beside each other."""
    from rich.text import Text

    names = [words.heading(column) for column in columns]
    texts = [[words.cell(column, row.get(column)) for column in columns] for row in rows]
    if sum(max(map(len, line)) + GAP for line in (names, *texts)) > room:
        return None
    grid = _grid({}, *({"justify": "right" if len(rows) > 1 else "left"} for _ in rows))
    for name, *values in zip(names, *texts, strict=True):
        grid.add_row(Text(name, "dim"), *map(Text, values))
    return grid


def says_something(column: str, rows: list[dict[str, Any]]) -> bool:
    """Whether a column is worth its place: any value but nothing, and bytes that are not all zero."""
    values = [row.get(column) for row in rows]
    if column.endswith("_bytes") and not any(values):
        return False
    return any(value is not None and value != "" for value in values)


def _column_groups(columns: list[str], rows: list[dict[str, Any]], width: int) -> list[list[str]]:
    """Columns in groups that fit the width; numbers are never broken, text may be down to `NARROW_TEXT`."""
    widths = {}
    for column in columns:
        cells = [words.heading(column), *(words.cell(column, row.get(column)) for row in rows)]
        natural = max(map(len, cells))
        is_text = not any(words.is_number(row.get(column)) for row in rows)
        widths[column] = (min(natural, NARROW_TEXT) if is_text else natural) + GAP
    repeated = _telling(columns, rows, widths, width)
    groups, used = [[*repeated]], sum(widths[column] for column in repeated)
    for column in columns[len(repeated) :]:
        if used + widths[column] > width and len(groups[-1]) > len(repeated):
            groups.append([*repeated])
            used = sum(widths[column] for column in repeated)
        groups[-1].append(column)
        used += widths[column]
    return groups


def _telling(columns: list[str], rows: list[dict[str, Any]], widths: Mapping[str, int], width: int) -> list[str]:
    """The first columns, as many as tell every row from the others; one where they take more than half of the width."""
    for count in range(1, len(columns)):
        first = columns[:count]
        if sum(widths[column] for column in first) > width // 2:
            break
        if len({tuple(str(row.get(column)) for column in first) for row in rows}) == len(rows):
            return first
    return columns[:1]


def _part_of_table(columns: list[str], rows: list[dict[str, Any]]) -> RenderableType:
    from rich.text import Text

    numeric = {column: any(words.is_number(row.get(column)) for row in rows) for column in columns}
    grid = _grid(
        *({"justify": "right", "no_wrap": True} if numeric[column] else {"overflow": "fold"} for column in columns)
    )
    grid.add_row(*(Text(words.heading(column), "dim") for column in columns))
    for row in rows:
        cells = {column: words.cell(column, row.get(column)) for column in columns}
        grid.add_row(*(Text(text) if numeric[column] else Cell(text, NARROW_TEXT) for column, text in cells.items()))
    return grid


def _findings(findings: Sequence[Finding], width: int) -> RenderableType:
    from rich.text import Text

    grid = _grid({"no_wrap": True}, {"overflow": "fold"})
    room = max(NARROW_TEXT, width - INDENT[3] - max(len(finding.severity) for finding in findings) - GAP)
    for finding in findings:
        body = Text(_with_breaks(printable(f"{finding.code}: {finding.message}"), room))
        for name, value in finding_fields(finding):
            body.append(f"\n{name}: ", "dim").append(_with_breaks(value, room))
        grid.add_row(Text(finding.severity, STYLES[finding.severity]), body)
    return grid


def _with_breaks(text: str, room: int) -> str:
    """The text with line ends in words that are longer than a line, where parts of names end."""
    return " ".join(word if len(word) <= room else "\n".join(broken(word, room)) for word in text.split(" "))


def finding_fields(finding: Finding) -> Iterator[tuple[str, str]]:
    """The parts of a finding that it has and that its message does not say already, in the order they are read."""
    if finding.file and finding.file not in finding.message:
        yield "file", printable(finding.file)
    if finding.tensors:
        yield "tensors", words.shorten(finding.tensors, more=finding.more_tensors)
    if finding.expected is not None and finding.expected not in finding.message:
        yield "expected", printable(finding.expected)
    if finding.found is not None and finding.found != "absent" and finding.found not in finding.message:
        yield "found", printable(finding.found)
    if finding.next:
        yield "next", printable(finding.next)
