"""What an earlier start measured is found again, and nothing is believed that makes no sense here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from firstlight.engine.serving.choices import Choices
from firstlight.kernels.linear.measured import MeasuredLinear
from firstlight.kernels.registry import choose


def prepared(folder: Path, out: int) -> MeasuredLinear:
    """A chooser of a start whose model has weights of one shape."""
    ops = choose("cpu", torch.bfloat16)
    if not isinstance(ops.linear, MeasuredLinear):
        pytest.skip("linear layers are not chosen by measuring on this machine")
    choices = Choices(ops, folder)
    choices.recall()
    ops.linear(torch.ones(out, 64, dtype=torch.bfloat16), None, (1,))
    choices.keep()
    return ops.linear


def is_measured(linear: MeasuredLinear, shape: str) -> bool:
    return bool({one.shape: one for one in linear.timings()}[shape].microseconds)


def test_a_second_start_finds_what_the_first_measured(tmp_path: Path) -> None:
    first = prepared(tmp_path / "cache", 64)
    assert is_measured(first, "bfloat16 64x64")
    second = prepared(tmp_path / "cache", 64)
    assert second.record() == first.record()
    assert not is_measured(second, "bfloat16 64x64")
    third = prepared(tmp_path / "cache", 32)
    (file,) = (tmp_path / "cache").iterdir()
    assert json.loads(file.read_text()) == third.record()
    assert third.record().items() > first.record().items()


@pytest.mark.parametrize("found", [b"{", b"[]", b'{"bfloat16 64x64": "of another time"}'])
def test_a_record_that_makes_no_sense_is_measured_anew(tmp_path: Path, found: bytes) -> None:
    first = prepared(tmp_path, 64)
    (file,) = tmp_path.iterdir()
    file.write_bytes(found)
    assert is_measured(prepared(tmp_path, 64), "bfloat16 64x64")
    assert json.loads(file.read_text()).keys() == first.record().keys()


def test_a_folder_that_cannot_be_written_to_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    prepared(tmp_path / "file" / "cache", 64)
    assert is_measured(prepared(tmp_path / "file" / "cache", 64), "bfloat16 64x64")
