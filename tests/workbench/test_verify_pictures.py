"""Verification against transformers without a golden file, for towers of each kind of input."""

from pathlib import Path

import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.serving.options import EngineOptions
from firstlight.workbench.verify import verify
from tests import vision_checkpoints as vision
from tests.sweep import outside, pictures


@pytest.mark.parametrize(
    ("name", "streamed"),
    [
        ("qwen3_vl", False),
        ("internvl", False),
        ("idefics3", True),
        ("mistral3", True),
        ("llava_next", True),
        ("kimi_k25", True),
    ],
)
def test_against_transformers(tmp_path: Path, name: str, streamed: bool) -> None:
    home = vision.build(name, tmp_path)
    report = verify(EngineOptions(checkpoint=str(home)), reference="transformers", streamed=streamed)
    assert report.status == "passed"
    assert "pictures image_features" in {check.name for check in report.checks}


def test_positions_by_grid_are_not_streamed(tmp_path: Path) -> None:
    """Layer by layer the reference would not see the prompt that its positions come from."""
    home = vision.build("qwen3_5", tmp_path)
    with pytest.raises(Refused, match="layer by layer"):
        verify(EngineOptions(checkpoint=str(home)), reference="transformers", streamed=True)


def test_a_text_that_caps_its_logits_alone(tmp_path: Path) -> None:
    """Gemma 2 does; behind a tower it has a plain output head, layer by layer as well."""
    (variant,) = (one for one in pictures.llava() if one.what == "text of gemma2")
    outside.write(outside.model_of(variant.raw), tmp_path / "case", pictures.given(variant), {})
    report = verify(EngineOptions(checkpoint=str(tmp_path / "case")), reference="transformers", streamed=True)
    assert report.status == "passed"
    assert any("soft cap" in finding.message for finding in report.findings)
