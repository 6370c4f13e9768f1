"""Golden files with padding in front of models whose reference lets it in: said, and not taken for a fault of ours."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from firstlight.engine.serving.options import EngineOptions
from firstlight.engine.weights.files.safetensors_file import read, write
from firstlight.workbench.reference import Reference
from firstlight.workbench.report import Report
from firstlight.workbench.verify import verify
from tests.checkpoints import inputs

Get = Callable[[str], Path]


def check(home: Path, golden: Path) -> Report:
    return verify(EngineOptions(checkpoint=str(home), threads=1), golden)


def golden_in_front(home: Path, name: str, into: Path, lengths: tuple[int, ...]) -> Path:
    """What transformers gives for rows of these lengths, padded in front."""
    ids = inputs(name, batch=len(lengths))["input_ids"]
    width = ids.shape[1]
    mask = np.array([[column >= width - length for column in range(width)] for length in lengths], dtype=np.int64)
    given = {"input_ids": ids * mask, "attention_mask": mask}
    write(into, {**given, **Reference.open(home).run(given)})
    return into


@pytest.mark.parametrize("name", ["recurrent_gemma", "deepseek_v4", "minimax_m3", "mamba2-bias", "kimi_linear"])
def test_padding_that_a_reference_lets_in(name: str, checkpoint: Get, tmp_path: Path) -> None:
    home = checkpoint(name)
    width = inputs(name)["input_ids"].shape[1]
    report = check(home, golden_in_front(home, name, tmp_path / "some.safetensors", (width, width - 7)))
    assert report.status == "passed"
    said = [found.message for found in report.findings if "padded in front" in found.message]
    assert bool(said) is (name != "kimi_linear"), said  # whose reference masks what padding would leave
    assert all("rows 1 are" in message and "left out" in message for message in said)


def test_a_fault_is_no_padding(checkpoint: Get, tmp_path: Path) -> None:
    """Rows without padding have it as well."""
    home, golden = checkpoint("recurrent_gemma"), tmp_path / "some.safetensors"
    width = inputs("recurrent_gemma")["input_ids"].shape[1]
    golden_in_front(home, "recurrent_gemma", golden, (width, width - 7))
    wrong = tmp_path / "wrong"
    shutil.copytree(home, wrong)
    tensors = read(wrong / "model.safetensors")
    tensors["model.layers.0.temporal_block.linear_x.weight"] = tensors[
        "model.layers.0.temporal_block.linear_x.weight"
    ] * np.float32(1.05)
    write(wrong / "model.safetensors", tensors, {"format": "pt"})
    assert check(wrong, golden).status == "failed"


def test_only_rows_with_padding_are_no_evidence(checkpoint: Get, tmp_path: Path) -> None:
    home = checkpoint("recurrent_gemma")
    width = inputs("recurrent_gemma")["input_ids"].shape[1]
    report = check(home, golden_in_front(home, "recurrent_gemma", tmp_path / "all.safetensors", (width - 4, width - 7)))
    assert report.status == "failed"
    assert any("there are no others" in found.message for found in report.findings)
