"""Duplicate tensors in very large checkpoints, found from columns; `double.py` does it for objects. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firstlight.engine.findings import Finding
from firstlight.engine.weights.files.double import COMPARED_BYTES, are_equal, copies_finding
from firstlight.engine.weights.files.lines import Ints
from firstlight.engine.weights.files.weight_map import WeightMap
from firstlight.engine.weights.names.columns import common_keys, places_of, row_keys
from firstlight.engine.weights.names.table import Table
from firstlight.engine.weights.sources.base import ByteSource

_MOST_COMPARED = 4096  # copies that are read, however small they are
_SAME = (False, True, None)
_DIFFER, _EQUAL, _UNKNOWN = range(3)


def settled_rows(table: Table, index: Mapping[str, str], source: ByteSource) -> tuple[Table, list[Finding]]:
    """One row for each name, where its first is; of those that occur more often it is that of the index's file."""
    rows = table.twice
    (key,) = row_keys((table.names.kinds[rows], table.names.numbers[rows]))
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    earliest = rows[first][group]
    later, earlier = rows[rows != earliest], earliest[rows != earliest]
    file, chosen = table.place.file, _chosen(table, index, later)
    is_decided = (chosen == file[later]) | (chosen == file[earlier])
    same = _compared(table, source, earlier, later)
    where = np.stack([file[earlier], file[later], is_decided, same], axis=1)
    kinds, first, group = np.unique(where, axis=0, return_index=True, return_inverse=True)
    findings = []
    for kind in np.argsort(first).tolist():
        one, other, decided, verdict = kinds[kind].tolist()
        names = table.names.listed(later[group.reshape(-1) == kind])
        findings.append(copies_finding(table.files[one], table.files[other], bool(decided), _SAME[verdict], names))
    taken = np.arange(len(table))
    taken[later] = -1
    is_chosen = chosen == file[later]
    taken[earlier[is_chosen]] = later[is_chosen]
    return table.chosen(taken[taken >= 0]), findings


def _chosen(table: Table, index: Mapping[str, str], rows: Ints) -> Ints:
    """The number of the file that the index has for each of these rows, -1 for none."""
    numbers = {file: number for number, file in enumerate(table.files)}
    if isinstance(index, WeightMap):
        mine, listed = common_keys(table.names, index.names)
        places = places_of(mine[rows], listed)
        files = np.array([numbers.get(file, -1) for file in index.files])
        return np.where(places >= 0, files[index.file[places]], -1)
    return np.array([numbers.get(index.get(name, ""), -1) for name in table.names.some(rows)], np.int64)


def _compared(table: Table, source: ByteSource, earlier: Ints, later: Ints) -> NDArray[np.integer[Any]]:
    """Whether copies are equal, as far as they are compared."""
    form = table.place.form
    found = np.where(form[earlier] == form[later], _UNKNOWN, _DIFFER)
    left_bytes, left = COMPARED_BYTES, _MOST_COMPARED
    for place in np.flatnonzero(found == _UNKNOWN).tolist():
        nbytes = table.forms[form[later[place]]][2]
        if nbytes <= left_bytes:
            left_bytes, left = left_bytes - nbytes, left - 1
            one, other = table.infos(np.array([earlier[place], later[place]]))
            same = are_equal(source, one, other)
            found[place] = _UNKNOWN if same is None else _EQUAL if same else _DIFFER
        if not left:
            break
    return found
