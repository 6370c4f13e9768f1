"""Parses the weight map of a very large index into columns: the file of each tensor. No torch."""

from __future__ import annotations

import re
from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView

import msgspec
import numpy as np

from firstlight.engine.weights.files.index import Differences, differences
from firstlight.engine.weights.files.lines import Ints, Vocabulary, compact, read_lines
from firstlight.engine.weights.names.columns import Names, common_keys, places_of, repeated, row_keys
from firstlight.engine.weights.names.listed import Group
from firstlight.engine.weights.names.patterns import STAR_ITSELF
from firstlight.engine.weights.names.table import Table

_OPENING = re.compile(rb'"weight_map"\s*:\s*\{\s*"')
_MOST_BLANKS = 64  # before the brace that closes the map
_NO_FILE = re.compile(rf'["\\*{STAR_ITSELF}]')  # names of files with these go to the plain parser


class WeightMap(Mapping[str, str]):
    """File by tensor, in the order of the index."""

    def __init__(self, names: Names, files: Sequence[str], file: Ints) -> None:
        self.names, self.files, self.file = names, tuple(files), file

    def __getitem__(self, name: str) -> str:
        row = self.names.find(name)
        if row is None:
            raise KeyError(name)
        return self.files[self.file[row]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names.some(np.arange(len(self))))

    def __len__(self) -> int:
        return len(self.names)

    def values(self) -> ValuesView[str]:
        return _Values(self)

    def items(self) -> ItemsView[str, str]:
        return _Items(self)

    def names_in(self, file: str) -> Sequence[str]:
        """The tensors of one file, in the order of the index where they are few."""
        number = self.files.index(file) if file in self.files else -1
        return self.names.listed(np.flatnonzero(self.file == number))

    def by_pattern(self) -> Iterator[tuple[Group, list[str]]]:
        """The tensors by pattern, with the file of each."""
        for kind in np.flatnonzero(self.names.counts).tolist():
            rows = self.names.of_kind(kind)
            (group,) = self.names.groups(rows)
            yield group, [self.files[number] for number in self.file[rows].tolist()]

    def those(self, rows: Ints) -> WeightMap:
        """Some of the entries."""
        return WeightMap(self.names.at(rows), self.files, self.file[rows])


class _Values(ValuesView[str]):
    _mapping: WeightMap

    def __iter__(self) -> Iterator[str]:
        return map(self._mapping.files.__getitem__, self._mapping.file.tolist())


class _Items(ItemsView[str, str]):
    _mapping: WeightMap

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return zip(self._mapping, self._mapping.values(), strict=True)


def read_weight_map(text: bytes) -> tuple[WeightMap, bytes] | None:
    """The map of an index, and the index with an empty one in its place; None where anything about it is unusual."""
    opening = _OPENING.search(text)
    if opening is None:
        return None
    start = opening.end()
    stop = _closing(text, start)
    found = _of_lines(compact(text[start:stop].rstrip(b" \t\r\n")), Vocabulary())
    return None if found is None else (found, text[: start - 1] + text[stop:])


def _closing(text: bytes, start: int) -> int:
    """Where the map is closed: the first brace behind a quote."""
    stop = text.find(b"}", start)
    while stop >= 0 and not text[max(start, stop - _MOST_BLANKS) : stop].rstrip().endswith(b'"'):
        stop = text.find(b"}", stop + 1)
    return stop


def _of_lines(entries: bytes, vocabulary: Vocabulary) -> WeightMap | None:
    lines = read_lines(entries, b'":"', b'","', vocabulary) if entries.endswith(b'"') else None
    if lines is None or any(map(_NO_FILE.search, lines.tails)):
        return None
    (keys,) = row_keys((lines.head, lines.numbers))
    if len(repeated(keys)):
        return None
    return WeightMap(Names(vocabulary, lines.head, lines.numbers), lines.tails, lines.tail)


def unlike(weight_map: Mapping[str, str], tensors: Table) -> Differences:
    """What is not the same in an index and in the headers of very many tensors."""
    if not isinstance(weight_map, WeightMap):
        written = msgspec.json.encode(dict(weight_map))
        found = _of_lines(written[2:-1], tensors.names.vocabulary) if weight_map else None
        if found is None:
            return differences(weight_map, dict(tensors.items()))
        weight_map = found
    names = tensors.names
    mine, listed = common_keys(names, weight_map.names)
    row = np.arange(len(mine)) if np.array_equal(mine, listed) else places_of(listed, mine)
    there = row >= 0  # of each that is listed
    numbers = {file: number for number, file in enumerate(tensors.files)}
    files = np.array([numbers.get(file, -1) for file in weight_map.files])
    is_moved = there & (files[weight_map.file] != tensors.place.file[row])
    is_unlisted = np.ones(len(mine), bool)
    is_unlisted[row[there]] = False
    unlisted, moved = np.flatnonzero(is_unlisted), weight_map.those(np.flatnonzero(is_moved))
    return Differences(
        names.listed(unlisted),
        sorted(tensors.files[file] for file in np.unique(tensors.place.file[unlisted]).tolist()),
        weight_map.those(np.flatnonzero(~there)),
        moved.names.listed(np.arange(len(moved))),
        next(iter(moved.values()), ""),
    )
