"""The benchmark: it measures what passes, and prints no speed for what does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from firstlight.kernels import bench, operators, testing
from firstlight.kernels.registry_types import Implementation


def wrong(logits: torch.Tensor, *rest: object) -> torch.Tensor:
    return torch.zeros(logits.shape[0], dtype=torch.int64)


def test_speeds_and_checks_of_one_operator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    arguments = ["--operator", "gated_activation", "--repeats", "1", "--json", str(file)]
    assert bench.main(arguments) == 0
    written = json.loads(file.read_text(encoding="utf-8"))
    assert {row["implementation"] for row in written["speeds"]} >= {"reference", "cpu"}
    assert all(row["passed"] for row in written["checks"])
    assert all(row["microseconds"] > 0 for row in written["speeds"])
    assert "memory bandwidth" in capsys.readouterr().out


def test_no_speed_for_what_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    broken = Implementation("sample", "broken", __name__, "wrong", operators.on_cpu)
    monkeypatch.setattr(Implementation, "load", lambda self: wrong if self.name == "broken" else LOAD(self))
    monkeypatch.setattr(operators, "IMPLEMENTATIONS", (broken, *operators.IMPLEMENTATIONS))
    monkeypatch.setattr(bench, "CPU_LIMIT_BYTES", 2**20)
    assert bench.main(["--operator", "sample", "--repeats", "1"]) == 1
    printed = capsys.readouterr().out
    assert "broken          no speed: its cases fail" in printed
    assert "FAILED" in printed


@pytest.mark.parametrize("wish", [["--operator", "sampel"], ["--device", "tpu"], ["--device", "cuda"]], ids=" ".join)
def test_what_is_not_here_is_refused_in_words(wish: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if wish[1] == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit) as end:
        bench.main(wish)
    assert end.value.code == 2
    assert "bench: error: " in capsys.readouterr().err


LOAD = Implementation.load


def test_a_check_sees_nan_and_changed_inputs() -> None:
    """The checker itself can fail: unwritten memory is NaN, inputs are compared with copies."""
    with testing.nan_filled():
        assert torch.empty(3).isnan().all()
        assert torch.empty_like(torch.ones(3)).isnan().all()
        assert torch.ones(2).new_empty(3).isnan().all()
        assert (torch.empty(3, dtype=torch.int32) == torch.iinfo(torch.int32).min).all()
    assert testing.distance((torch.empty(3).fill_(float("nan")),), (torch.zeros(3),)) == float("inf")
    assert testing.distance((torch.zeros(3),), (torch.zeros(2),)) == float("inf")
    assert testing.distance((torch.zeros(3),), (torch.zeros(3, dtype=torch.float16),)) == float("inf")
    assert testing.distance((torch.ones(3),), (torch.ones(3),)) == 0.0
