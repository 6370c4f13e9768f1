"""A profiled step as a trace: the JSON that Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

The format is Google's Trace Event Format: complete events ("X") with times in microseconds, and names of processes and
threads ("M"). A phase of a rank is a process; its blocks and its collectives are two threads, since a block's time
holds that of its collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

LANES = ("compute", "collective")
US_PER_MS = 1000.0


def step_trace(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows of `profile`'s table `timeline` as a trace of all phases and ranks, each from its step's own start."""
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    processes = {key: number for number, key in enumerate(dict.fromkeys((row["phase"], row["rank"]) for row in rows))}
    events = [*_names(processes), *(_event(row, processes[row["phase"], row["rank"]]) for row in rows)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"phases": ", ".join(phases)}}


def _names(processes: Mapping[tuple[str, int], int]) -> Iterator[dict[str, Any]]:
    for (phase, rank), process in processes.items():
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": f"{phase}, rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
        for lane, kind in enumerate(LANES):
            yield {"ph": "M", "name": "thread_name", "pid": process, "tid": lane, "args": {"name": kind}}


def _event(row: Mapping[str, Any], process: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": row["name"],
        "cat": row["kind"],
        "pid": process,
        "tid": LANES.index(row["kind"]),
        "ts": row["start_ms"] * US_PER_MS,
        "dur": row["duration_ms"] * US_PER_MS,
        "args": {"moved_bytes": row["moved_bytes"]},
    }
