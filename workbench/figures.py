"""Pictures of a bring-up as pure functions: rows in, a plotly figure and its static twin out.

The twin is plain HTML with bars and numbers, so that an executed, saved or converted notebook shows every figure
without scripts. Rows are plain dicts, as in the tables of reports. plotly is imported when a live figure is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from firstlight.workbench.render import words
from firstlight.workbench.render.html import themed

Row = Mapping[str, Any]

# Okabe and Ito (2008), darkened until each stands out 3 : 1 (WCAG 2.1, 1.4.11) from the light ground and from the dark
# one; roles keep their colour in every figure. Red is left to limits and failures.
COLOURS = {
    "attention": "#0072b2",
    "mlp": "#3a9bd9",
    "expert": "#009e73",
    "router": "#a68a00",
    "embedding": "#c86fa1",
    "head": "#c98500",
    "norm": "#8f8f8f",
    "vision": "#d55e00",
    "projector": "#a65628",
    "cache": "#7a68a6",
    "state": "#9788c6",
    "workspace": "#8c8c8c",
    "free": "rgba(127,127,127,.22)",
    "compute": "#0072b2",
    "communication": "#c98500",
    "waiting": "#949494",
    "free running": "#0072b2",
    "teacher-forced": "#d55e00",
    "noise floor": "#8c8c8c",
}
BLOCKS = {"mixer": "attention", "ffn": "mlp", "embed": "embedding", "norm": "norm", "head": "head"}
"""What a block is, by the last part of its name."""
SEP = '<span class="sep">: </span>'  # read where styles are taken out, as of a notebook that is not trusted
CARD, INK = "#ffffff", "#32363a"  # a live figure brings its ground along: plotly knows nothing of the notebook's theme
MOST_PLACES = 8  # along the axis of a drawing
SPARE = ("#3b7dd8", "#d9722a", "#2f9e5b", "#9467d6", "#1f9aa8", "#d0529b", "#94881f", "#a8703f")

STYLE = (
    themed(".fl-fig")
    + """
.fl-fig{font-family:system-ui,sans-serif;font-size:13px;line-height:1.45;max-width:60rem;color:inherit}
.fl-fig h5{font-size:13px;margin:.5rem 0 .35rem;font-weight:600}
.fl-fig .row{display:grid;grid-template-columns:minmax(4rem,11rem) 1fr minmax(5rem,max-content);gap:.7rem;
align-items:center;margin:.14rem 0}
.fl-fig .bar{display:flex;height:.95rem;background:rgba(127,127,127,.13);border-radius:2px;overflow:hidden}
.fl-fig .bar i{display:block;height:100%}
.fl-fig .num{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.fl-fig .key{display:inline-flex;align-items:center;gap:.35rem;margin-right:.9rem;opacity:.85}
.fl-fig .key i{width:.7rem;height:.7rem;border-radius:2px;display:inline-block}
.fl-fig .name{overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.fl-fig.wide .row{grid-template-columns:minmax(4rem,17rem) minmax(5rem,1fr) 19rem}
.fl-fig.wide .row .num{white-space:normal}
@media (max-width:640px){.fl-fig .row,.fl-fig.wide .row{grid-template-columns:1fr max-content;gap:.1rem .7rem}
.fl-fig .bar{grid-column:1/-1;grid-row:2}.fl-fig .row .num{white-space:normal}
.fl-fig.wide .row{grid-template-columns:1fr}.fl-fig.wide .row .name{white-space:normal}
.fl-fig.wide .row .num{grid-row:3;text-align:left}}
.fl-fig .sep{display:none}
.fl-fig .drawn{overflow-x:auto}.fl-fig .drawn svg{display:block;min-width:26rem}
.fl-fig .error{color:var(--fl-bad);white-space:pre-wrap}
"""
)


@dataclass(frozen=True)
class View:
    """A figure: `live` makes the plotly figure, `html` is the static twin. A notebook shows what it can."""

    html: str
    live: Callable[[], Any]

    def figure(self) -> Any:
        """The plotly figure."""
        return self.live()

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        try:
            import plotly  # noqa: F401 - only to see whether it is there
        except ModuleNotFoundError:
            return {"text/html": self.html}
        figure = self.live().to_plotly_json()
        from plotly.utils import PlotlyJSONEncoder

        return {"application/vnd.plotly.v1+json": _plain(figure, PlotlyJSONEncoder), "text/html": self.html}


def _plain(figure: Any, encoder: Any) -> Any:
    import json

    return json.loads(json.dumps(figure, cls=encoder))


def stacked(
    title: str, rows: Sequence[Row], label: str, part: str, value: str, show: Callable[[float], str], unit: str
) -> View:
    """One bar per `label`, made of one piece per `part`, as long as `value`; `show` words a total."""
    bars: dict[str, dict[str, float]] = {}
    for row in rows:
        pieces = bars.setdefault(str(row[label]), {})
        name = str(row[part])
        pieces[name] = pieces.get(name, 0.0) + float(row[value] or 0.0)
    parts = list(dict.fromkeys(name for pieces in bars.values() for name in pieces))
    colours = {name: colour(name, index) for index, name in enumerate(parts)}
    longest = max((sum(pieces.values()) for pieces in bars.values()), default=0.0) or 1.0
    body = "".join(_bar(name, pieces, longest, colours, show) for name, pieces in bars.items())
    legend = "".join(
        f'<span class="key"><i style="background:{colours[name]}"></i>{escape(name)}</span>' for name in parts
    )
    html = _page(title, f"<div>{legend}</div>{body}")

    def live() -> Any:
        import plotly.graph_objects as go

        names = list(bars)
        figure = go.Figure(
            [
                go.Bar(
                    name=name,
                    y=names,
                    x=[bars[bar].get(name, 0.0) for bar in names],
                    orientation="h",
                    marker_color=colours[name],
                )
                for name in parts
            ]
        )
        figure.update_layout(barmode="stack", xaxis_title=unit, yaxis={"autorange": "reversed", "type": "category"})
        return dressed(figure, title, 110 + 30 * max(1, len(names)))

    return View(html, live)


def lines(title: str, x: Sequence[Any], series: Mapping[str, Sequence[float | None]], unit: str) -> View:
    """Curves over `x` on a logarithmic axis, such as errors per layer; None leaves a gap. The twin is drawn too."""
    head = "".join(f'<th style="text-align:right;padding-right:1rem">{escape(name)}</th>' for name in series)
    body = "".join(
        f"<tr><td>{escape(str(place))}</td>"
        + "".join(f'<td class="num" style="padding-right:1rem">{_short(values[i])}</td>' for values in series.values())
        + "</tr>"
        for i, place in enumerate(x)
    )
    table = f"<table><tr><th></th>{head}</tr>{body}</table>"
    html = _page(f"{title} ({unit})", _curves(x, series, f"{title} ({unit})") + table)

    def live() -> Any:
        import plotly.graph_objects as go

        figure = go.Figure(
            [
                go.Scatter(
                    name=name,
                    x=list(x),
                    y=[value or None for value in values],  # a logarithmic axis has no place for zero
                    mode="lines+markers",
                    line={"color": colour(name, index), "dash": "dot" if name == "noise floor" else "solid"},
                )
                for index, (name, values) in enumerate(series.items())
            ]
        )
        figure.update_layout(
            yaxis={"type": "log", "title": unit, "exponentformat": "power"}, xaxis={"type": "category"}
        )
        return dressed(figure, title, 340)

    return View(html, live)


def _curves(x: Sequence[Any], series: Mapping[str, Sequence[float | None]], title: str) -> str:
    """The curves as a drawing: powers of ten are lines, what is 0 or absent is a gap. Nothing for nothing."""
    there = [value for values in series.values() for value in values if value and value > 0]
    if not there or len(x) < 2:
        return ""
    low, high = math.floor(math.log10(min(there))), math.ceil(math.log10(max(there)))
    high = max(high, low + 1)
    left, width, height, below = 46, 640, 170, 16

    def at(index: int, value: float) -> str:
        across = left + (width - left - 8) * index / (len(x) - 1)
        return f"{across:.1f} {8 + (height - 16) * (high - math.log10(value)) / (high - low):.1f}"

    marks = []
    for power in range(low, high + 1):
        y = at(0, 10.0**power).split()[1]
        marks.append(f'<path d="M{left} {y}H{width - 8}" stroke="currentColor" stroke-opacity=".15"/>')
        marks.append(f'<text x="{left - 6}" y="{y}" dy=".32em" text-anchor="end" fill="currentColor">1e{power}</text>')
    for index, (name, values) in enumerate(series.items()):
        path, pen_down = [], False
        for place, value in enumerate(values):
            if value and value > 0:
                path.append(f"{'L' if pen_down else 'M'}{at(place, value)}")
            pen_down = bool(value and value > 0)
        dash = ' stroke-dasharray="3 4"' if name == "noise floor" else ""
        ends = 'stroke-linecap="round" stroke-linejoin="round"'  # a curve of one point is a dot
        dots = " ".join(f"{piece}h0" if piece[0] == "M" else piece for piece in path)
        marks.append(f'<path d="{dots}" fill="none" stroke="{colour(name, index)}" stroke-width="2.2" {ends}{dash}/>')
    step = max(1, -(-(len(x) - 1) // MOST_PLACES))
    for place in range(0, len(x), step):
        anchor = "start" if place == 0 else "end" if place == len(x) - 1 else "middle"
        across = at(place, 10.0**low).split()[0]
        where = f'x="{across}" y="{height + 8}" text-anchor="{anchor}"'
        marks.append(f'<text {where} fill="currentColor">{escape(str(x[place]))}</text>')
    keys = "".join(
        f'<span class="key"><i style="background:{colour(name, index)}"></i>{escape(name)}</span>'
        for index, name in enumerate(series)
    )
    box = f'viewBox="0 0 {width} {height + below}" style="max-width:48rem;width:100%;font:11px system-ui,sans-serif"'
    drawing = f'<svg {box} role="img" aria-label="{escape(title)}">{"".join(marks)}</svg>'
    return f'<div>{keys}</div><div class="drawn">{drawing}</div>'


def memory_map(rows: Sequence[Row]) -> View:
    """What each rank holds by role: rows of rank and `<role>_bytes`, as in the table `memory` of the rung `start`."""
    shown = [
        {"rank": f"rank {row['rank']}", "role": key.removesuffix("_bytes"), "MiB": row[key] / 2**20}
        for row in rows
        for key in row
        if key.endswith("_bytes") and key != "process_bytes"
    ]
    return stacked(
        "Memory by rank and role", shown, "rank", "role", "MiB", lambda total: words.in_bytes(total * 2**20), "MiB"
    )


def block_kind(block: str) -> str:
    """What a block is, as a role that has a colour: `layers.0.ffn` -> mlp."""
    return BLOCKS.get(block.rsplit(".", 1)[-1], "other")


def layer_times(rows: Sequence[Row], phase: str) -> View:
    """Time per block on its slowest rank, collectives within it included: rows of `profile`'s table `layers`."""
    slowest: dict[str, float] = {}
    for row in rows:
        if row[f"{phase}_ms"] is not None:
            block = str(row["block"])
            slowest[block] = max(slowest.get(block, 0.0), row[f"{phase}_ms"])
    shown = [{"block": block, "part": block_kind(block), "ms": spent} for block, spent in slowest.items()]
    title = f"Time per block on its slowest rank, {phase}, collectives within it included"
    return stacked(title, shown, "block", "part", "ms", lambda total: f"{total:.3f} ms", "ms")


def step_split(rows: Sequence[Row]) -> View:
    """A step divided into computing, communicating and waiting: rows as in the table `steps` of the rung `profile`."""
    parts = ("compute", "communication", "waiting")
    shown = [
        {"step": f"{row['phase']}, rank {row['rank']}", "part": part, "ms": row[f"{part}_ms"]}
        for row in rows
        for part in parts
    ]
    return stacked("Where a step goes", shown, "step", "part", "ms", lambda total: f"{total:.2f} ms", "ms")


def errors_by_layer(rows: Sequence[Row]) -> View:
    """Relative error per layer against the noise floor: rows as in the table `layers` of the rung `verify`."""
    columns = {"free running": "free_running", "teacher-forced": "teacher_forced", "noise floor": "floor"}
    series = {
        name: [row.get(column) for row in rows]
        for name, column in columns.items()
        if any(row.get(column) is not None for row in rows)
    }
    return lines("Error per layer against the reference", [row["of"] for row in rows], series, "relative max-abs")


def overlap(rows: Sequence[Row], phase: str) -> list[dict[str, Any]]:
    """By rank: the step, the time in collectives, and the share of it during which the rank computed another block.

    A collective that its block waits for lies inside that block and hides nothing; only what reaches beyond the block
    in which it began is overlapped.
    """
    found = []
    for rank in sorted({row["rank"] for row in rows if row["phase"] == phase}):
        mine = [row for row in rows if row["phase"] == phase and row["rank"] == rank]
        spans = {
            kind: [(row["start_ms"], row["start_ms"] + row["duration_ms"]) for row in mine if row["kind"] == kind]
            for kind in ("compute", "collective")
        }
        calls, blocks = spans["collective"], spans["compute"]
        hidden = sum(max(0.0, stop - end) for start, stop in calls for low, end in blocks if low <= start < end)
        total = sum(stop - start for start, stop in calls)
        found.append(
            {
                "rank": rank,
                "step_ms": max((stop for _, stop in blocks), default=0.0),
                "collectives": len(calls),
                "collective_ms": total,
                "overlapped": 100 * hidden / total if total else None,
            }
        )
    return found


def timeline(rows: Sequence[Row], phase: str) -> View:
    """One step as lanes of blocks and of collectives, rank by rank: rows as in the table `timeline` of `profile`."""
    mine = [row for row in rows if row["phase"] == phase]
    end_ms = max((row["start_ms"] + row["duration_ms"] for row in mine), default=0.0) or 1.0
    lanes = sorted({(row["rank"], row["kind"]) for row in mine}, key=lambda lane: (lane[0], lane[1] != "compute"))
    body = "".join(_lane(rank, kind, mine, end_ms) for rank, kind in lanes)
    keys = (("compute", "blocks"), ("communication", "collectives, waiting included"))
    legend = "".join(f'<span class="key"><i style="background:{COLOURS[c]}"></i>{escape(n)}</span>' for c, n in keys)
    title = f"One {phase} step, the last that was timed: {end_ms:.2f} ms"

    def live() -> Any:
        import plotly.graph_objects as go

        bars = []
        for kind, key in (("compute", "compute"), ("collective", "communication")):
            of_kind = [row for row in mine if row["kind"] == kind]
            bars.append(
                go.Bar(
                    name=kind,
                    orientation="h",
                    y=[_lane_name(row["rank"], kind) for row in of_kind],
                    base=[row["start_ms"] for row in of_kind],
                    x=[row["duration_ms"] for row in of_kind],
                    marker_color=COLOURS[key],
                    hovertext=[escape(str(row["name"])) for row in of_kind],
                )
            )
        figure = go.Figure(bars)
        axis = {"autorange": "reversed", "type": "category"}
        figure.update_layout(barmode="overlay", xaxis_title="ms since the step began", yaxis=axis)
        return dressed(figure, title, 130 + 32 * max(1, len(lanes)))

    return View(_page(title, f"<div>{legend}</div>{body}"), live)


def _lane_name(rank: int, kind: str) -> str:
    return f"rank {rank} {'blocks' if kind == 'compute' else 'collectives'}"


def _lane(rank: int, kind: str, rows: Sequence[Row], end_ms: float) -> str:
    colour_ = COLOURS["compute" if kind == "compute" else "communication"]
    mine = [row for row in rows if row["rank"] == rank and row["kind"] == kind]
    pieces = "".join(
        f'<i style="position:absolute;left:{100 * row["start_ms"] / end_ms:.2f}%;'
        f'width:{max(0.1, 100 * row["duration_ms"] / end_ms - 0.08):.2f}%;background:{colour_}" '
        f'title="{escape(str(row["name"]))}: {row["duration_ms"]:.3f} ms"></i>'
        for row in mine
    )
    total = sum(row["duration_ms"] for row in mine)
    return (
        f'<div class="row"><span class="name">{_lane_name(rank, kind)}</span>'
        f'<span class="bar" style="position:relative">{pieces}</span>{SEP}<span class="num">{total:.2f} ms</span></div>'
    )


def colour(name: str, index: int = 0) -> str:
    """The colour of a role, or a spare one."""
    return COLOURS.get(name, SPARE[index % len(SPARE)])


def dressed(figure: Any, title: str, height: int) -> Any:
    """The common look: no frame, a ground of its own in light and dark notebooks, room for long names."""
    figure.update_layout(
        title={
            "text": title,
            "font": {"size": 14},
            "x": 0.01,
            "y": 1,
            "yref": "container",
            "yanchor": "top",
            "pad": {"t": 8},
        },
        height=height + 24,
        margin={"l": 10, "r": 10, "t": 64, "b": 36},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        paper_bgcolor=CARD,
        plot_bgcolor=CARD,
        font={"family": "system-ui, sans-serif", "size": 12, "color": INK},
        hoverlabel={"align": "left", "namelength": -1},
        bargap=0.25,
    )
    lines = {"gridcolor": "rgba(127,127,127,.25)", "zerolinecolor": "rgba(127,127,127,.4)"}
    figure.update_xaxes(automargin=True, **lines)
    figure.update_yaxes(automargin=True, **lines)
    return figure


def _bar(
    name: str, pieces: Mapping[str, float], longest: float, colours: Mapping[str, str], show: Callable[[float], str]
) -> str:
    inner = "".join(
        f'<i style="width:{100 * size / longest:.3f}%;background:{colours[part]}" '
        f'title="{escape(part)}: {escape(show(size))}"></i>'
        for part, size in pieces.items()
        if size > 0
    )
    total = escape(show(sum(pieces.values())))
    return (
        f'<div class="row"><span class="name" title="{escape(name)}">{escape(name)}</span>'
        f'<span class="bar">{inner}</span>{SEP}<span class="num">{total}</span></div>'
    )


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.2e}" if value else "0"


def _page(title: str, body: str) -> str:
    return f'<div class="fl-fig"><style>{STYLE}</style><h5>{escape(title)}</h5>{body}</div>'
