"""Lists of very many names stored by pattern, spelt out only when they are read.

No torch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, islice
from typing import overload

from firstlight.engine.weights.names.patterns import grouped, literals, numbers, with_numbers


class Group(Sequence[str]):
    """Names of one pattern, or, in `kinds` patterns, of many that are not told apart."""

    pattern: str
    kinds: int = 1

    @abstractmethod
    def some(self, start: int, stop: int) -> list[str]:
        """The names from `start` to `stop`."""

    @property
    @abstractmethod
    def columns(self) -> Sequence[Sequence[int]]:
        """For each star of the pattern the numbers that occur, in order."""

    @property
    def range(self) -> str:
        """The pattern with its numbers: `layers.{0..39}.mlp.gate.weight`."""
        return with_numbers(self.pattern, self.columns)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> list[str]: ...
    def __getitem__(self, place: int | slice) -> str | list[str]:
        if isinstance(place, slice):
            return self.some(*place.indices(len(self))[:2])[:: place.step or 1]
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        return self.some(place % len(self), place % len(self) + 1)[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self.some(0, len(self)))


class Spelt(Group):
    """Names that are there already."""

    def __init__(self, pattern: str, names: list[str]) -> None:
        self.pattern, self._names = pattern, names

    def some(self, start: int, stop: int) -> list[str]:
        return self._names[start:stop]

    @cached_property
    def columns(self) -> Sequence[Sequence[int]]:
        return numbers(self.pattern, self._names)

    def __len__(self) -> int:
        return len(self._names)


class Numbered(Group):
    """Names by what stands at the stars of their pattern."""

    def __init__(self, pattern: str, rows: Sequence[tuple[int, ...]]) -> None:
        self.pattern, self.rows = pattern, rows

    def some(self, start: int, stop: int) -> list[str]:
        form = "%d".join(words.replace("%", "%%") for words in literals(self.pattern))
        return [form % row for row in self.rows[start:stop]]

    @cached_property
    def columns(self) -> Sequence[Sequence[int]]:
        return [sorted(set(column)) for column in zip(*self.rows, strict=True)]

    def __len__(self) -> int:
        return len(self.rows)


class Listed(Sequence[str]):
    """Names one by one, and whole groups of them."""

    def __init__(self, names: Iterable[str] = (), groups: Iterable[Group] = ()) -> None:
        self._names, self._groups = list(names), list(groups)

    @staticmethod
    def firsts(names: Sequence[str]) -> Sequence[str]:
        """The names; of very many the first of each pattern."""
        return [group[0] for group in names.by_pattern().values()] if isinstance(names, Listed) else names

    def append(self, name: str) -> None:
        self._names.append(name)

    def add(self, group: Group) -> None:
        self._groups.append(group)

    def by_pattern(self) -> dict[str, Group]:
        """All names by pattern, in order of first sight."""
        found: dict[str, Group] = {p: Spelt(p, names) for p, names in grouped(self._names, str).items()}
        for group in self._groups:
            other = found.get(group.pattern)
            found[group.pattern] = group if other is None else Spelt(group.pattern, [*other, *group])
        return found

    def shown(self, most: int = 4) -> str:
        """The first patterns with the numbers that occur."""
        return "; ".join(group.range for group in islice(self.by_pattern().values(), most))

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> list[str]: ...
    def __getitem__(self, place: int | slice) -> str | list[str]:
        if isinstance(place, slice):
            start, stop, step = place.indices(len(self))
            return list(islice(self, start, stop, step))
        for part in (self._names, *self._groups):
            if 0 <= place < len(part):
                return part[place]
            place -= len(part)
        raise IndexError(place)

    def __iter__(self) -> Iterator[str]:
        return chain(self._names, *self._groups)

    def __len__(self) -> int:
        return len(self._names) + sum(map(len, self._groups))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(str.__eq__, self, other))

    def __hash__(self) -> int:
        raise TypeError("names that are still listed have no hash")
