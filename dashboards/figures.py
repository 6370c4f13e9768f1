"""Interactive figures as pure functions: rows in, a plotly figure out, as the plain dict that plotly.js takes.

Dicts, not plotly objects: a figure of ten thousand points is made in a millisecond. Colours follow roles everywhere.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from firstlight.workbench.figures import COLOURS, block_kind, colour, overlap
from firstlight.workbench.readings import Bucket

__all__ = [
    "Figure", "curves", "errors", "layer_bars", "layer_rates", "loading", "numbers", "overlap", "roofline", "timeline",
]  # fmt: skip

Figure = dict[str, Any]
Row = Mapping[str, Any]
MOST_NAMES = 16  # along an axis, or in a legend
MOST_TOGETHER = 8  # curves whose values at one time are told together
QUIET, GRID, LIMIT = "#7a818a", "rgba(127,127,127,.18)", "#d1545a"  # the page's style sheet has the last word on text


def _layout(height: int, **changes: Any) -> dict[str, Any]:
    axis = {"gridcolor": GRID, "zerolinecolor": GRID, "linecolor": GRID, "automargin": True}
    axis["title"] = {"font": {"size": 12}, "standoff": 8}
    layout = {
        "height": height,
        "margin": {"l": 10, "r": 14, "t": 30, "b": 34},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": QUIET},
        "legend": {"orientation": "h", "yref": "container", "y": 1, "yanchor": "top", "x": 0, "traceorder": "normal"},
        "hoverlabel": {"font": {"size": 12}, "align": "left", "namelength": -1},
        "modebar": {"bgcolor": "rgba(0,0,0,0)"},
        "dragmode": "zoom",
        "xaxis": _over(axis, changes.pop("xaxis", {})),
        "yaxis": _over(axis, changes.pop("yaxis", {})),
        "barmode": "stack",
        "bargap": 0.25,
        "uirevision": "kept",  # zoom and hidden traces survive an update
    }
    return layout | changes


def _over(axis: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return axis | changes | {"title": axis["title"] | changes.get("title", {})}


def _names(places: Sequence[str]) -> dict[str, Any]:
    """An axis of names in their order, of which so many are written as do not run into each other."""
    axis: dict[str, Any] = {"type": "category"}
    if len(places) > MOST_NAMES:
        step = -(-len(places) // MOST_NAMES)
        axis |= {"tickmode": "array", "tickvals": list(places[::step]), "tickangle": -45}
    return axis


def curves(series: Mapping[str, Sequence[Bucket]], unit: str, height: int = 240) -> Figure:
    """Readings over time, one line a series; a stretch without readings is a gap."""
    traces = []
    for index, (name, buckets) in enumerate(series.items()):
        points = _with_gaps(buckets)
        traces.append(
            {
                "type": "scattergl" if len(points) > 2000 else "scatter",
                "mode": "lines",
                "name": name,
                "x": [round(1e3 * time_s) for time_s, _ in points],  # plotly's dates: ms since 1970
                "y": [value for _, value in points],
                "line": {"width": 1.6, "color": colour(name, index)},
                "hovertemplate": f"%{{y:,.4~g}}<extra>{html.escape(name)}</extra>",
                "connectgaps": False,
            }
        )
    xaxis = {"type": "date", "title": {"text": "time (UTC)"}}
    yaxis = {"title": {"text": unit}, "rangemode": "tozero", "tickformat": ",.4~g"}
    many = {"showlegend": False} if len(traces) > MOST_NAMES else {}  # who is who stands on hover, and in numbers below
    few = {"hovermode": "x unified"} if len(traces) <= MOST_TOGETHER else {}
    return {"data": traces, "layout": _layout(height, xaxis=xaxis, yaxis=yaxis, **few, **many)}


def numbers(series: Mapping[str, Sequence[Bucket]], unit: str) -> list[dict[str, Any]]:
    """What `curves` draws, in numbers: the least, the mean, the greatest and the last of each series, in its unit."""
    rows = []
    for name, buckets in series.items():
        found = [(bucket.mean, bucket.count) for bucket in buckets if bucket.mean is not None]
        if not found:
            continue
        means = [mean for mean, _ in found]
        rows.append(
            {
                "series": name,
                "least": min(means),
                "mean": sum(mean * count for mean, count in found) / max(1, sum(count for _, count in found)),
                "greatest": max(means),
                "last": means[-1],
                "unit": unit,
            }
        )
    return rows


def _with_gaps(buckets: Sequence[Bucket]) -> list[tuple[float, float | None]]:
    """Times and values; a stretch far longer than is usual between two readings gets a point without a value."""
    steps = sorted(after.time_s - before.time_s for before, after in itertools.pairwise(buckets))
    longest_s = 4 * steps[len(steps) // 2] if steps else 0.0
    points: list[tuple[float, float | None]] = []
    for bucket in buckets:
        if points and bucket.time_s - points[-1][0] > longest_s:
            points.append((points[-1][0] + longest_s / 4, None))
        points.append((bucket.time_s, bucket.mean))
    return points


def errors(rows: Sequence[Row], limit: float | None = None) -> Figure:
    """Relative error per hidden state against the noise floor, logarithmic: rows of `verify`'s table `layers`."""
    places = [str(row["of"]) for row in rows]
    traces = []
    for name, column, dash in (
        ("free running", "free_running", "solid"),
        ("teacher-forced", "teacher_forced", "solid"),
        ("noise floor", "floor", "dot"),
        ("limit", "limit", "dash"),
    ):
        values = [row.get(column) for row in rows]
        if not any(value for value in values):
            continue
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if column not in ("floor", "limit") else "lines",
                "name": name,
                "x": places,
                "y": [value or None for value in values],
                "line": {"color": COLOURS.get(name, LIMIT), "dash": dash, "width": 1.6},
                "marker": {"size": 6},
                "hovertemplate": "%{y:.3e}",
            }
        )
    yaxis = {"type": "log", "title": {"text": "relative max-abs"}, "exponentformat": "power", "dtick": 1}
    return {"data": traces, "layout": _layout(330, xaxis=_names(places), yaxis=yaxis, hovermode="x unified")}


def layer_bars(rows: Sequence[Row], phase: str) -> Figure:
    """Time per block, one bar a block on its slowest rank, by kind, with bytes and share of the limit on hover."""
    slowest: dict[str, Row] = {}
    for row in rows:
        value = row.get(f"{phase}_ms")
        block = str(row["block"])
        if value is not None and (block not in slowest or value > slowest[block][f"{phase}_ms"]):
            slowest[block] = row
    blocks = list(slowest)
    by_kind: dict[str, list[str]] = {}
    for block in blocks:
        by_kind.setdefault(block_kind(block), []).append(block)
    traces = [
        {
            "type": "bar",
            "name": kind,
            "x": found,
            "y": [slowest[block][f"{phase}_ms"] for block in found],
            "marker": {"color": colour(kind)},
            "hovertext": [_hover(slowest[block], phase) for block in found],
            "hoverinfo": "text",
        }
        for kind, found in by_kind.items()
    ]
    xaxis = _names(blocks) | {"categoryorder": "array", "categoryarray": blocks}
    layout = _layout(300, xaxis=xaxis, yaxis={"title": {"text": "time (ms)"}, "tickformat": ",.4~g"}, showlegend=True)
    return {"data": traces, "layout": layout}


def roofline(rows: Sequence[Row], bandwidth_bytes_per_s: float | None) -> Figure | None:
    """What blocks compute in a second over what they compute with a byte, beside what memory allows.

    Rows of `profile`'s table `layers`; bytes are those of the weights; `bandwidth_bytes_per_s` is one rank's. None for
    rows without work. Williams, Waterman and Patterson, Roofline, 2009.
    """
    traces: list[dict[str, Any]] = []
    for phase, symbol in (("decode", "circle"), ("prefill", "diamond")):
        found = [r for r in rows if r.get("weight_bytes") and r.get(f"{phase}_flops") and r.get(f"{phase}_ms")]
        points = [
            (r[f"{phase}_flops"] / r["weight_bytes"], r[f"{phase}_flops"] / r[f"{phase}_ms"] / 1e6) for r in found
        ]
        if not points:
            continue
        hover = [
            f"{html.escape(str(r['block']))}, rank {r['rank']}, {phase}<br>{x:,.4g} FLOP a byte<br>{y:,.4g} GFLOP/s"
            for r, (x, y) in zip(found, points, strict=True)
        ]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": phase,
                "x": [x for x, _ in points],
                "y": [y for _, y in points],
                "marker": {"size": 9, "symbol": symbol, "color": colour(phase, len(traces)), "opacity": 0.8},
                "hovertext": hover,
                "hoverinfo": "text",
            }
        )
    if not traces:
        return None
    if bandwidth_bytes_per_s:
        across = [x for trace in traces for x in trace["x"]]
        ends = [min(across) / 2, max(across) * 2]
        name = f"memory's limit, {bandwidth_bytes_per_s / 2**30:,.1f} GiB/s a rank"
        line = {"color": LIMIT, "dash": "dash", "width": 1.6}
        traces.append(
            {"type": "scatter", "mode": "lines", "name": name, "x": ends, "line": line, "hoverinfo": "name"}
            | {"y": [bandwidth_bytes_per_s * x / 1e9 for x in ends]}
        )
    power = {"type": "log", "tickformat": "~g", "dtick": 1}
    xaxis = power | {"title": {"text": "FLOP a byte of weights"}}
    return {"data": traces, "layout": _layout(320, xaxis=xaxis, yaxis=power | {"title": {"text": "GFLOP/s"}})}


def _hover(row: Row, phase: str) -> str:
    lines = [f"{row['block']}, rank {row['rank']}", f"{row[f'{phase}_ms']:.3f} ms"]
    if row.get("weight_bytes"):
        lines.append(f"{row['weight_bytes'] / 2**20:,.2f} MiB of weights")
    if row.get("decode_of_limit") and phase == "decode":
        lines.append(f"{row['decode_of_limit']:.1f} % of the memory limit")
    return "<br>".join(html.escape(line) for line in lines)


def timeline(rows: Sequence[Row], phase: str) -> Figure:
    """Blocks and collectives of one step, a lane a rank and kind: rows of `profile`'s table `timeline`."""
    mine = [row for row in rows if row["phase"] == phase]
    lanes = list(
        dict.fromkeys(
            (row["rank"], row["kind"]) for row in sorted(mine, key=lambda r: (r["rank"], r["kind"] != "compute"))
        )
    )
    traces = []
    for kind, key in (("compute", "compute"), ("collective", "communication")):
        of_kind = [row for row in mine if row["kind"] == kind]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": "blocks" if kind == "compute" else "collectives, waiting included",
                "y": [_lane(row["rank"], kind) for row in of_kind],
                "base": [row["start_ms"] for row in of_kind],
                "x": [row["duration_ms"] for row in of_kind],
                "marker": {"color": COLOURS[key], "line": {"width": 0.5, "color": "rgba(255,255,255,.5)"}},
                "hovertext": [
                    f"{html.escape(str(row['name']))}<br>at {row['start_ms']:.3f} ms, {row['duration_ms']:.3f} ms long"
                    + (f"<br>{row['moved_bytes']:,} bytes" if row["moved_bytes"] else "")
                    for row in of_kind
                ],
                "hoverinfo": "text",
            }
        )
    layout = _layout(
        120 + (34 if len(lanes) <= MOST_NAMES else 17) * max(1, len(lanes)),
        xaxis={"title": {"text": "ms since the step began"}},
        yaxis={
            "type": "category",
            "autorange": "reversed",
            "categoryorder": "array",
            "categoryarray": [_lane(rank, kind) for rank, kind in lanes],
        },
        barmode="overlay",
    )
    return {"data": traces, "layout": layout}


def _lane(rank: int, kind: str) -> str:
    return f"rank {rank} {'blocks' if kind == 'compute' else 'collectives'}"


def loading(events: Sequence[tuple[str, float, float]]) -> Figure:
    """Bytes read over time, a line a phase: (phase, seconds since the beginning, bytes)."""
    by_phase: dict[str, list[tuple[float, float]]] = {}
    for phase, time_s, done in events:
        by_phase.setdefault(phase, []).append((time_s, done))
    unit, size = _bytes_unit(max((done for _, _, done in events), default=0.0))
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": phase,
            "x": [time_s for time_s, _ in points],
            "y": [done / size for _, done in points],
            "line": {"width": 1.6, "color": colour(phase, index), "shape": "hv"},  # between two events nothing is known
            "marker": {"size": 4},
            "hovertemplate": f"%{{y:,.4~g}} {unit} after %{{x:.4~g}} s",
        }
        for index, (phase, points) in enumerate(by_phase.items())
    ]
    shows = {"showlegend": len(traces) <= MOST_NAMES}  # of many, who is who stands on hover, and in the replay
    xaxis = {"title": {"text": "time since the rung began (s)"}, "rangemode": "tozero"}
    return {"data": traces, "layout": _layout(280, xaxis=xaxis, yaxis={"title": {"text": f"read ({unit})"}}, **shows)}


def _bytes_unit(largest: float) -> tuple[str, int]:
    """The unit in which bytes of this size are drawn, and how many bytes it is."""
    return ("GiB", 2**30) if largest >= 10 * 2**30 else ("MiB", 2**20)


def layer_rates(rows: Sequence[Row], limit: float | None) -> Figure | None:
    """The rate of reading up to each layer beside what the source gives: rows of `load`'s table `by_layer`.

    A bar a rank; of many ranks the fastest, the median and the slowest. None without rates, as of a load that was held.
    """
    ranks: dict[int, list[Row]] = {}
    for row in rows:
        if row.get("rate_bytes_per_s"):
            ranks.setdefault(row["rank"], []).append(row)
    if not ranks:
        return None
    unit, size = _bytes_unit(max(limit or 0.0, *(row["rate_bytes_per_s"] for found in ranks.values() for row in found)))
    traces: list[dict[str, Any]] = []
    lines = {f"rank {rank}": found for rank, found in ranks.items()} if len(ranks) <= MOST_TOGETHER else _spread(ranks)
    for index, (name, found) in enumerate(lines.items()):
        trace = {
            "type": "bar",
            "name": name,
            "x": [str(row["layer"]) for row in found],
            "y": [row["rate_bytes_per_s"] / size for row in found],
            "hovertext": [_rate_hover(row, unit, size) for row in found],
            "hoverinfo": "text",
            "marker": {"color": colour(name, index)},
        }
        traces.append(trace)
    places = list(dict.fromkeys(str(row["layer"]) for row in rows))
    if limit:
        line = {"color": LIMIT, "dash": "dash", "width": 1.6}
        name = f"the source gives {limit / size:,.4g} {unit}/s"
        traces.append(
            {"type": "scatter", "mode": "lines", "name": name, "x": places, "y": [limit / size] * len(places)}
            | {"line": line, "hoverinfo": "name"}
        )
    yaxis = {"title": {"text": f"rate ({unit}/s)"}, "rangemode": "tozero", "tickformat": ",.4~g"}
    return {"data": traces, "layout": _layout(280, xaxis=_names(places), yaxis=yaxis, barmode="group")}


def _rate_hover(row: Row, unit: str, size: int) -> str:
    done_ms = 1e3 * row.get("done_s", row.get("read_s", 0.0))
    return (
        f"{html.escape(str(row['layer']))}, rank {row['rank']}<br>{row['rate_bytes_per_s'] / size:,.4g} {unit}/s"
        f"<br>{row['read_bytes'] / 2**20:,.2f} MiB, there after {done_ms:.2f} ms"
    )


def _spread(ranks: Mapping[int, Sequence[Row]]) -> dict[str, list[Row]]:
    """Of each layer the rows of the fastest, the median and the slowest rank that has it."""
    by_layer: dict[str, list[Row]] = {}
    for found in ranks.values():
        for row in found:
            by_layer.setdefault(str(row["layer"]), []).append(row)
    ordered = [sorted(found, key=lambda row: -row["rate_bytes_per_s"]) for found in by_layer.values()]
    return {
        "fastest rank": [found[0] for found in ordered],
        "median rank": [found[len(found) // 2] for found in ordered],
        "slowest rank": [found[-1] for found in ordered],
    }
