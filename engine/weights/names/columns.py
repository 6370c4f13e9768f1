"""Tensor metadata as columns (arrays) instead of objects, for checkpoints of half a million tensors. No torch.

A name is a pattern, `layers.*.w1`, and its numbers; `Names` makes it when it is asked for. What is made here from
whole headers is what the plain parser (`header.py`) gives for them; for a header about which anything is unusual there
is that parser.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from firstlight.engine.findings import MOST_TENSORS
from firstlight.engine.weights.files.lines import Ints, Vocabulary
from firstlight.engine.weights.names.listed import Group, Listed, Numbered
from firstlight.engine.weights.names.patterns import STAR_ITSELF, literals, parted

_MOST_KEYS = 1 << 62
_FEW = 16  # names of a kind that are looked for one by one
_MOST_GROUPS = 5_000  # of names that are told apart by pattern


class Names:
    """Names by row: `kinds` is the pattern of each, `numbers` what stands at its stars, in order, 0 behind these.

    Patterns are numbered by a vocabulary, which all names of a checkpoint share and which may still grow.
    """

    def __init__(self, vocabulary: Vocabulary, kinds: Ints, numbers: Ints) -> None:
        self.vocabulary, self.kinds, self.numbers = vocabulary, kinds, numbers
        self._rows: dict[int, dict[tuple[int, ...], int]] = {}
        self._asked: dict[int, int] = {}

    @property
    def patterns(self) -> tuple[str, ...]:
        """All patterns that the names here or others of the same vocabulary have."""
        return self.vocabulary.texts

    def __len__(self) -> int:
        return len(self.kinds)

    def at(self, rows: slice | Ints | NDArray[np.bool_]) -> Names:
        """Some of the names."""
        return Names(self.vocabulary, self.kinds[rows], self.numbers[rows])

    @property
    def stars(self) -> list[int]:
        """How many numbers a name of each pattern has."""
        return self.vocabulary.stars

    def of(self, kind: int, rows: Ints, pattern: str | None = None) -> list[str]:
        """Names of rows of one kind, or what they are by another pattern of as many stars."""
        pattern = self.patterns[kind] if pattern is None else pattern
        return filled(pattern, self.numbers[rows, : self.stars[kind]])

    def some(self, rows: Ints) -> list[str]:
        """Names of any rows."""
        kinds = self.kinds[rows]
        there = occurring(kinds)
        if _FEW * len(there) > len(rows):
            return self._one_by_one(kinds.tolist(), self.numbers[rows].tolist())
        found = np.empty(len(rows), object)
        for kind in there.tolist():
            places = np.flatnonzero(kinds == kind)
            found[places] = self.of(kind, rows[places])
        names: list[str] = found.tolist()
        return names

    def _one_by_one(self, kinds: list[int], numbers: list[list[int]]) -> list[str]:
        """The same of names that have few of a kind."""
        forms = {kind: _form(self.patterns[kind]) for kind in set(kinds) if self.stars[kind]}
        return [
            forms[kind] % tuple(row[: self.stars[kind]])
            if kind in forms
            else self.patterns[kind].replace(STAR_ITSELF, "*")
            for kind, row in zip(kinds, numbers, strict=True)
        ]

    @cached_property
    def _by_kind(self) -> tuple[Ints, Ints]:
        """All rows, kind by kind, and where those of each kind stop."""
        return np.argsort(self.kinds, kind="stable"), np.cumsum(np.bincount(self.kinds, minlength=len(self.patterns)))

    def of_kind(self, kind: int) -> Ints:
        """The rows of a kind, in order."""
        rows, stops = self._by_kind
        if kind >= len(stops):  # a pattern that came later
            return rows[:0]
        return rows[stops[kind - 1] if kind else 0 : stops[kind]]

    @cached_property
    def counts(self) -> Ints:
        """How many names each kind has."""
        return np.diff(self._by_kind[1], prepend=0)

    def listed(self, rows: Ints) -> Sequence[str]:
        """Names of any rows: in their order where a finding names them all, else kind by kind."""
        return self.some(rows) if len(rows) <= MOST_TENSORS else Listed(groups=self.groups(rows))

    def groups(self, rows: Ints) -> list[Group]:
        """The names of rows by kind, kinds in the order in which they come; those of very many kinds together."""
        kinds = self.kinds[rows]
        if (count := len(occurring(kinds))) > _MOST_GROUPS:
            return [Motley(self, rows, count)]
        order = np.argsort(kinds, kind="stable")
        there, first = np.unique(kinds[order], return_index=True)
        parts = zip(there.tolist(), np.split(order, first[1:]), strict=True) if len(rows) else ()
        found = sorted(parts, key=lambda part: int(part[1][0]))
        return [Rows(self.patterns[kind], self.numbers[rows[part], : self.stars[kind]]) for kind, part in found]

    def find(self, name: str) -> int | None:
        """The row of a name; None where there is none."""
        pattern, numbers = parted(name)
        kind = self.vocabulary.get(pattern)
        if kind is None or self.stars[kind] != len(numbers):  # a name with a star of its own
            return None
        if kind not in self._rows and self._asked.setdefault(kind, 0) < _FEW:  # without a table of them all
            self._asked[kind] += 1
            rows = self.of_kind(kind)
            found = rows[(self.numbers[rows, : self.stars[kind]] == np.array(numbers, np.int64)).all(axis=1)]
            return int(found[0]) if len(found) else None
        return self.rows_of(kind).get(numbers)

    def rows_of(self, kind: int) -> dict[tuple[int, ...], int]:
        """Row by numbers, of one kind."""
        if kind not in self._rows:
            rows = self.of_kind(kind)
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


class Motley(Group):
    """Names of very many patterns, which are not told apart."""

    def __init__(self, names: Names, rows: Ints, count: int) -> None:
        self.pattern = f"\n{id(self)}"  # that no name has
        self.kinds, self._names, self._rows = count, names, rows

    def some(self, start: int, stop: int) -> list[str]:
        return self._names.some(self._rows[start:stop])

    @property
    def columns(self) -> list[list[int]]:
        return []

    @property
    def range(self) -> str:
        return f"{self[0]} and others of {self.kinds:,} kinds"

    def __len__(self) -> int:
        return len(self._rows)


def filled(pattern: str, numbers: Ints) -> list[str]:
    """The pattern with each row of numbers in place of its stars."""
    if not numbers.shape[1]:
        return literals(pattern) * len(numbers)
    form = _form(pattern)
    return [form % row for row in zip(*numbers.T.tolist(), strict=True)]


def _form(pattern: str) -> str:
    return "%d".join(words.replace("%", "%%") for words in literals(pattern))


def row_keys(*tables: tuple[Ints, Ints]) -> list[Ints]:
    """One number for each row of each table, the same for equal kinds and numbers and for no others.

    Tables are kinds [rows] and numbers [rows, columns]; columns that a table lacks are zeros.
    """
    lengths = np.cumsum([len(kinds) for kinds, _ in tables])[:-1]
    found: list[Ints] = [kinds.astype(np.int64) for kinds, _ in tables]
    bound = 1 + max(int(kinds.max(initial=0)) for kinds in found)
    for place in range(max(numbers.shape[1] for _, numbers in tables)):
        columns: list[Ints] = [
            numbers[:, place] if place < numbers.shape[1] else np.zeros(len(numbers), np.int64) for _, numbers in tables
        ]
        size = 1 + max(int(column.max(initial=0)) for column in columns)
        if size == 1:
            continue
        if bound > _MOST_KEYS // size:  # they are counted instead, as far as they occur
            found, bound = _counted(found, lengths)
            columns, size = _counted(columns, lengths)
        found = [key * size + column for key, column in zip(found, columns, strict=True)]
        bound *= size
    return found


def _counted(columns: Sequence[Ints], lengths: Ints) -> tuple[list[Ints], int]:
    """Small numbers in place of large ones, and how many there are."""
    there, small = np.unique(np.concatenate(columns), return_inverse=True)
    return np.split(small, lengths), len(there)


def common_keys(one: Names, other: Names) -> list[Ints]:
    """One number for each row of both, the same for equal names and for no others."""
    assert one.vocabulary is other.vocabulary
    return row_keys(*((names.kinds, names.numbers) for names in (one, other)))


def occurring(kinds: Ints) -> Ints:
    """The small numbers that occur, in order; `np.unique` takes far longer where they are many."""
    return np.flatnonzero(np.bincount(kinds))


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
