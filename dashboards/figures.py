"""Interactive figures as pure functions: rows in, a plotly figure out, as the plain dict that plotly.js takes.

Dicts, not plotly objects: a figure of ten thousand points is made in a millisecond. Colours follow roles everywhere.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from firstlight.workbench.figures import COLOURS, colour, overlap
from firstlight.workbench.readings import Bucket

__all__ = ["Figure", "compared", "curves", "errors", "layer_bars", "layer_rates", "loading", "overlap", "timeline"]

Figure = dict[str, Any]
Row = Mapping[str, Any]
MOST_NAMES = 16  # along an axis
QUIET, GRID, LIMIT = "#8a9199", "rgba(127,127,127,.18)", "#d1545a"


def _layout(height: int, **changes: Any) -> dict[str, Any]:
    axis = {"gridcolor": GRID, "zerolinecolor": GRID, "linecolor": GRID, "automargin": True}
    layout = {
        "height": height,
        "margin": {"l": 10, "r": 14, "t": 10, "b": 34},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": QUIET},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "hoverlabel": {"font": {"size": 12}},
        "xaxis": axis | changes.pop("xaxis", {}),
        "yaxis": axis | changes.pop("yaxis", {}),
        "barmode": "stack",
        "bargap": 0.25,
        "uirevision": "kept",  # zoom and hidden traces survive an update
    }
    return layout | changes


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
                "line": {"width": 1.5, "color": colour(name, index)},
                "connectgaps": False,
            }
        )
    return {
        "data": traces,
        "layout": _layout(height, xaxis={"type": "date"}, yaxis={"title": {"text": unit}, "rangemode": "tozero"}),
    }


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
            }
        )
    yaxis = {"type": "log", "title": {"text": "relative max-abs"}, "exponentformat": "power", "dtick": 1}
    return {"data": traces, "layout": _layout(330, xaxis=_names(places), yaxis=yaxis)}


def layer_bars(rows: Sequence[Row], phase: str) -> Figure:
    """Time per block, one bar a block on its slowest rank, with bytes and share of the limit on hover."""
    slowest: dict[str, Row] = {}
    for row in rows:
        value = row.get(f"{phase}_ms")
        block = str(row["block"])
        if value is not None and (block not in slowest or value > slowest[block][f"{phase}_ms"]):
            slowest[block] = row
    kinds = {"mixer": "attention", "ffn": "mlp", "embed": "embedding", "norm": "norm", "head": "head"}
    blocks = list(slowest)
    colours = [colour(kinds.get(block.rsplit(".", 1)[-1], "other")) for block in blocks]
    hover = [_hover(slowest[block], phase) for block in blocks]
    trace = {
        "type": "bar",
        "x": blocks,
        "y": [slowest[block][f"{phase}_ms"] for block in blocks],
        "marker": {"color": colours},
        "hovertext": hover,
        "hoverinfo": "text",
    }
    layout = _layout(300, xaxis=_names(blocks), yaxis={"title": {"text": "ms"}})
    return {"data": [trace], "layout": layout | {"showlegend": False}}


def _hover(row: Row, phase: str) -> str:
    lines = [str(row["block"]), f"{row[f'{phase}_ms']:.3f} ms"]
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
        90 + 34 * max(1, len(lanes)),
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


def loading(events: Sequence[tuple[str, float, float]], unit_bytes: float = 2**20) -> Figure:
    """Bytes read over time, a line a phase: (phase, seconds since the beginning, bytes)."""
    by_phase: dict[str, list[tuple[float, float]]] = {}
    for phase, time_s, done in events:
        by_phase.setdefault(phase, []).append((time_s, done / unit_bytes))
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": phase,
            "x": [time_s for time_s, _ in points],
            "y": [done for _, done in points],
            "line": {"width": 1.6, "color": colour(phase, index)},
            "marker": {"size": 4},
        }
        for index, (phase, points) in enumerate(by_phase.items())
    ]
    layout = _layout(280, xaxis={"title": {"text": "s"}}, yaxis={"title": {"text": "MiB"}})
    return {"data": traces, "layout": layout}


def layer_rates(rows: Sequence[Row], limit: float | None) -> Figure | None:
    """The rate of reading up to each layer, a bar a rank, beside what the source gives: rows of `load`'s `by_layer`.

    None without rates, as of a load that was held.
    """
    ranks: dict[int, list[Row]] = {}
    for row in rows:
        if row.get("rate_bytes_per_s"):
            ranks.setdefault(row["rank"], []).append(row)
    if not ranks:
        return None
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": f"rank {rank}",
            "x": [str(row["layer"]) for row in found],
            "y": [row["rate_bytes_per_s"] / 2**20 for row in found],
            "hovertext": [
                f"{html.escape(str(row['layer']))}, rank {rank}<br>{row['read_bytes'] / 2**20:,.2f} MiB, there"
                f" after {row.get('done_s', row.get('read_s', 0.0)):.4f} s"
                for row in found
            ],
            "marker": {"color": colour(f"rank {rank}", rank)},
        }
        for rank, found in ranks.items()
    ]
    places = list(dict.fromkeys(str(row["layer"]) for row in rows))
    if limit:
        line = {"color": LIMIT, "dash": "dash", "width": 1.6}
        name = f"the source gives {limit / 2**20:,.0f} MiB/s"
        traces.append(
            {"type": "scatter", "mode": "lines", "name": name, "x": places, "y": [limit / 2**20] * len(places)}
            | {"line": line}
        )
    yaxis = {"title": {"text": "MiB/s"}, "rangemode": "tozero", "tickformat": ",d"}
    return {"data": traces, "layout": _layout(280, xaxis=_names(places), yaxis=yaxis, barmode="group")}


def compared(names: Sequence[str], values: Mapping[str, Sequence[float | None]], unit: str) -> Figure:
    """One figure of several runs side by side."""
    traces = [
        {"type": "bar", "name": metric, "x": list(names), "y": list(row), "marker": {"color": colour(metric, index)}}
        for index, (metric, row) in enumerate(values.items())
    ]
    layout = _layout(260, xaxis={"type": "category"}, yaxis={"title": {"text": unit}}, barmode="group")
    return {"data": traces, "layout": layout}
