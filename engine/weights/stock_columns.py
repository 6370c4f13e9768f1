"""What a very large checkpoint holds by kind, from its columns: what `stock.py` says of single tensors. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from firstlight.engine.weights.header import TensorInfo
from firstlight.engine.weights.lines import Ints
from firstlight.engine.weights.names import filled, keys, numbers_in, radixes
from firstlight.engine.weights.patterns import bare
from firstlight.engine.weights.stock import Kind
from firstlight.engine.weights.table import Rows, Table

_MOST_COUNTED = 1 << 20  # up to which numbers are sorted by counting them


def stock_of_table(table: Table) -> list[Kind]:
    """All kinds, in the order in which they come in the checkpoint."""
    kinds = [(rows[0], kind, rows) for kind, rows in enumerate(table.names.by_kind) if len(rows)]
    return [ColumnKind(table, kind, rows) for _, kind, rows in sorted(kinds, key=lambda item: item[0])]


class ColumnKind(Kind):
    """Rows of a table of one pattern of names."""

    def __init__(self, table: Table, kind: int, rows: Ints) -> None:
        super().__init__(table.names.patterns[kind], Rows(table, kind, rows), {})
        self._table, self._kind, self._rows = table, kind, rows
        self._numbers = table.names.numbers[rows, : table.names.stars[kind]]
        self._forms = table.place.form[rows]

    def those(self, chosen: Sequence[bool]) -> Kind:
        return ColumnKind(self._table, self._kind, self._rows[np.array(chosen)])

    def at(self, places: Sequence[int]) -> Sequence[TensorInfo]:
        if isinstance(places, range):
            return self.tensors
        return Rows(self._table, self._kind, self._rows[np.array(places, np.int64)])

    def beside(self, other: Kind) -> Sequence[int] | None:
        if self.is_numbered_like(other):
            return range(len(self.tensors))
        assert isinstance(other, ColumnKind)
        return other._places(self._numbers)

    def _places(self, numbers: Ints) -> list[int] | None:
        """The places of members with these numbers, -1 where there is none; None where that is not known."""
        radix = radixes(self._numbers, numbers)
        if radix is None or self._numbers.shape[1] != numbers.shape[1]:
            return None
        mine, asked = (keys(np.zeros(len(table), np.int64), table, radix) for table in (self._numbers, numbers))
        order = np.argsort(mine)
        places = order[np.minimum(np.searchsorted(mine, asked, sorter=order), len(mine) - 1)]
        found: list[int] = np.where(mine[places] == asked, places, -1).tolist()
        return found

    def places_as(self, pattern: str) -> Mapping[str, int]:
        return _Places(pattern, self._numbers)

    def places_of(self, pattern: str, names: Sequence[str]) -> Sequence[int]:
        texts = bare(pattern, names).replace(".", "\n").split()
        if len(texts) == len(names) * pattern.count("*") and all(map(str.isdecimal, texts)):
            numbers = np.array(list(map(int, texts)), np.int64).reshape(len(names), -1)
            found = self._places(numbers)
            if filled(pattern, numbers) == list(names) and found is not None and min(found) >= 0:
                return found
        return super().places_of(pattern, names)

    def some_as(self, pattern: str, places: Sequence[int]) -> list[str]:
        return filled(pattern, self._numbers[np.array(places, np.int64)])

    @cached_property
    def names(self) -> list[str]:
        return filled(self.pattern, self._numbers)

    @cached_property
    def numbers(self) -> list[list[int]]:
        return [_sorted(column) for column in self._numbers.T]

    @property
    def is_usual(self) -> bool:
        return True

    def is_numbered_like(self, other: Kind) -> bool:
        return isinstance(other, ColumnKind) and np.array_equal(self._numbers, other._numbers)

    def as_names(self, pattern: str) -> list[str] | None:
        is_alike = self.is_plain and pattern.count("*") == self.pattern.count("*") and "\n" not in pattern
        return filled(pattern, self._numbers) if is_alike else None

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        forms, first = np.unique(self._forms, return_index=True)
        return tuple(dict.fromkeys(self._table.forms[form][1] for form in forms[np.argsort(first)]))

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(sorted({self._table.forms[form][0] for form in np.unique(self._forms)}))

    @cached_property
    def nbytes(self) -> int:
        return self._table.bytes_of(self._forms)


class _Places(Mapping[str, int]):
    """Row by the name that a pattern makes of the numbers of each row."""

    def __init__(self, pattern: str, numbers: Ints) -> None:
        self._pattern, self._numbers = pattern, numbers

    @cached_property
    def _place(self) -> dict[tuple[int, ...], int]:
        return {numbers: place for place, numbers in enumerate(zip(*self._numbers.T.tolist(), strict=True))}

    def __getitem__(self, name: str) -> int:
        found = numbers_in(name)
        if found is None:
            raise KeyError(name)
        pattern, numbers = found
        if pattern != self._pattern:
            raise KeyError(name)
        return self._place[numbers]

    def __iter__(self) -> Iterator[str]:
        return iter(filled(self._pattern, self._numbers))

    def __len__(self) -> int:
        return len(self._numbers)


def _sorted(column: Ints) -> list[int]:
    """The numbers that occur, in order."""
    is_small = len(column) > 0 and column.max() < _MOST_COUNTED
    found: list[int] = (np.flatnonzero(np.bincount(column)) if is_small else np.unique(column)).tolist()
    return found
