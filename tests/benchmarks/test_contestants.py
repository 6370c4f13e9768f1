"""The benchmarks themselves run, on a tiny model: what they time is what they say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.benchmarks.common import machine, show, take_turns
from tests.benchmarks.contestants import Contestant, Firstlight, Transformers


def test_each_contestant_decodes_a_batch_and_prefills_a_prompt(checkpoint: Callable[[str], Path]) -> None:
    directory = checkpoint("llama")
    contestants: list[Contestant] = [Firstlight(directory, 3, 32), Transformers(directory)]
    for one in contestants:
        assert one.decode_rate(3, 8, 5) > 0
        assert 0 < one.prefill_s(8) < 60


def test_turns_alternate_and_the_first_round_is_not_counted() -> None:
    order: list[str] = []

    def run(name: str) -> float:
        order.append(name)
        return float(len(order))

    figures = take_turns({name: lambda name=name: run(name) for name in "ab"}, repeats=3)
    assert order == ["a", "b"] * 4
    assert figures == {"a": [3.0, 5.0, 7.0], "b": [4.0, 6.0, 8.0]}


def test_a_table_names_the_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show("Speed", [{"engine": "ours", "tokens/s": 12.345}], machine(2), tmp_path / "figures.json")
    printed = capsys.readouterr().out
    assert "| ours | 12.35 |" in printed
    assert "torch" in printed
    written = json.loads((tmp_path / "figures.json").read_text())
    assert written["rows"] == [{"engine": "ours", "tokens/s": 12.345}]
    assert {"cpu", "threads", "torch", "date"} <= set(written["machine"])
