"""Rows padded in front: held against positions counted as the reference counted them, and it is said."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from firstlight.engine.serving.options import EngineOptions
from firstlight.workbench.report import Report
from firstlight.workbench.verify import verify
from tests.checkpoints import build, quiet


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Positions of GPT-2 are learned: where they begin is in every number."""
    return build("gpt2", tmp_path_factory.mktemp("positions"))


def golden(home: Path, path: Path, counted: str, *, stored: bool = False, wrong: float = 1.0) -> Path:
    """By transformers alone: told nothing of positions (`columns`), or to count each row's tokens."""
    from transformers import AutoModelForCausalLM

    ids = torch.from_numpy(np.random.default_rng(1).integers(3, 130, (2, 12)))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    tokens = (mask.cumsum(1) - 1).clamp(min=0)
    with quiet(), torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(home, dtype=torch.float32)
        told = {"position_ids": tokens} if counted == "tokens" else {}
        out = model(input_ids=ids, attention_mask=mask, output_hidden_states=True, **told)
    found = {"logits": out.logits * wrong} | {f"hidden.{i}": state for i, state in enumerate(out.hidden_states)}
    given = {"input_ids": ids, "attention_mask": mask, **({"position_ids": tokens} if stored else {})}
    save_file({name: value.contiguous().numpy() for name, value in {**given, **found}.items()}, path)
    return path


def verdict(home: Path, path: Path) -> tuple[Report, bool]:
    report = verify(EngineOptions(checkpoint=str(home)), path)
    return report, any("counted positions" in found.message for found in report.findings)


@pytest.mark.parametrize(("counted", "said"), [("columns", True), ("tokens", False)])
def test_as_the_reference_counted(home: Path, tmp_path: Path, counted: str, said: bool) -> None:
    report, told = verdict(home, golden(home, tmp_path / "golden.safetensors", counted))
    assert (report.status, told) == ("passed", said)


def test_positions_of_the_file_are_used_and_none_other(home: Path, tmp_path: Path) -> None:
    right = golden(home, tmp_path / "right.safetensors", "tokens", stored=True)
    assert verdict(home, right)[0].status == "passed"
    wrong = golden(home, tmp_path / "wrong.safetensors", "columns", stored=True)  # not what was given
    report, told = verdict(home, wrong)
    assert (report.status, told) == ("failed", False)


def test_what_agrees_with_no_count_fails(home: Path, tmp_path: Path) -> None:
    report, told = verdict(home, golden(home, tmp_path / "golden.safetensors", "columns", wrong=1.01))
    assert (report.status, told) == ("failed", False)
