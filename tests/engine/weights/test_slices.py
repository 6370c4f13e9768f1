"""Slices of stored tensors: the bytes that numpy would give, in as few runs as there are, and no byte more."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.files.header import TensorInfo
from firstlight.engine.weights.files.safetensors_file import read
from firstlight.engine.weights.slices import byte_runs
from firstlight.engine.weights.synthesize import synthesize
from tests.engine.weights.files import LLAMA

_bound = st.one_of(st.none(), st.integers(-7, 7))
_cut = st.builds(slice, _bound, _bound, st.one_of(st.none(), st.integers(1, 4)))


def info(shape: tuple[int, ...], dtype: str = "F32") -> TensorInfo:
    return TensorInfo("t", dtype, shape, "f", 1000, math.prod(shape) * 4)


@given(st.lists(st.integers(0, 5), max_size=4).map(tuple), st.lists(_cut, max_size=4))
def test_runs_are_what_numpy_takes(shape: tuple[int, ...], slices: list[slice]) -> None:
    slices = slices[: len(shape)]
    count = math.prod(shape)
    whole = np.arange(count, dtype=np.int32).reshape(shape)
    runs = list(byte_runs(info(shape), slices))
    taken = [index for offset, nbytes in runs for index in range((offset - 1000) // 4, (offset - 1000 + nbytes) // 4)]
    assert taken == whole[tuple(slices)].ravel().tolist()
    assert all(nbytes > 0 for _, nbytes in runs)
    assert all(one[0] + one[1] != other[0] for one, other in itertools.pairwise(runs)), "neighbours are joined"


def test_rows_are_one_run_and_columns_one_a_row() -> None:
    tensor = info((6, 8))
    assert list(byte_runs(tensor, [slice(2, 4)])) == [(1000 + 64, 64)]
    assert list(byte_runs(tensor, [slice(None), slice(4, 8)])) == [(1016 + 32 * row, 16) for row in range(6)]
    assert list(byte_runs(tensor, [])) == [(1000, 192)]
    assert list(byte_runs(info(()), [])) == [(1000, 4)]


@pytest.mark.parametrize("slices", [[slice(None, None, -1)], [slice(1), slice(1), slice(1)]])
def test_what_cannot_be_cut(slices: list[slice]) -> None:
    with pytest.raises(ValueError, match="cannot be cut"):
        list(byte_runs(info((2, 2)), slices))
    with pytest.raises(ValueError, match="no whole bytes"):
        list(byte_runs(info((2, 2), "F4"), [slice(1)]))


def test_a_checkpoint_reads_any_slice(tmp_path: Path) -> None:
    synthesize(LLAMA, tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    whole = np.asarray(read(tmp_path / "model.safetensors")[name])
    for slices in ((), (slice(3, 9),), (slice(None), slice(1, 8, 3)), (slice(-2, None), slice(0, 0))):
        assert checkpoint.read(name, slices) == whole[slices].tobytes()
    assert checkpoint.read(name) == checkpoint.read_bytes(name)
