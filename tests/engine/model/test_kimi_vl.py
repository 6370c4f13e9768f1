"""Kimi-VL, which transformers lacks, against an independent reference of its tower, projector and placeholders."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from firstlight.engine.model.families import FAMILIES
from firstlight.engine.weights.checkpoint import Checkpoint
from tests import kimi_vl
from tests.families.verified import tell
from tests.sweep import inside

LIMIT = 1e-4


def test_kimi_vl_equals_its_reference(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    golden = kimi_vl.write(tmp_path / "kimi")
    result = inside.tried(tmp_path / "kimi", golden)
    assert result.word == "native", result
    assert result.error is not None
    assert result.error <= LIMIT
    assert not result.said
    spec, _ = FAMILIES.describe(Checkpoint.open(tmp_path / "kimi").config)
    assert spec.family == "kimi_vl"
    tell(request, tmp_path / "kimi", "image", result.error)


def test_a_tower_that_differs_is_seen(tmp_path: Path) -> None:
    golden = kimi_vl.write(tmp_path / "kimi")
    path = tmp_path / "kimi" / "model.safetensors"
    tensors = load_file(path)
    tensors["vision_tower.patch_embed.pos_emb.weight"] *= 1.05
    save_file(tensors, path, {"format": "pt"})
    result = inside.tried(tmp_path / "kimi", golden)
    assert result.word == "wrong"
    assert "image_features" in result.why or "hidden.0" in result.why
