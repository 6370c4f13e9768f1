"""Figures in words, the same for every rendering."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeGuard

from firstlight.engine.findings import printable

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SHOWN = {"B": "", "B/s": "/s"}
ENDS = re.compile(r"([/_-]|\.(?!(?<=[\d.]\.)\d))(?=\w)")
"""Where long names may be broken; numbers and ranges of them (`{0..3}`) may not."""
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def quantity(value: Any, unit: str = "") -> str:
    """A value with its unit: bytes in binary prefixes, short times in ms or µs, floats to four digits."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return printable(f"{value} {unit}".strip())
    if unit in _SHOWN:
        return in_bytes(value) + _SHOWN[unit]
    if unit == "s" and 0 < abs(value) < 1:
        value, unit = (1e6 * value, "µs") if abs(value) < 1e-3 else (1e3 * value, "ms")
    if unit == "share":
        value, unit = 100.0 * value, "%"
    if value == 1 and unit.endswith("s") and len(unit) > 2:  # one shard, not one shards; seconds keep their sign
        unit = unit[:-1]
    return f"{number(value)} {unit}".strip()


def number(value: float) -> str:
    """A number to read: integers whole, floats to four significant digits."""
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def in_bytes(count: float) -> str:
    """Bytes with a binary prefix: 1536 -> 1.50 KiB."""
    size, index = float(count), 0
    while abs(size) >= 1024 and index < len(_BINARY) - 1:
        size, index = size / 1024, index + 1
    if index == 0:
        return f"{number(count)} B"
    return f"{size:.2f} {_BINARY[index]}" if size < 100 else f"{size:.1f} {_BINARY[index]}"


def of_total(done: float, total: float, unit: str = "") -> str:
    """How much of how much: 2 of 3 inputs, 1.50 KiB of 4.00 KiB."""
    whole = quantity(total, unit)
    return f"{quantity(done, unit) if is_scaled(unit) else number(done)} of {whole}"


def seconds(value: float) -> str:
    """A duration: 0.034 s, 12.1 s, 3 min 20 s, 2 h 05 min."""
    if value < 1:
        return f"{value:.3f} s"
    if value < 100:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def cell(column: str, value: Any) -> str:
    """A value of a table; the column's name carries its unit."""
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return printable(", ".join(str(item) for item in value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        if (scale := percent_scale(column)) is not None:
            return f"{number(scale * value)} %"
        if column == "bytes" or column.endswith("_bytes"):
            return in_bytes(value)
        if column.endswith("_bytes_per_s"):
            return f"{in_bytes(value)}/s"
        return number(value)
    return quantity(value)


def percent_scale(column: str) -> float | None:
    """What numbers of a column are multiplied by to be percent: a `share_` is a part of 1. None: they are no parts."""
    if column.startswith("share_"):
        return 100.0
    return 1.0 if column.endswith("_of_limit") or column == "overlapped" else None


def heading(column: str) -> str:
    """A column's name to read: `weight_bytes` -> `weight`, `step_time_ms` -> `step time (ms)`."""
    name, unit = _parted(column)
    return f"{name} ({unit})" if unit else name


def titles(metrics: Mapping[str, str]) -> list[str]:
    """Names of metrics (name -> unit) to read beside values that have their units: `step_time_ms` -> `step time`.

    Names that differ in their unit alone keep what it says: `read_bytes`, `read_s` -> `read bytes`, `read time`.
    """
    plain = [_parted(name)[0] for name in metrics]
    return [
        told_apart(name, unit) if plain.count(name) > 1 else name
        for name, unit in zip(plain, metrics.values(), strict=True)
    ]


def told_apart(name: str, unit: str) -> str:
    """A name that stands for several figures, with what its unit says of this one."""
    kind = "time" if unit in ("s", "ms", "us") else "rate" if unit.endswith("/s") else "bytes" if unit == "B" else unit
    return f"{name} {kind}".strip()


def _parted(column: str) -> tuple[str, str]:
    """A name in words, and the unit at its end."""
    if percent_scale(column) is not None:
        return printable(column.replace("_", " ")), ""
    name = column.removesuffix("_bytes_per_s").removesuffix("_bytes") or "bytes"
    for unit in ("ms", "s", "us", "gib"):
        if name.endswith(f"_{unit}") and not name.endswith(f"_per_{unit}"):
            return printable(name[: -len(unit) - 1].replace("_", " ")), unit
    return printable(name.replace("_", " ")), ""


def is_scaled(unit: str) -> bool:
    """Whether a value is shown in another unit, bytes with prefixes, say: a number alone would not tell."""
    return unit in _SHOWN or unit == "share"


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def shorten(names: tuple[str, ...], most: int = 4, more: int = 0) -> str:
    """The first names, and how many more there are, `more` of them not among the names."""
    left = max(len(names) - most, 0) + more
    return printable(", ".join(names[:most])) + (f" and {left:,} more" if left else "")


def harmless(text: str) -> str:
    """A model's own words for a terminal: line ends and tabs stay, what would command the terminal is spelt out."""
    return _COMMANDS.sub(lambda found: ascii(found[0])[1:-1], text.replace("\r\n", "\n"))
