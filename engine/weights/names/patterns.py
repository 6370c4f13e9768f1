"""Names of tensors and parameters by pattern: what is left when numbers are taken out, and which numbers occur.

Made for half a million names: the work is done on whole texts, not name by name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import methodcaller
from typing import TypeVar

_IN_TEXT = re.compile(r"\.\d+(?=[.\n]|\Z)")
_IN_NAME = re.compile(r"\.\d+(?=\.|\Z)")
_MOST_RUNS = 4  # of numbers that are spelt out in a pattern
_MOST_DIGITS = 18
_split = methodcaller("split", ".")
T = TypeVar("T")


def patterns(names: Sequence[str]) -> list[str]:
    """The pattern of each name: `layers.3.mlp.experts.17.w1` is `layers.*.mlp.experts.*.w1`."""
    text = "\n".join(names)
    if text.count("\n") == len(names) - 1:
        return _IN_TEXT.sub(".*", text).split("\n")
    return [_IN_NAME.sub(".*", name) for name in names]  # a name with a line end in it, or no names at all


def grouped(items: Iterable[T], name: Callable[[T], str]) -> dict[str, list[T]]:
    """Items by the pattern of their name, patterns in order of first sight."""
    listed = list(items)
    groups: dict[str, list[T]] = defaultdict(list)
    for pattern, item in zip(patterns(list(map(name, listed))), listed, strict=True):
        groups[pattern].append(item)
    return dict(groups)


def numbers(pattern: str, names: Sequence[str], text: str | None = None) -> list[list[int]]:
    """For each `*` of the pattern the numbers that occur in the names, in order; very long ones are left out.

    `text`: the names made `bare`, where the caller has it.
    """
    count = pattern.count("*")
    if not count or not names:
        return [[] for part in pattern.split(".") if part == "*"]
    columns = columns_of(bare(pattern, names) if text is None else text, count, len(names))
    if columns is None:
        places = [place for place, part in enumerate(pattern.split(".")) if part == "*"]
        whole = list(zip(*map(_split, names), strict=True))
        columns = [set(whole[place]) for place in places]
    return [sorted(set(map(int, column if _are_numbers(column) else filter(_is_number, column)))) for column in columns]


def columns_of(text: str, count: int, lines: int) -> list[set[str]] | None:
    """The texts at each of `count` stars of `bare` names; None where these are not that."""
    flat = text[1:-1].replace("\n", ".").split(".")
    if len(flat) != count * lines:
        return None
    columns = [set(flat[place::count]) for place in range(count)]
    return columns if all(map(_are_numbers, columns)) else None


def bare(pattern: str, names: Sequence[str]) -> str:
    """Names of a pattern as lines of what stands at its stars, dots between, if nothing about them is unusual.

    Exact for patterns of at most two stars without a line end.
    """
    before, *between = pattern.split("*")
    text = "\n" + "\n".join(names) + "\n"
    if before:
        text = text.replace(f"\n{before}", "\n")
    if between and between[-1]:
        text = text.replace(f"{between[-1]}\n", "\n")
    for words in between[:-1]:
        text = text.replace(words, ".")
    return text


def named(text: str, count: int, pattern: str) -> list[str] | None:
    """The names of another pattern with the numbers of `count` `bare` names; None for more than two stars.

    `layers.3.mlp.w1` of `layers.*.mlp.w1` is `blocks.3.up` of `blocks.*.up`.
    """
    stars = pattern.count("*")
    if not count or not 1 <= stars <= 2 or "\n" in pattern:
        return None
    if text.count(".") != (stars - 1) * count or text.count("\n") != count + 1:
        return None
    before, *between = pattern.split("*")
    if stars == 2:
        text = text.replace(".", between[0])
    return (before + text[1:-1].replace("\n", f"{between[-1]}\n{before}") + between[-1]).split("\n")


def _are_numbers(parts: set[str]) -> bool:
    return "" not in parts and "".join(parts).isdecimal() and max(map(len, parts)) <= _MOST_DIGITS


def _is_number(part: str) -> bool:
    return part.isdecimal() and len(part) <= _MOST_DIGITS


def with_numbers(pattern: str, columns: Iterable[Sequence[int]]) -> str:
    """The pattern with its numbers: `layers.{0..39}.mlp.gate.weight`, `layers.{0..2,7}.norm.weight`."""
    shown = pattern
    for column in columns:
        shown = shown.replace(".*", f".{_runs(column)}", 1) if column else shown
    return shown


def _runs(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    if len(numbers) == 1:
        return str(numbers[0])
    if len(runs) > _MOST_RUNS:
        return f"{{{len(numbers)} of {numbers[0]}..{numbers[-1]}}}"
    return "{" + ",".join(str(low) if low == high else f"{low}..{high}" for low, high in runs) + "}"
