"""The cells of one column in words: as many decimals in each, one unit of time, rates with prefixes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from firstlight.workbench.render import words


def cells(column: str, values: Sequence[Any]) -> tuple[str, list[str]]:
    """The heading of a column and its values in words; what is no number is written as everywhere."""
    name = words.heading(column.removesuffix("_bytes_per_s"))
    numbers = [float(value) for value in values if words.is_number(value)]
    percent = words.percent_scale(column)
    if numbers and percent is not None:
        number = alike([percent * one for one in numbers])
        return name, [_or_words(column, value, lambda one: f"{number(percent * one)} %") for value in values]
    if numbers and any(isinstance(value, float) for value in values) and words.cell(column, 1.5) == "1.5":
        scale = 1.0
        if column.endswith("_s") and not column.endswith("_per_s"):
            unit, scale = time_unit(max(map(abs, numbers)) or 1.0)
            name = f"{name.partition(' (')[0]} ({unit})"
        number = alike([scale * one for one in numbers])
        return name, [_or_words(column, value, lambda one: number(scale * one)) for value in values]
    return name, [_in_words(column, value) for value in values]


def time_unit(largest_s: float) -> tuple[str, float]:
    """The unit in which a time is read, and how many of it are a second."""
    return ("s", 1.0) if largest_s >= 1 else ("ms", 1e3) if largest_s >= 1e-3 else ("µs", 1e6)


def alike(numbers: Sequence[float]) -> Callable[[float], str]:
    """How the numbers of one column are written: with the decimals that four digits of the largest leave.

    Where a number would be lost in that, each is written by itself or, if all are tiny, as powers of ten.
    """
    sizes = [abs(number) for number in numbers if number]
    if not sizes or all(number == int(number) for number in numbers if math.isfinite(number)):
        return words.number
    largest, least = max(sizes), min(sizes)
    if largest < 1e-3:
        return lambda number: f"{number:.2e}" if number else "0"
    decimals = max(0, 3 - math.floor(math.log10(largest))) if math.isfinite(largest) else 0
    decimals = min(decimals, max(len(f"{size:.{decimals}f}".rstrip("0").partition(".")[2]) for size in sizes))
    if least < 0.5 * 10.0**-decimals:
        return words.number
    return lambda number: f"{number:,.{decimals}f}" if number else "0"


def _or_words(column: str, value: Any, say: Callable[[float], str]) -> str:
    return say(value) if words.is_number(value) else words.cell(column, value)


def _in_words(column: str, value: Any) -> str:
    """A value by its column's name: rates of bytes with prefixes, else as everywhere."""
    if words.is_number(value) and column.endswith("_bytes_per_s"):
        return words.quantity(value, "B/s")
    return words.cell(column, value)
