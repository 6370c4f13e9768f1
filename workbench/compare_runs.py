"""Runs side by side: every figure that their last reports of a verb share, in the order of the ladder."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from firstlight.workbench.render.words import is_number
from firstlight.workbench.report import Report
from firstlight.workbench.runs import LADDER, Run

BETTER_LOW = ("_s", "_ms", "_max_abs", "kl_mean", "_noise_floor")
"""Endings of figures that had better be small; bytes and counts are neither better nor worse."""
BETTER_HIGH = ("per_s", "_rate", "_agreement", "_overlap", "_of_limit")

NEITHER = ("limit_ms",)  # what the machine allows, not what a run reached

SHORTEST_S = 0.01  # what takes less is as long as chance has it


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of all runs, None where a run lacks it. `ratio`: the last run's to the first's."""

    verb: str
    figure: str
    unit: str
    values: tuple[float | int | str | bool | None, ...]
    ratio: float | None = None


def worse_by(figure: str, before: object, now: object) -> float | None:
    """By what factor a figure got worse, below 1 if better; None where it is no number, too short, or neither."""
    if not (is_number(before) and is_number(now)) or not before or not now:
        return None
    ratio = now / before
    if ratio <= 0 or (figure.endswith("_s") and max(before, now) < SHORTEST_S):
        return None
    if figure.endswith(NEITHER):
        return None
    if figure.endswith(BETTER_HIGH):
        return 1 / ratio
    return ratio if figure.endswith(BETTER_LOW) else None


def compare_runs(runs: Sequence[Run]) -> list[Row]:
    """Figures that at least two of the runs have."""
    return compare_reports([run.reports() for run in runs])


def compare_reports(runs: Sequence[Sequence[Report]]) -> list[Row]:
    """The same from the runs' reports."""
    last = [{report.verb: report for report in reports} for reports in runs]
    rows = []
    for verb in LADDER:
        reports = [found.get(verb) for found in last]
        names = dict.fromkeys(name for report in reports if report is not None for name in report.metrics)
        for name in names:
            row = _row(verb, name, reports)
            if sum(value is not None for value in row.values) > 1:
                rows.append(row)
    return rows


def _row(verb: str, name: str, reports: Sequence[Report | None]) -> Row:
    metrics = [report.metrics.get(name) if report is not None else None for report in reports]
    values = tuple(metric.value if metric is not None else None for metric in metrics)
    unit = next((metric.unit for metric in metrics if metric is not None), "")
    first, final = values[0], values[-1]
    ratio = None
    if is_number(first) and is_number(final) and first:
        ratio = final / first
    return Row(verb=verb, figure=name, unit=unit, values=values, ratio=ratio)
