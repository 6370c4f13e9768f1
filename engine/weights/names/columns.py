"""Very many names, and what is known of each, as columns: half a million tensors without an object for each. No torch.

A name is a pattern, `layers.*.w1`, and its numbers; `Names` makes it when it is asked for. What is made here from
whole headers is what the plain parser (`header.py`) gives for them; for a header about which anything is unusual there
is that parser.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from firstlight.engine.findings import MOST_TENSORS
from firstlight.engine.weights.files.lines import Ints
from firstlight.engine.weights.names.listed import Listed, Numbered
from firstlight.engine.weights.names.patterns import patterns

_MOST_KEYS = 1 << 42  # of a pattern; with a million patterns they are below 2^62
_MOST_DIGITS = 18
_FEW = 16  # names of a kind that are looked for one by one
_NUMBER = re.compile(r"\.(\d+)(?=\.|\Z)")


class Names:
    """Names by row: `kinds` is the pattern of each, `numbers` what stands at its stars, in order, 0 behind these."""

    def __init__(self, patterns: Sequence[str], kinds: Ints, numbers: Ints) -> None:
        self.patterns, self.kinds, self.numbers = tuple(patterns), kinds, numbers
        self.stars = [pattern.count("*") for pattern in self.patterns]
        self._rows: dict[int, dict[tuple[int, ...], int]] = {}
        self._asked: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.kinds)

    def of(self, kind: int, rows: Ints, pattern: str | None = None) -> list[str]:
        """Names of rows of one kind, or what they are by another pattern of as many stars."""
        pattern = self.patterns[kind] if pattern is None else pattern
        return filled(pattern, self.numbers[rows, : self.stars[kind]])

    def some(self, rows: Ints) -> list[str]:
        """Names of any rows."""
        found = np.empty(len(rows), object)
        kinds = self.kinds[rows]
        for kind in np.unique(kinds).tolist():
            places = np.flatnonzero(kinds == kind)
            found[places] = self.of(kind, rows[places])
        names: list[str] = found.tolist()
        return names

    @cached_property
    def by_kind(self) -> list[Ints]:
        """The rows of each kind, in order."""
        order = np.argsort(self.kinds, kind="stable")
        return np.split(order, np.cumsum(np.bincount(self.kinds, minlength=len(self.patterns)))[:-1])

    @cached_property
    def _by_pattern(self) -> dict[str, int]:
        return {pattern: kind for kind, pattern in enumerate(self.patterns)}

    def listed(self, rows: Ints) -> Sequence[str]:
        """Names of any rows: in their order where a finding names them all, else kind by kind."""
        return self.some(rows) if len(rows) <= MOST_TENSORS else Listed(groups=self.groups(rows))

    def groups(self, rows: Ints) -> list[Rows]:
        """The names of rows by kind, kinds in the order in which they come."""
        kinds = self.kinds[rows]
        order = np.argsort(kinds, kind="stable")
        there, first = np.unique(kinds[order], return_index=True)
        parts = zip(there.tolist(), np.split(order, first[1:]), strict=True) if len(rows) else ()
        found = sorted(parts, key=lambda part: int(part[1][0]))
        return [Rows(self.patterns[kind], self.numbers[rows[part], : self.stars[kind]]) for kind, part in found]

    def find(self, name: str) -> int | None:
        """The row of a name; None where there is none."""
        pattern, numbers = numbers_in(name) or ("", ())
        kind = self._by_pattern.get(pattern)
        if kind is None:
            return None
        if kind not in self._rows and self._asked.setdefault(kind, 0) < _FEW:  # without a table of them all
            self._asked[kind] += 1
            rows = self.by_kind[kind]
            found = rows[(self.numbers[rows, : self.stars[kind]] == np.array(numbers, np.int64)).all(axis=1)]
            return int(found[0]) if len(found) else None
        return self.rows_of(kind).get(numbers)

    def rows_of(self, kind: int) -> dict[tuple[int, ...], int]:
        """Row by numbers, of one kind."""
        if kind not in self._rows:
            rows = self.by_kind[kind]
            columns = self.numbers[rows, : self.stars[kind]].T.tolist()
            self._rows[kind] = dict(zip(zip(*columns, strict=True) if columns else [()], rows.tolist(), strict=True))
        return self._rows[kind]


class Rows(Numbered):
    """Names of one pattern by a table of their numbers."""

    def __init__(self, pattern: str, numbers: Ints) -> None:
        self.pattern, self._numbers = pattern, numbers

    def some(self, start: int, stop: int) -> list[str]:
        return filled(self.pattern, self._numbers[start:stop])

    @cached_property
    def rows(self) -> list[tuple[int, ...]]:  # type: ignore[override]
        return list(map(tuple, self._numbers.tolist()))

    @cached_property
    def columns(self) -> list[list[int]]:
        return [np.unique(column).tolist() for column in self._numbers.T]

    def __len__(self) -> int:
        return len(self._numbers)


def numbers_in(name: str) -> tuple[str, tuple[int, ...]] | None:
    """The pattern and the numbers that a name is made of; None where these are written unusually."""
    texts = _NUMBER.findall(name)
    if any(len(text) > _MOST_DIGITS or str(int(text)) != text for text in texts) or "*" in name:
        return None
    return patterns([name])[0], tuple(map(int, texts))


def filled(pattern: str, numbers: Ints) -> list[str]:
    """The pattern with each row of numbers in place of its stars."""
    if not numbers.shape[1]:
        return [pattern] * len(numbers)
    form = pattern.replace("%", "%%").replace("*", "%d")
    return [form % row for row in zip(*numbers.T.tolist(), strict=True)]


def radixes(*tables: Ints) -> list[int] | None:
    """For each column one more than its largest number in any table; None where keys would be too large."""
    most = max(table.shape[1] for table in tables)
    found = [
        1 + max((int(table[:, place].max(initial=0)) for table in tables if place < table.shape[1]), default=0)
        for place in range(most)
    ]
    keys = 1
    for radix in found:
        keys *= radix
    return found if keys < _MOST_KEYS else None


def keys(kinds: Ints, numbers: Ints, radix: Sequence[int]) -> Ints:
    """One number for each row, the same for equal kinds and numbers and for no others."""
    found = kinds.astype(np.int64)
    for place, size in enumerate(radix):
        found *= size
        if place < numbers.shape[1]:
            found += numbers[:, place]
    return found


def common_keys(one: Names, other: Names) -> tuple[Ints, Ints] | None:
    """One number for each row of both, the same for equal names and for no others; None where they are too large."""
    radix = radixes(one.numbers, other.numbers)
    if radix is None:
        return None
    numbers = {pattern: number for number, pattern in enumerate(dict.fromkeys(one.patterns + other.patterns))}
    found = (
        keys(np.array([numbers[pattern] for pattern in names.patterns])[names.kinds], names.numbers, radix)
        for names in (one, other)
    )
    return next(found), next(found)


def places_of(asked: Ints, among: Ints) -> Ints:
    """Where each of the keys asked for is among others, -1 where it is not."""
    if not len(among):
        return np.full(len(asked), -1)
    order = np.argsort(among)
    places = order[np.minimum(np.searchsorted(among, asked, sorter=order), len(among) - 1)]
    return np.where(among[places] == asked, places, -1)


def repeated(keys: Ints) -> Ints:
    """The keys that occur more than once."""
    ordered = np.sort(keys)  # `np.unique` takes ten times as long
    return ordered[1:][ordered[1:] == ordered[:-1]]
