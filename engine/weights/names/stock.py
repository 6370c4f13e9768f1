"""Groups a checkpoint's tensors by kind: names that differ only in numbers.

The same of a `Table` is in `stock_columns.py`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from operator import attrgetter

from firstlight.engine.weights.files.header import TensorInfo
from firstlight.engine.weights.names.listed import Group
from firstlight.engine.weights.names.patterns import bare, grouped, named, numbers, with_numbers

_name, _shape, _dtype, _nbytes = map(attrgetter, ("name", "shape", "dtype", "nbytes"))
_form, _size = attrgetter("dtype", "shape"), attrgetter("dtype", "shape", "nbytes")
VISION = ("vision", "visual", "image", "audio", "speech", "vit")  # parts of the names of what is not the text model
EXTRA = ("mtp", "nextn", "draft", "eagle", "medusa")  # and of extra prediction layers


class Lazy(Sequence[TensorInfo], ABC):
    """Tensors that are made when they are asked for."""

    @abstractmethod
    def some(self, places: Sequence[int]) -> Sequence[TensorInfo]:
        """Those at places, at once."""


def some(tensors: Sequence[TensorInfo], places: Sequence[int]) -> Sequence[TensorInfo]:
    """The tensors at places."""
    return tensors.some(places) if isinstance(tensors, Lazy) else [tensors[place] for place in places]


class Kind:
    """Tensors of one pattern of names; everything else is counted once, when it is asked for.

    `places`: where the members are in the whole kind, of which this may be a part.
    """

    def __init__(
        self,
        pattern: str,
        tensors: Sequence[TensorInfo],
        known: dict[str, list[list[int]]],
        places: Sequence[int] | None = None,
    ) -> None:
        self.pattern = pattern
        self.tensors = tensors
        self._known = known
        self.places: Sequence[int] = range(len(tensors)) if places is None else places

    def those(self, places: Sequence[int]) -> Kind:
        """The members at places; a range is all of them."""
        if isinstance(places, range):
            return self
        return Kind(self.pattern, some(self.tensors, places), {}, some_of(self.places, places))

    def without(self, taken: Iterable[Sequence[int]]) -> Kind | None:
        """The members at no place that is `taken`; None where there are none."""
        gone = set(chain.from_iterable(taken))
        left = [place for place in range(len(self.tensors)) if place not in gone]
        return self.those(left) if left else None

    def beside(self, other: Kind) -> Sequence[int] | None:
        """The place in another kind of the member with the numbers of each member, -1 where there is none.

        None where that is not known of such names. A range: both are numbered alike.
        """
        if self.is_numbered_like(other):
            return range(len(self.tensors))
        names = self.as_names(other.pattern)
        if names is None:
            return None
        places = {name: place for place, name in enumerate(other.names)}
        return [places.get(name, -1) for name in names]

    def alike(self, others: Sequence[tuple[Kind, Sequence[int]]]) -> list[Sequence[int]]:
        """The places of members with one dtype and shape that have members alike beside them, or none, in groups.

        `others`: kinds with the place there of each member here, as `beside` has it. A range: all are alike.
        """
        if self.is_uniform and all(kind.is_uniform and isinstance(places, range) for kind, places in others):
            return [range(len(self.tensors))]
        forms = [_form(tensor) for tensor in self.tensors]
        columns: list[Iterable[object]] = [forms]
        for kind, places in others:
            beside = forms if kind is self else [_form(tensor) for tensor in kind.tensors]
            columns.append([beside[place] if place >= 0 else None for place in places])
        groups: dict[object, list[int]] = defaultdict(list)
        for place, key in enumerate(zip(*columns, strict=True)):
            groups[key].append(place)
        return list(groups.values())

    def within(self, numbers: Sequence[Sequence[int]]) -> Sequence[int]:
        """The places of members whose numbers are among those given for each star; a range: all are."""
        wanted = list(map(set, numbers))
        if all(known.issuperset(found) for known, found in zip(wanted, self.numbers, strict=True)):
            return range(len(self.tensors))
        return [p for p, row in enumerate(self.rows) if all(n in known for n, known in zip(row, wanted, strict=True))]

    @property
    def rows(self) -> list[tuple[int, ...]]:
        """The numbers of each member."""
        stars = self.pattern.count("*")
        flat = list(map(int, self.bare[1:-1].replace("\n", ".").split(".")))
        return list(zip(*(flat[star::stars] for star in range(stars)), strict=True))

    @property
    def group(self) -> Group:
        """The names, each made when it is asked for."""
        return Members(self)

    def some_names(self, start: int, stop: int) -> list[str]:
        """The names of the members from `start` to `stop`."""
        return self.names[start:stop]

    def places_as(self, pattern: str) -> Mapping[str, int]:
        """The place of each member by what it would be called by another pattern; there must be such names."""
        names = self.as_names(pattern)
        assert names is not None
        return {name: place for place, name in enumerate(names)}

    def places_of(self, pattern: str, names: Sequence[str]) -> Sequence[int]:
        """The places of members by what they would be called by another pattern, -1 where there is none."""
        places = self.places_as(pattern)
        return [places.get(name, -1) for name in names]

    def some_as(self, pattern: str, places: Sequence[int]) -> list[str]:
        """What the members at places would be called by another pattern; there must be such names."""
        names = list(map(_name, some(self.tensors, places)))
        found = named(bare(self.pattern, names), len(names), pattern) if names else []
        assert found is not None
        return found

    @cached_property
    def first(self) -> str:
        """The name of the first member."""
        return self.tensors[0].name

    @cached_property
    def names(self) -> list[str]:
        return list(map(_name, self.tensors))

    @cached_property
    def bare(self) -> str:
        """The numbers of all names, line by line."""
        return bare(self.pattern, self.names)

    @cached_property
    def numbers(self) -> list[list[int]]:
        """For each star of the pattern the numbers that occur; found once for all kinds that are numbered alike."""
        if not self.is_plain:
            return numbers(self.pattern, self.names)
        key = f"{self.pattern.count('*')}{self.bare}"
        if key not in self._known:
            self._known[key] = numbers(self.pattern, self.names, self.bare)
        return self._known[key]

    @property
    def is_plain(self) -> bool:
        """Whether names are made of the pattern and one or two numbers, and of nothing unusual."""
        return 1 <= self.pattern.count("*") <= 2 and "\n" not in self.pattern

    def is_numbered_like(self, other: Kind) -> bool:
        """Whether both have the same numbers in the same order."""
        both = self.is_plain and other.is_plain and self.pattern.count("*") == other.pattern.count("*")
        return both and self.bare == other.bare

    @cached_property
    def range(self) -> str:
        """The pattern with the numbers that occur."""
        return with_numbers(self.pattern, self.numbers)

    def as_names(self, pattern: str) -> list[str] | None:
        """What the tensors would be called by another pattern with the same numbers; None where that is not known."""
        return named(self.bare, len(self.tensors), pattern)

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(dict.fromkeys(map(_shape, self.tensors)))

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(sorted(set(map(_dtype, self.tensors))))

    @cached_property
    def nbytes(self) -> int:
        return sum(map(_nbytes, self.tensors))

    @property
    def kinds(self) -> int:
        """How many kinds this stands for: one, but for the crowd of `stock_columns.py`."""
        return 1

    def chosen(self, are_so: Callable[[Sequence[str]], Sequence[bool]]) -> Sequence[int]:
        """The places of members whose pattern is so."""
        return range(len(self.tensors)) if are_so([self.pattern])[0] else []

    def by_dtype(self) -> Iterator[tuple[str, int, int, int]]:
        """dtype, tensors, elements and bytes of members that share the first, or more."""
        for (dtype, shape, nbytes), count in Counter(map(_size, self.tensors)).items():
            yield dtype, count, count * math.prod(shape), count * nbytes

    @property
    def is_uniform(self) -> bool:
        """Whether all have one dtype and one shape."""
        return len(self.shapes) == 1 and len(self.dtypes) == 1

    @property
    def is_text(self) -> bool:
        return not any(word in part for part in self.pattern.lower().split(".") for word in VISION + EXTRA)


class Members(Group):
    """The names of a kind."""

    def __init__(self, kind: Kind) -> None:
        self.pattern, self._kind = kind.pattern, kind

    def some(self, start: int, stop: int) -> list[str]:
        return self._kind.some_names(start, stop)

    @property
    def columns(self) -> Sequence[Sequence[int]]:
        return self._kind.numbers

    def __len__(self) -> int:
        return len(self._kind.tensors)


def some_of(items: Sequence[int], places: Sequence[int]) -> list[int]:
    """The items at places."""
    return list(map(items.__getitem__, places))


def stock(tensors: Mapping[str, TensorInfo]) -> list[Kind]:
    """All kinds, in the order in which they come in the checkpoint."""
    if not isinstance(tensors, dict):
        from firstlight.engine.weights.names.stock_columns import stock_of_table
        from firstlight.engine.weights.names.table import Table

        if isinstance(tensors, Table):
            return stock_of_table(tensors)
    return stock_of(tensors.values())


def stock_of(tensors: Iterable[TensorInfo]) -> list[Kind]:
    """All kinds of any tensors."""
    known: dict[str, list[list[int]]] = {}
    return [Kind(pattern, of_it, known) for pattern, of_it in grouped(tensors, _name).items()]


def by_dtype(kinds: Iterable[Kind]) -> dict[str, tuple[int, int, int]]:
    """dtype -> tensors, elements, bytes; the most bytes first."""
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for kind in kinds:
        for dtype, *counts in kind.by_dtype():
            totals[dtype] = [sum(both) for both in zip(totals[dtype], counts, strict=True)]
    ordered = sorted(totals.items(), key=lambda item: -item[1][2])
    return {dtype: (count, elements, nbytes) for dtype, (count, elements, nbytes) in ordered}


def numbered(kinds: Iterable[Kind], words: Sequence[str]) -> Iterator[tuple[Kind, list[int]]]:
    """Kinds with a number right after one of `words`, and the numbers that occur there; none where there is a crowd."""
    kinds = list(kinds)
    for kind in kinds if all(kind.kinds == 1 for kind in kinds) else ():
        parts = kind.pattern.split(".")
        stars = [place for place, part in enumerate(parts) if part.endswith("*")]
        for star, found in zip(stars, kind.numbers, strict=True):
            if star and parts[star - 1] in words and parts[star].strip("0") == "*":
                yield kind, found
                break
