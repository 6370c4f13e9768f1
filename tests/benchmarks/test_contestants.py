"""The benchmarks themselves run, on a tiny model: what they time is what they say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from firstlight.engine.model.families import FAMILIES
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.ledger import account
from tests.benchmarks import big
from tests.benchmarks.common import machine, show, take_turns
from tests.benchmarks.contestants import Contestant, Firstlight, Transformers
from tests.benchmarks.loaders import fresh


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


@pytest.mark.parametrize("name", ["firstlight", "parallel pread"])
def test_loaders_load_and_say_how_long_it_took(name: str, checkpoint: Callable[[str], Path]) -> None:
    found = fresh(name, checkpoint("llama-bf16"), 1, ready=True)
    assert found["total_s"] >= found["read_s"] > 0
    assert found["reserve_s"] >= 0


def test_a_large_checkpoint_is_one_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(big, "ROOT", tmp_path)
    monkeypatch.setattr(big, "VOCABULARY", 100)
    with big.big_checkpoint(2_000_000, hidden=64) as directory:
        opened = Checkpoint.open(directory)
        opened.refuse_if_broken()
        assert 1_500_000 < opened.payload_bytes < 2_500_000
        spec, matcher = FAMILIES.describe(opened.config)
        account(opened, spec, matcher).refuse_if_incomplete()
    assert not directory.exists()
