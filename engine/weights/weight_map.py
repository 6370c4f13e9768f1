"""The map of a very large index as columns: which file each tensor is in, by the index. No torch."""

from __future__ import annotations

import re
from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView

import msgspec
import numpy as np

from firstlight.engine.weights.header import TensorInfo
from firstlight.engine.weights.lines import Ints, read_lines
from firstlight.engine.weights.names import Names, keys, radixes, repeated
from firstlight.engine.weights.shard_columns import NAME
from firstlight.engine.weights.table import Table

_OPENING = re.compile(rb'"weight_map"\s*:\s*\{\s*"')
_BETWEEN = re.compile(rb'"(,\s*")')
_LINE = re.compile(rf'{NAME}": ?"([^"\\{{}}\[\],:*\x00-\x1f]*)')


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

    def names_in(self, file: str) -> list[str]:
        """The tensors of one file, in the order of the index."""
        number = self.files.index(file) if file in self.files else -1
        return self.names.some(np.flatnonzero(self.file == number))

    def some(self, rows: Ints) -> dict[str, str]:
        """Some of the entries."""
        files = [self.files[number] for number in self.file[rows].tolist()]
        return dict(zip(self.names.some(rows), files, strict=True))


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
    start, stop = opening.end(), text.find(b"}", opening.end())
    entries = text[start:stop].rstrip(b" \t\r\n")
    between = _BETWEEN.search(entries)
    if stop < 0 or between is None or not entries.endswith(b'"'):
        return None
    found = _of_lines(entries, b'"' + between[1])
    return None if found is None else (found, text[: start - 1] + text[stop:])


def _of_lines(entries: bytes, between: bytes) -> WeightMap | None:
    lines = read_lines(entries, between)
    matches = [_LINE.fullmatch(form) for form in lines.forms] if lines is not None else [None]
    pairs = [(match[1], match[2]) for match in matches if match is not None]
    if lines is None or len(pairs) < len(matches):
        return None
    patterns = {pattern: number for number, pattern in enumerate(dict.fromkeys(pattern for pattern, _ in pairs))}
    files = {file: number for number, file in enumerate(dict.fromkeys(file for _, file in pairs))}
    kinds = np.array([patterns[pattern] for pattern, _ in pairs], np.int32)[lines.ids]
    file = np.array([files[file] for _, file in pairs], np.int32)[lines.ids]
    radix = radixes(lines.numbers)
    if radix is None or len(repeated(keys(kinds, lines.numbers, radix))):
        return None
    return WeightMap(Names(tuple(patterns), kinds, lines.numbers), tuple(files), file)


def unlike(weight_map: Mapping[str, str], tensors: Table) -> tuple[Mapping[str, str], Mapping[str, TensorInfo]]:
    """Of an index and of the tensors that there are what is not the same in both; everything, if that is not cheap."""
    if not isinstance(weight_map, WeightMap):
        written = msgspec.json.encode(dict(weight_map))
        found = _of_lines(written[2:-1], b'","') if weight_map else None
        if found is None:
            return weight_map, dict(tensors.items())
        weight_map = found
    names, others = tensors.names, weight_map.names
    radix = radixes(names.numbers, others.numbers)
    if radix is None:
        return dict(weight_map), dict(tensors.items())
    numbers = {pattern: number for number, pattern in enumerate(dict.fromkeys(names.patterns + others.patterns))}
    mine = keys(names.kinds, names.numbers, radix)
    listed = keys(np.array([numbers[pattern] for pattern in others.patterns])[others.kinds], others.numbers, radix)
    row = np.arange(len(mine))  # of each that is listed, where it is there
    if not np.array_equal(mine, listed):
        order = np.argsort(mine)
        row = order[np.minimum(np.searchsorted(mine, listed, sorter=order), len(mine) - 1)]
    there = mine[row] == listed
    files = [tensors.files.index(file) if file in tensors.files else -1 for file in weight_map.files]
    same = there & (np.array(files)[weight_map.file] == tensors.place.file[row])
    is_odd = np.ones(len(mine), bool)
    is_odd[row[same]] = False
    odd = np.flatnonzero(is_odd)
    return weight_map.some(np.flatnonzero(~same)), dict(zip(names.some(odd), tensors.infos(odd), strict=True))
