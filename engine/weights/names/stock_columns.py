"""Groups a very large checkpoint's tensors by kind from its columns; `stock.py` does the same for objects. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import cast

import numpy as np
from numpy.typing import NDArray

from firstlight.engine.weights.files.lines import Ints
from firstlight.engine.weights.files.shard_columns import Form
from firstlight.engine.weights.names.columns import Motley, filled, occurring, places_of, row_keys
from firstlight.engine.weights.names.listed import Group
from firstlight.engine.weights.names.patterns import bare, parted
from firstlight.engine.weights.names.stock import Kind
from firstlight.engine.weights.names.table import Rows, Table

_MOST_COUNTED = 1 << 20  # up to which numbers are sorted by counting them
FEW, MOST_OF_FEW = 16, 5_000  # tensors of a kind, and such kinds: what is beyond both is one crowd


def stock_of_table(table: Table) -> list[Kind]:
    """All kinds, in the order in which they come in the checkpoint, and the crowd, if there is one, behind them."""
    names = table.names
    counts = names.counts
    first = np.full(len(counts), len(names))
    first[names.kinds[::-1]] = np.arange(len(names))[::-1]
    ordered = np.argsort(first, kind="stable")[: np.count_nonzero(counts)]
    crowd = ordered[counts[ordered] < FEW][MOST_OF_FEW:]
    is_crowd = np.zeros(len(counts), bool)
    is_crowd[crowd] = True
    found: list[Kind] = [ColumnKind(table, kind, names.of_kind(kind)) for kind in ordered[~is_crowd[ordered]].tolist()]
    return [*found, Crowd(table, np.flatnonzero(is_crowd[names.kinds]))] if len(crowd) else found


class ColumnKind(Kind):
    """Rows of a table of one pattern of names."""

    def __init__(self, table: Table, kind: int, rows: Ints, places: Sequence[int] | None = None) -> None:
        super().__init__(table.names.patterns[kind], Rows(table, kind, rows), {}, places)
        self._table, self._kind, self._rows = table, kind, rows
        self._numbers = table.names.numbers[rows, : table.names.stars[kind]]
        self._forms = table.place.form[rows]

    def those(self, places: Sequence[int]) -> Kind:
        if isinstance(places, range):
            return self
        chosen = np.asarray(places, np.int64)
        is_whole = isinstance(self.places, range)
        return self._at(self._rows[chosen], _places(chosen if is_whole else _array(self.places)[chosen]))

    def _at(self, rows: Ints, places: Sequence[int]) -> Kind:
        return ColumnKind(self._table, self._kind, rows, places)

    def without(self, taken: Iterable[Sequence[int]]) -> Kind | None:
        is_left = np.ones(len(self._rows), bool)
        for places in taken:
            is_left[_array(places)] = False
        left = np.flatnonzero(is_left)
        return self.those(_places(left)) if len(left) else None

    def beside(self, other: Kind) -> Sequence[int] | None:
        if self.is_numbered_like(other):
            return range(len(self.tensors))
        assert isinstance(other, ColumnKind)
        found = other._places_with(self._numbers)
        return None if found is None else _places(found)

    def _places_with(self, numbers: Ints) -> Ints | None:
        """The places of members with these numbers, -1 where there is none; None where that is not known."""
        if self._numbers.shape[1] != numbers.shape[1]:
            return None
        mine, asked = row_keys(*((np.zeros(len(table), np.int64), table) for table in (self._numbers, numbers)))
        return places_of(asked, mine)

    def alike(self, others: Sequence[tuple[Kind, Sequence[int]]]) -> list[Sequence[int]]:
        if self.is_uniform and all(kind.is_uniform and isinstance(places, range) for kind, places in others):
            return [range(len(self.tensors))]
        most = len(self._table.forms) + 1
        key = self._forms.astype(np.int64)
        for kind, places in others:
            assert isinstance(kind, ColumnKind)
            place = _array(places)
            _, key = np.unique(key, return_inverse=True)  # so that they stay small
            key = key * most + np.where(place >= 0, kind._forms[place] + 1, 0)
        _, first, group = np.unique(key, return_index=True, return_inverse=True)
        parts = np.split(np.argsort(group, kind="stable"), np.cumsum(np.bincount(group))[:-1])
        return [parts[number] for number in np.argsort(first)]

    def within(self, numbers: Sequence[Sequence[int]]) -> Sequence[int]:
        columns = zip(self._numbers.T, numbers, strict=True)
        is_in = np.logical_and.reduce([_are_among(column, known) for column, known in columns])
        return range(len(self._rows)) if is_in.all() else _places(np.flatnonzero(is_in))

    @property
    def is_plain(self) -> bool:
        """Whether names have numbers; of columns it does not matter how many."""
        return "*" in self.pattern

    @property
    def rows(self) -> list[tuple[int, ...]]:
        return list(map(tuple, self._numbers.tolist()))

    def some_names(self, start: int, stop: int) -> list[str]:
        return filled(self.pattern, self._numbers[start:stop])

    def places_as(self, pattern: str) -> Mapping[str, int]:
        return _Places(pattern, self._numbers)

    def places_of(self, pattern: str, names: Sequence[str]) -> Sequence[int]:
        texts = bare(pattern, names).replace(".", "\n").split()
        if len(texts) == len(names) * pattern.count("*") and all(map(str.isdecimal, texts)):
            numbers = np.array(list(map(int, texts)), np.int64).reshape(len(names), -1)
            found = self._places_with(numbers)
            if filled(pattern, numbers) == list(names) and found is not None:
                return _places(found)
        return super().places_of(pattern, names)

    def some_as(self, pattern: str, places: Sequence[int]) -> list[str]:
        return filled(pattern, self._numbers[np.array(places, np.int64)])

    @cached_property
    def names(self) -> list[str]:
        return filled(self.pattern, self._numbers)

    @cached_property
    def numbers(self) -> list[list[int]]:
        return [_sorted(column) for column in self._numbers.T]

    def is_numbered_like(self, other: Kind) -> bool:
        return isinstance(other, ColumnKind) and np.array_equal(self._numbers, other._numbers)

    def as_names(self, pattern: str) -> list[str] | None:
        is_alike = self.is_plain and pattern.count("*") == self.pattern.count("*") and "\n" not in pattern
        return filled(pattern, self._numbers) if is_alike else None

    @cached_property
    def _there(self) -> list[Form]:
        """Dtypes and shapes of the members, in order of first sight."""
        return list(map(self._table.forms.__getitem__, dict.fromkeys(self._forms.tolist())))

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(dict.fromkeys(form.shape for form in self._there))

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(sorted({form.dtype for form in self._there}))

    @cached_property
    def nbytes(self) -> int:
        return self._table.bytes_of(self._forms)

    def by_dtype(self) -> Iterator[tuple[str, int, int, int]]:
        for form, count in enumerate(np.bincount(self._forms).tolist()):
            if count:
                dtype, shape, nbytes = self._table.forms[form]
                yield dtype, count, count * math.prod(shape), count * nbytes


class Crowd(ColumnKind):
    """Tensors of very many patterns of names, a few of each, as no model has them: they are not told apart."""

    def __init__(self, table: Table, rows: Ints, places: Sequence[int] | None = None) -> None:
        Kind.__init__(self, "\n", Rows(table, None, rows), {}, places)  # no name is like that
        self._table, self._rows, self._forms = table, rows, table.place.form[rows]
        self._kinds = table.names.kinds[rows]
        self._numbers = table.names.numbers[rows, :0]

    def _at(self, rows: Ints, places: Sequence[int]) -> Kind:
        return Crowd(self._table, rows, places)

    @cached_property
    def kinds(self) -> int:
        return len(occurring(self._kinds))

    def chosen(self, are_so: Callable[[Sequence[str]], Sequence[bool]]) -> Sequence[int]:
        """The places of the members whose patterns are so."""
        patterns = self._table.names.patterns
        chosen = np.zeros(len(patterns), bool)
        there = occurring(self._kinds)
        chosen[there] = are_so([patterns[kind] for kind in there.tolist()])
        return _places(np.flatnonzero(chosen[self._kinds]))

    @property
    def group(self) -> Group:
        return Motley(self._table.names, self._rows, self.kinds)

    @property
    def range(self) -> str:
        return self.group.range

    def some_names(self, start: int, stop: int) -> list[str]:
        return self._table.names.some(self._rows[start:stop])

    @cached_property
    def names(self) -> list[str]:
        return self._table.names.some(self._rows)


class _Places(Mapping[str, int]):
    """Row by the name that a pattern makes of the numbers of each row."""

    def __init__(self, pattern: str, numbers: Ints) -> None:
        self._pattern, self._numbers = pattern, numbers

    @cached_property
    def _place(self) -> dict[tuple[int, ...], int]:
        return {numbers: place for place, numbers in enumerate(zip(*self._numbers.T.tolist(), strict=True))}

    def __getitem__(self, name: str) -> int:
        pattern, numbers = parted(name)
        if pattern != self._pattern:
            raise KeyError(name)
        return self._place[numbers]

    def __iter__(self) -> Iterator[str]:
        return iter(filled(self._pattern, self._numbers))

    def __len__(self) -> int:
        return len(self._numbers)


def _places(places: Ints) -> Sequence[int]:
    """An array as what it can do as well; the whole numbers of a sequence."""
    return cast("Sequence[int]", places)


def _array(places: Sequence[int]) -> Ints:
    return np.arange(places.start, places.stop) if isinstance(places, range) else np.asarray(places, np.int64)


def _are_among(column: Ints, known: Sequence[int]) -> NDArray[np.bool_]:
    """Which numbers are among those known, which are in order and mostly without gaps."""
    if known and known[-1] - known[0] == len(known) - 1:
        return (column >= known[0]) & (column <= known[-1])
    return np.isin(column, known)


def _sorted(column: Ints) -> list[int]:
    """The numbers that occur, in order."""
    is_small = len(column) > 0 and column.max() < _MOST_COUNTED
    found: list[int] = (np.flatnonzero(np.bincount(column)) if is_small else np.unique(column)).tolist()
    return found
