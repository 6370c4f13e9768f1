"""Splits tensor names into a pattern without numbers, and the numbers that occur.

Made for half a million names: the work is done on whole texts, not name by name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import methodcaller
from typing import TypeVar

_USUAL = r"0|[1-9][0-9]{0,15}"
_IN_TEXT = re.compile(rf"\.(?:{_USUAL})(?=[.\n]|\Z)")
_REST_IN_TEXT = re.compile(rf"\.([0-9]+?)(?:{_USUAL})(?=[.\n]|\Z)")
_IN_NAME = re.compile(rf"\.([0-9]*?)({_USUAL})(?=\.|\Z)")
_STAR = re.compile(r"(?<=\.)[0-9]*\*(?=\.|\Z)")
_STARRED = re.compile(r"[0-9]*\*")
STAR_ITSELF = "\uf02a"  # what a pattern has for a star of the name's own: no name has this sign
_MOST_RUNS = 4  # of numbers that are spelt out in a pattern
_MOST_DIGITS = 16
_split = methodcaller("split", ".")
T = TypeVar("T")


def patterns(names: Sequence[str]) -> list[str]:
    """The pattern of each name: `layers.3.mlp.experts.17.w1` is `layers.*.mlp.experts.*.w1`.

    Zeros before a number are words of the pattern, `layers.007.w1` is `layers.00*.w1`, and so is what a number has
    before its last 16 digits: a pattern and its numbers give the name again.
    """
    text = "\n".join(names)
    if text.count("\n") != len(names) - 1:  # a name with a line end in it, or no names at all
        return [parted(name)[0] for name in names]
    text = _IN_TEXT.sub(".*", text.replace("*", STAR_ITSELF))
    return (_REST_IN_TEXT.sub(r".\1*", text) if _REST_IN_TEXT.search(text) else text).split("\n")


def parted(name: str) -> tuple[str, tuple[int, ...]]:
    """The pattern of a name and its numbers."""
    return _IN_NAME.sub(r".\1*", name.replace("*", STAR_ITSELF)), tuple(
        int(found[2]) for found in _IN_NAME.finditer(name)
    )


def grouped(items: Iterable[T], name: Callable[[T], str]) -> dict[str, list[T]]:
    """Items by the pattern of their name, patterns in order of first sight."""
    listed = list(items)
    groups: dict[str, list[T]] = defaultdict(list)
    for pattern, item in zip(patterns(list(map(name, listed))), listed, strict=True):
        groups[pattern].append(item)
    return dict(groups)


def numbers(pattern: str, names: Sequence[str], text: str | None = None) -> list[list[int]]:
    """For each `*` of the pattern the numbers that occur in the names, in order.

    `text`: the names made `bare`, where the caller has it.
    """
    stars = {place: part[:-1] for place, part in enumerate(pattern.split(".")) if place and _STARRED.fullmatch(part)}
    if not stars or not names:
        return [[] for _ in stars]
    columns = None
    if len(stars) == pattern.count("*"):
        columns = columns_of(bare(pattern, names) if text is None else text, len(stars), len(names))
    if columns is None:
        whole = list(zip(*map(_split, names), strict=True))
        columns = [{text.removeprefix(words) for text in whole[place]} for place, words in stars.items()]
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
    before, *between = literals(pattern)
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
    before, *between = literals(pattern)
    if stars == 2:
        text = text.replace(".", between[0])
    return (before + text[1:-1].replace("\n", f"{between[-1]}\n{before}") + between[-1]).split("\n")


def _are_numbers(parts: set[str]) -> bool:
    text = "".join(parts)
    return "" not in parts and text.isdecimal() and text.isascii() and max(map(len, parts)) <= _MOST_DIGITS


def _is_number(part: str) -> bool:
    return _are_numbers({part})


def with_numbers(pattern: str, columns: Iterable[Sequence[int]]) -> str:
    """The pattern with its numbers: `layers.{0..39}.mlp.gate.weight`, `layers.{0..2,7}.norm.weight`."""
    left = iter(columns)

    def runs(star: re.Match[str]) -> str:
        column = next(left, ())
        return star[0][:-1] + _runs(column) if column else star[0]

    return _STAR.sub(runs, pattern).replace(STAR_ITSELF, "*")


def literals(pattern: str) -> list[str]:
    """What names of a pattern have between their numbers."""
    return [words.replace(STAR_ITSELF, "*") for words in pattern.split("*")]


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
