"""What an earlier start measured is found again, and nothing is believed that makes no sense here."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from firstlight.engine.serving.choices import Choices
from firstlight.kernels.linear.measured import MeasuredLinear, shape_name
from firstlight.kernels.registry import choose


@pytest.fixture
def measured_shapes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shapes of the weights that were timed, one after the other."""
    shapes: list[str] = []
    fastest = MeasuredLinear._fastest

    def listed(linear: MeasuredLinear, weight_FH: torch.Tensor, *more: Any) -> str:
        shapes.append(shape_name(weight_FH))
        return fastest(linear, weight_FH, *more)

    monkeypatch.setattr(MeasuredLinear, "_fastest", listed)
    return shapes


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


def test_a_second_start_finds_what_the_first_measured(tmp_path: Path, measured_shapes: list[str]) -> None:
    first = prepared(tmp_path / "cache", 64)
    assert measured_shapes == ["bfloat16 64x64"]
    second = prepared(tmp_path / "cache", 64)
    assert second.record() == first.record()
    assert measured_shapes == ["bfloat16 64x64"]
    third = prepared(tmp_path / "cache", 32)
    assert measured_shapes == ["bfloat16 64x64", "bfloat16 32x64"]
    (file,) = (tmp_path / "cache").iterdir()
    assert json.loads(file.read_text()) == third.record()
    assert third.record().items() > first.record().items()


@pytest.mark.parametrize("found", [b"{", b"[]", b'{"bfloat16 64x64": "of another time"}'])
def test_a_record_that_makes_no_sense_is_measured_anew(
    tmp_path: Path, found: bytes, measured_shapes: list[str]
) -> None:
    first = prepared(tmp_path, 64)
    (file,) = tmp_path.iterdir()
    file.write_bytes(found)
    prepared(tmp_path, 64)
    assert measured_shapes == ["bfloat16 64x64"] * 2
    assert json.loads(file.read_text()).keys() == first.record().keys()


def test_a_folder_that_cannot_be_written_to_keeps_nothing(tmp_path: Path, measured_shapes: list[str]) -> None:
    (tmp_path / "file").write_text("")
    prepared(tmp_path / "file" / "cache", 64)
    prepared(tmp_path / "file" / "cache", 64)
    assert measured_shapes == ["bfloat16 64x64"] * 2


class Pair:
    """Two ranks in one process: a gather waits for both."""

    def __init__(self) -> None:
        self._sent: dict[int, torch.Tensor] = {}
        self._barrier = threading.Barrier(2)

    def of(self, rank: int) -> SimpleNamespace:
        return SimpleNamespace(size=2, all_gather=lambda tensor, dim: self._gather(rank, tensor, dim))

    def _gather(self, rank: int, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        self._sent[rank] = tensor
        self._barrier.wait()
        found = torch.cat([self._sent[0], self._sent[1]], dim)
        self._barrier.wait()
        return found


def test_ranks_that_measured_otherwise_agree_on_what_the_first_chose(tmp_path: Path) -> None:
    linears = [prepared(tmp_path / str(rank), 64) for rank in range(2)]
    candidates = linears[0].candidates
    if len(candidates) < 2:
        pytest.skip("there is one way only")
    linears[0].replay({"bfloat16 64x64": candidates[0], "bfloat16 8x64": candidates[0]})
    linears[1].replay({"bfloat16 64x64": candidates[1], "bfloat16 9x64": candidates[1]})
    pair = Pair()
    with ThreadPoolExecutor(2) as ranks:
        choices = [Choices(SimpleNamespace(linear=linear), tmp_path) for linear in linears]  # type: ignore[arg-type]
        again = list(ranks.map(lambda rank: choices[rank].agree(pair.of(rank)), range(2)))  # type: ignore[arg-type]
    assert again == [False, True]
    assert linears[0].record() == {"bfloat16 64x64": candidates[0], "bfloat16 8x64": candidates[0]}
    assert linears[1].record() == {"bfloat16 64x64": candidates[0], "bfloat16 9x64": candidates[1]}
