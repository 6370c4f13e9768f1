"""Pieces of pages as strings. Every text from a model, a file or a user goes through `said`, which escapes it."""

from __future__ import annotations

import html
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from firstlight.engine.findings import Finding, printable
from firstlight.workbench.figures import colour
from firstlight.workbench.render import words
from firstlight.workbench.render.terminal import finding_fields, says_something
from firstlight.workbench.report import Metric

SHORT = 36  # characters that stay on one line
LONG = 72  # and beyond so many a text is a paragraph, which must not become a tall column
MOST_ROWS = 500
ENDS = re.compile(r"([./_-])(?=\w)")
STATUSES = ("passed", "failed", "refused", "skipped")


def said(text: object) -> str:
    """Foreign text: markup is escaped, characters that would change how the rest reads are spelt out."""
    return html.escape(printable(str(text)))


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


def status(word: str) -> str:
    return f'<span class="status {said(word)}">{said(word)}</span>'


def figures(items: Iterable[tuple[str, str]]) -> str:
    """Large figures with their names: (name, value in words)."""
    cells = "".join(f"<div><b>{said(value)}</b><span>{said(name)}</span></div>" for name, value in items)
    return f'<div class="figures">{cells}</div>'


def metrics(found: Mapping[str, Metric], prefix: str = "") -> str:
    """The metrics of a report as large figures, those with a text for a value as lines below. A unit stands once."""
    shown = {name: one for name, one in found.items() if one.value is not None and name.startswith(prefix)}
    items = [(name, one) for name, one in shown.items() if words.is_number(one.value)]
    lines = [(name, one) for name, one in shown.items() if not words.is_number(one.value)]
    large = figures((_plain_name(name), _measured(name, one)) for name, one in items) if items else ""
    small = "".join(
        f'<p><span class="quiet">{said(words.heading(name))}:</span> {said(words.quantity(one.value, one.unit))}</p>'
        for name, one in lines
    )
    return large + (f'<div class="spaced">{small}</div>' if small else "")


def _plain_name(name: str) -> str:
    """The name without its unit, which stands with the value."""
    return words.heading(name).partition(" (")[0].removesuffix(" tokens per s")


def _measured(name: str, metric: Metric) -> str:
    value, unit = metric.value, metric.unit
    if unit in ("share", "x") and "share" in (unit, *name.split("_")) and isinstance(value, int | float):
        return words.quantity(value, "share")
    return words.quantity(value, "" if words.heading(name).endswith(unit) else unit)


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None, most: int = MOST_ROWS) -> str:
    """Rows by column; columns that say nothing are left out, numbers stand right, long tables are cut and say so."""
    found = list(columns or dict.fromkeys(key for row in rows for key in row))
    shown = [column for column in found if says_something(column, [dict(row) for row in rows])]
    kinds = {c: "n" if any(words.is_number(row.get(c)) for row in rows) else "" for c in shown}
    names = {c: words.heading(c.removesuffix("_bytes_per_s")) for c in shown}
    head = "".join(f'<th class="{kinds[c]}" scope="col">{said(names[c])}</th>' for c in shown)
    body = "".join(
        "<tr>" + "".join(_cell(c, _in_words(c, row.get(c)), kinds[c]) for c in shown) + "</tr>" for row in rows[:most]
    )
    more = nothing(f"and {len(rows) - most:,} more rows") if len(rows) > most else ""
    return f'<div class="scroll" tabindex="0"><table><tr>{head}</tr>{body}</table></div>{more}'


def _in_words(column: str, value: Any) -> str:
    """A value by its column's name: rates of bytes with prefixes, shares as percentages, else as everywhere."""
    if words.is_number(value) and column.endswith("_bytes_per_s"):
        return words.quantity(value, "B/s")
    if (
        words.is_number(value)
        and not column.startswith("share_")
        and (column.endswith("_of_limit") or column == "overlapped")
    ):
        return words.quantity(value, "%")
    if words.is_number(value) and column.endswith("_s") and 0 < abs(value) < 1e-3:
        return words.quantity(value, "s")
    return words.cell(column, value)


def _cell(column: str, text: str, kind: str) -> str:
    kind = kind or ("t" if len(text) <= SHORT else "w" if len(text) <= LONG else "w x")
    inner = status(text) if column == "status" and text in STATUSES else said(text)
    if kind.startswith("w"):
        inner = ENDS.sub(r"\1<wbr>", inner)  # names are broken where their parts end
    return f'<td class="{kind}">{inner}</td>'


def findings(found: Sequence[Finding]) -> str:
    """Findings, the fatal ones first, each with what to do next."""
    order = {"fatal": 0, "warning": 1, "note": 2}
    rows = []
    for finding in sorted(found, key=lambda one: order.get(one.severity, 3)):
        lines = [f"<b>{said(finding.code)}</b>: {said(finding.message)}"]
        lines += [f'<span class="quiet">{said(name)}:</span> {said(value)}' for name, value in finding_fields(finding)]
        rows.append(f"<tr><td class='t'>{status(finding.severity)}</td><td>{'<br>'.join(lines)}</td></tr>")
    return f'<div class="scroll" tabindex="0"><table>{"".join(rows)}</table></div>' if rows else nothing("no findings")


def track(share: float, colour_: str = "") -> str:
    """A bar that is `share` (0 to 1) full."""
    style = f"width:{100 * min(1.0, max(0.0, share)):.1f}%" + (f";background:{colour_}" if colour_ else "")
    return f'<div class="track"><i style="{style}"></i></div>'


def legend(parts: Iterable[str]) -> str:
    return "".join(
        f'<span class="key"><i style="background:{colour(part, index)}"></i>{said(part)}</span>'
        for index, part in enumerate(parts)
    )


def stacked(rows: Sequence[tuple[str, Mapping[str, float], str]], longest: float | None = None) -> str:
    """Bars made of parts: (name, part -> size, the total in words), all on one scale."""
    parts = list(dict.fromkeys(part for _, pieces, _ in rows for part in pieces))
    colours = {part: colour(part, index) for index, part in enumerate(parts)}
    scale = longest or max((sum(pieces.values()) for _, pieces, _ in rows), default=0.0) or 1.0
    cells = []
    for name, pieces, total in rows:
        inner = "".join(
            f'<i style="width:{100 * size / scale:.3f}%;background:{colours[part]}" title="{said(part)}"></i>'
            for part, size in pieces.items()
            if size > 0
        )
        cells.append(
            f'<span class="name" title="{said(name)}">{said(name)}</span><div class="track">{inner}</div>'
            f'<span class="num">{said(total)}</span>'
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
