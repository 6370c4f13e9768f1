"""The tensors of a very large checkpoint as a mapping that makes a `TensorInfo` on demand. No torch."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView
from functools import cached_property
from typing import NamedTuple, overload

import numpy as np

from firstlight.engine.weights.files.header import Header, TensorInfo
from firstlight.engine.weights.files.lines import Ints, Vocabulary, stacked
from firstlight.engine.weights.files.shard_columns import Form, ShardColumns, columns_of_tensors
from firstlight.engine.weights.names.columns import Names, repeated, row_keys
from firstlight.engine.weights.names.stock import Lazy


class Place(NamedTuple):
    """What is known of a tensor but its name, as numbers: `form` is its dtype, shape and bytes."""

    file: Ints
    form: Ints
    offset_bytes: Ints

    def at(self, rows: Ints) -> Place:
        return Place(*(column[rows] for column in self))


class Table(Mapping[str, TensorInfo]):
    """Tensors by name, in the order of `rows`."""

    def __init__(self, names: Names, place: Place, files: Sequence[str], forms: Sequence[Form]) -> None:
        self.names, self.place, self.files, self.forms = names, place, tuple(files), tuple(forms)

    @classmethod
    def of(cls, headers: Sequence[Header | ShardColumns], vocabulary: Vocabulary) -> Table | None:
        """All tensors of all shards, one after another; None where there are names that columns do not hold.

        A name may be in several shards (`twice`). `vocabulary`: that of all columns.
        """
        shards = [
            header if isinstance(header, ShardColumns) else columns_of_tensors(header.file, header.tensors, vocabulary)
            for header in headers
            if (len(header.form) if isinstance(header, ShardColumns) else header.tensors)
        ]
        if not shards:
            return None
        forms: dict[Form, int] = {}
        kinds, places = [], []
        for number, shard in enumerate(shards):
            if shard is None:
                return None
            assert shard.names.vocabulary is vocabulary
            kinds.append(shard.names.kinds)
            own = [forms.setdefault(form, len(forms)) for form in shard.forms]
            files = np.full(len(shard.form), number, np.int32)
            places.append(Place(files, np.array(own, np.int32)[shard.form], shard.offsets))
        numbers = stacked([shard.names.numbers for shard in shards if shard is not None])
        names = Names(vocabulary, np.concatenate(kinds), numbers)
        place = Place(*map(np.concatenate, zip(*places, strict=True)))
        return cls(names, place, [shard.file for shard in shards if shard is not None], tuple(forms))

    @cached_property
    def twice(self) -> Ints:
        """The rows whose names occur more than once, in order."""
        (found,) = row_keys((self.names.kinds, self.names.numbers))
        several = repeated(found)
        return np.flatnonzero(np.isin(found, several)) if len(several) else several

    def chosen(self, rows: Ints) -> Table:
        """These rows alone, in this order."""
        return Table(self.names.at(rows), self.place.at(rows), self.files, self.forms)

    @property
    def nbytes(self) -> int:
        """Of all tensors together."""
        return self.bytes_of(self.place.form)

    def bytes_of(self, forms: Ints) -> int:
        """Of as many tensors as there are forms."""
        counts = np.bincount(forms, minlength=len(self.forms)).tolist()
        return sum(count * form.nbytes for count, form in zip(counts, self.forms, strict=True))

    def infos(self, rows: Ints, names: Sequence[str] | None = None) -> list[TensorInfo]:
        """Tensors of rows; `names`: theirs, where the caller has them."""
        place = self.place.at(rows)
        forms = [self.forms[form] for form in place.form.tolist()]
        files = [self.files[file] for file in place.file.tolist()]
        names = self.names.some(rows) if names is None else names
        return [
            TensorInfo(name, form[0], form[1], file, offset, form[2])
            for name, form, file, offset in zip(names, forms, files, place.offset_bytes.tolist(), strict=True)
        ]

    def _info(self, row: int, name: str) -> TensorInfo:
        dtype, shape, nbytes = self.forms[self.place.form[row]]
        return TensorInfo(
            name, dtype, shape, self.files[self.place.file[row]], int(self.place.offset_bytes[row]), nbytes
        )

    def __getitem__(self, name: str) -> TensorInfo:
        row = self.names.find(name)
        if row is None:
            raise KeyError(name)
        return self._info(row, name)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.names.find(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self.names.some(np.arange(len(self))))

    def __len__(self) -> int:
        return len(self.names)

    def values(self) -> ValuesView[TensorInfo]:
        return _Values(self)

    def items(self) -> ItemsView[str, TensorInfo]:
        return _Items(self)


class _Values(ValuesView[TensorInfo]):
    _mapping: Table

    def __iter__(self) -> Iterator[TensorInfo]:
        return iter(self._mapping.infos(np.arange(len(self._mapping))))


class _Items(ItemsView[str, TensorInfo]):
    _mapping: Table

    def __iter__(self) -> Iterator[tuple[str, TensorInfo]]:
        return ((info.name, info) for info in self._mapping.values())


class Rows(Lazy):
    """Some of a table's tensors, all of one kind if it is given."""

    def __init__(self, table: Table, kind: int | None, rows: Ints) -> None:
        self._table, self._kind, self._rows = table, kind, rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> TensorInfo: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[TensorInfo]: ...
    def __getitem__(self, place: int | slice) -> TensorInfo | Sequence[TensorInfo]:
        if isinstance(place, slice):
            return Rows(self._table, self._kind, self._rows[place])
        (found,) = self.some([place])
        return found

    def __iter__(self) -> Iterator[TensorInfo]:
        return iter(self._infos(self._rows))

    def some(self, places: Sequence[int]) -> Sequence[TensorInfo]:
        return self._infos(self._rows[np.array(places, np.int64)])

    def _infos(self, rows: Ints) -> list[TensorInfo]:
        return self._table.infos(rows, None if self._kind is None else self._table.names.of(self._kind, rows))


def infos_of(shard: ShardColumns) -> tuple[TensorInfo, ...]:
    """The tensors that columns stand for."""
    table = Table.of([shard], shard.names.vocabulary)
    return tuple(table.values()) if table is not None else ()
