"""Pieces of pages as strings. Every text from a model, a file or a user goes through `said`, which escapes it."""

from __future__ import annotations

import html
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from firstlight.engine.findings import Finding, printable
from firstlight.workbench.figures import colour
from firstlight.workbench.render import columns, words
from firstlight.workbench.render.terminal import finding_fields, says_something
from firstlight.workbench.report import Metric

WORD = 14  # characters that stay on one line on the narrowest screen
SHORT = 36  # and on any other
LONG = 72  # and beyond so many a text is a paragraph, which must not become a tall column
MOST_ROWS = 500
MANY = 8  # columns, beyond which they stand closer
MEASURED = re.compile(r"[\d.,e+-]*\d (?:(?:(?:[KMGTP]i)?B(?:/s)?|s|ms|µs|nat)\b|%)")  # a number and its unit
STATUSES = ("passed", "failed", "refused", "skipped", "differs", "running")


class Link(NamedTuple):
    """A text that leads somewhere on the dashboard: what comes behind `?` in the address."""

    text: str
    query: str


class Line(NamedTuple):
    """A command, which stays on one line where there is little room: it is read by moving the table."""

    text: str


class Figure(NamedTuple):
    """A number in words with its unit, which stands right like numbers."""

    text: str


def said(text: object) -> str:
    """Foreign text: markup is escaped, characters that would change how the rest reads are spelt out."""
    return html.escape(printable(str(text)))


def with_units(text: object) -> str:
    """Foreign text in which numbers stay on one line with their units."""
    return MEASURED.sub(r'<span class="whole">\g<0></span>', said(text))


def page(*parts: str) -> str:
    return f'<div class="fl">{"".join(parts)}</div>'


def card(title: str, body: str, kind: str = "") -> str:
    """`kind` is a class name of ours, such as `alarm`."""
    head = f"<h2>{said(title)}</h2>" if title else ""
    return f'<section class="card {kind}">{head}{body}</section>'


def named(name: str, body: str) -> str:
    """A card of a report's table, by the table's name."""
    head = words.heading(name)
    return card(head[:1].upper() + head[1:], body)


def nothing(text: str) -> str:
    """What stands where there is nothing to show, and how to get it."""
    return f'<p class="quiet">{said(text)}</p>'


def commands(*lines: str) -> str:
    """Commands to be copied; where a line is broken, an option stays whole."""
    return f"<pre>{chr(10).join(map(_command, lines))}</pre>"


def _command(line: str) -> str:
    return " ".join(
        f'<span class="whole">{said(word)}</span>' if word.startswith("-") else said(word) for word in line.split(" ")
    )


def status(word: str) -> str:
    return f'<span class="status {said(word)}">{said(word)}</span>'


def figures(items: Iterable[tuple[str, str]]) -> str:
    """Large figures with their names: (name, value in words)."""
    cells = "".join(f"<div><dd>{said(value)}</dd><dt>{said(name)}</dt></div>" for name, value in items)
    return f'<dl class="figures">{cells}</dl>'


def metrics(found: Mapping[str, Metric], prefix: str = "") -> str:
    """The metrics of a report as large figures, those with a text for a value as lines below. A unit stands once."""
    shown = {name: one for name, one in found.items() if one.value is not None and name.startswith(prefix)}
    items = [(name, one) for name, one in shown.items() if words.is_number(one.value)]
    lines = [(name, one) for name, one in shown.items() if not words.is_number(one.value)]
    names = _names_of(found)
    cells = [(names[name], _measured(name, one)) for name, one in items]
    large = figures(cells) if cells else ""
    small = "".join(
        f'<p><span class="quiet">{said(words.heading(name))}:</span> {said(words.quantity(one.value, one.unit))}</p>'
        for name, one in lines
    )
    return large + (f'<div class="spaced">{small}</div>' if small else "")


def explained(found: Mapping[str, Metric], names: Sequence[str]) -> str:
    """What some metrics mean, in a line each: by the words of their report."""
    known = _names_of(found)
    lines = [(known[name], found[name].detail) for name in names if name in found and found[name].detail]
    inner = "".join(f"<div><b>{said(name)}</b>: {said(detail)}</div>" for name, detail in lines)
    return f'<div class="quiet spaced">{inner}</div>' if inner else ""


def _names_of(found: Mapping[str, Metric]) -> dict[str, str]:
    """Names without their units, which stand with the values; of those that would be the same with what tells apart."""
    numbers = [name for name, one in found.items() if words.is_number(one.value)]
    plain = {name: words.heading(name).partition(" (")[0].removesuffix(" tokens per s") for name in found}
    many = [plain[name] for name in numbers]
    return {
        name: words.told_apart(known, found[name].unit) if many.count(known) > 1 else known
        for name, known in plain.items()
    }


def _measured(name: str, metric: Metric) -> str:
    is_named = metric.unit != "share" and words.heading(name).endswith(metric.unit)
    return amount(metric.value, "" if is_named else metric.unit)


def amount(value: Any, unit: str = "") -> str:
    """A value with its unit; times below a second in the unit in which they are read."""
    if unit in ("s", "ms") and words.is_number(value):
        seconds = value / (1e3 if unit == "ms" else 1)
        unit, scale = columns.time_unit(abs(seconds)) if seconds else (unit, 1.0)
        return f"{words.number(seconds * scale)} {unit}"
    return words.quantity(value, unit)


def table(rows: Sequence[Mapping[str, Any]], most: int = MOST_ROWS) -> str:
    """Rows by column; columns that say nothing are left out, numbers stand right, long tables are cut and say so.

    The numbers of a column have as many decimals; what a cell rounds stands in full in its title.
    """
    found = dict.fromkeys(key for row in rows for key in row)
    shown = [column for column in found if says_something(column, [dict(row) for row in rows])]
    made = [_column(column, [row.get(column) for row in rows[:most]]) for column in shown]
    head = "".join(f'<th class="{kind}" scope="col">{said(name)}</th>' for name, kind, _ in made)
    body = "".join(f"<tr>{''.join(cells)}</tr>" for cells in zip(*(cells for _, _, cells in made), strict=True))
    more = nothing(f"and {len(rows) - most:,} more rows") if len(rows) > most else ""
    kind = " ".join(["dense"] * (len(made) > MANY) + ["compact"] * ('<td class="w' not in body))
    inner = f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return scrolled("table of " + ", ".join(name for name, _, _ in made), inner) + more


def _column(column: str, values: Sequence[Any]) -> tuple[str, str, list[str]]:
    """A column as its heading, the class of its numbers, if it has some, and its cells."""
    kind = "n" if any(words.is_number(value) or isinstance(value, Figure) for value in values) else ""
    name, found = columns.cells(column, values)
    texts = [
        value.text if isinstance(value, Link | Line | Figure) else text
        for value, text in zip(values, found, strict=True)
    ]
    return name, kind, [_cell(column, text, kind, value) for text, value in zip(texts, values, strict=True)]


def _cell(column: str, text: str, kind: str, value: Any) -> str:
    kind = kind or _kind_of(text)
    inner = status(text) if column == "status" and text in STATUSES else said(text)
    if isinstance(value, Line):
        kind, inner = f"{kind} line", _command(text)
    elif kind.startswith("w"):
        inner = _parted(text)
    if isinstance(value, Link):
        inner = f'<a href="?{said(value.query)}">{inner}</a>'
    in_full = f"{value:,}" if isinstance(value, int) else repr(value)
    is_rounded = words.is_number(value) and in_full not in (text, f"{text}.0")
    return f'<td class="{kind}"' + (f' title="{said(in_full)}"' if is_rounded else "") + f">{inner}</td>"


def _kind_of(text: str) -> str:
    """The class of a text: on one line, on one line where there is room, in lines, a paragraph."""
    if len(text) <= SHORT:
        return "t m" if len(text) > WORD and " " in text else "t"
    return "w" if len(text) <= LONG else "w x"


def _parted(text: object) -> str:
    """Foreign text in which names are broken where their parts end."""
    return words.ENDS.sub(r"\1<wbr>", said(text))


def findings(found: Sequence[Finding]) -> str:
    """Findings, the fatal ones first, each with what to do next."""
    order = {"fatal": 0, "warning": 1, "note": 2}
    rows = []
    for finding in sorted(found, key=lambda one: order.get(one.severity, 3)):
        lines = [f"<b>{said(finding.code)}</b>: {_parted(finding.message)}"]
        lines += [
            f'<span class="quiet">{said(name)}:</span> {_parted(value)}' for name, value in finding_fields(finding)
        ]
        rows.append(f"<tr><td class='t'>{status(finding.severity)}</td><td>{'<br>'.join(lines)}</td></tr>")
    return scrolled("findings", f"<table class='findings'>{''.join(rows)}</table>") if rows else nothing("no findings")


def scrolled(name: str, inner: str) -> str:
    """What may be wider or longer than its place: reached by keyboard, and named."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{said(name)}">{inner}</div>'


def track(share: float) -> str:
    """A bar that is `share` (0 to 1) full."""
    style = f"width:{100 * min(1.0, max(0.0, share)):.1f}%"
    return f'<div class="track" role="img" aria-label="{100 * share:.0f} %"><i style="{style}"></i></div>'


def legend(parts: Iterable[str]) -> str:
    return "".join(
        f'<span class="key"><i style="background:{colour(part, index)}"></i>{said(part)}</span>'
        for index, part in enumerate(parts)
    )


def stacked(
    rows: Sequence[tuple[str, Mapping[str, float], str]],
    longest: float | None = None,
    show: Callable[[float], str] = words.number,
) -> str:
    """Bars made of parts: (name, part -> size, the total in words), all on one scale; `show` words a size."""
    parts = list(dict.fromkeys(part for _, pieces, _ in rows for part in pieces))
    colours = {part: colour(part, index) for index, part in enumerate(parts)}
    scale = longest or max((sum(pieces.values()) for _, pieces, _ in rows), default=0.0) or 1.0
    cells = []
    for name, pieces, total in rows:
        there = [(part, size, f"{part} {show(size)}") for part, size in pieces.items() if size > 0]
        inner = "".join(
            f'<i style="width:{100 * size / scale:.3f}%;background:{colours[part]}" title="{said(text)}"></i>'
            for part, size, text in there
        )
        label = said(f"{name}: " + ", ".join(text for _, _, text in there))
        cells.append(
            f'<span class="name" title="{said(name)}">{said(name)}</span>'
            f'<div class="track" role="img" aria-label="{label}">{inner}</div><span class="num">{said(total)}</span>'
        )
    return f'<div>{legend(parts)}</div><div class="bars">{"".join(cells)}</div>'


def curve(times_s: Sequence[float], values: Sequence[float | None], span_s: float) -> str:
    """The path of a small curve, `span_s` seconds on 100 units, from the first time on.

    It is broken where there was no value, and where nothing was read for far longer than usual.
    """
    steps = sorted(after - before for before, after in itertools.pairwise(times_s))
    longest_s = 4 * steps[len(steps) // 2] if steps else 0.0
    there = [value for value in values if value is not None]
    low, high = min(there, default=0.0), max(there, default=1.0)
    low = min(low, 0.0) if high > 0 else low
    height = (high - low) or 1.0
    path, pen_down, before_s = [], False, times_s[0] if times_s else 0.0
    for time_s, value in zip(times_s, values, strict=True):
        pen_down, before_s = pen_down and time_s - before_s <= longest_s, time_s
        if value is None:
            pen_down = False
            continue
        x = 100 * (time_s - times_s[0]) / span_s
        path.append(f"{'L' if pen_down else 'M'}{x:.1f} {19 - 18 * (value - low) / height:.1f}")
        pen_down = True
    return " ".join(path)


def spark(path: str, since_s: float, until_s: float, span_s: float) -> str:
    """A small curve (of `curve`, begun at `since_s`) over the last `span_s` seconds."""
    left = 100 * ((until_s - since_s) / span_s - 1)
    box = f'class="spark" viewBox="{left:.1f} 0 100 20" preserveAspectRatio="none" aria-hidden="true"'
    return f'<svg {box}><path d="{path}"/></svg>'
