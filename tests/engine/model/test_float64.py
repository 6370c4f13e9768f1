"""Where ours and the reference differ by more than usual in float32, float64 tells which of them is off."""

from pathlib import Path
from typing import Any

import pytest
import torch

from firstlight.engine.serving.runtime import Engine
from firstlight.workbench.compare import deviation
from tests.checkpoints import TINY
from tests.reference import float64
from tests.sweep import outside

LIMIT = 1e-4  # float32, of the reference's own scale, token by token
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "qwen3_next": ({"vocab_size": 257, "max_position_embeddings": 256}, 160),
    "qwen3_5": ({"rope_parameters": LLAMA3}, 40),
}


@pytest.mark.parametrize("name", CASES)
def test_the_delta_rule_is_nearer_to_float64_than_the_reference_is(tmp_path: Path, name: str) -> None:
    """The reference sums its decays in float32 and takes differences of the sums; ours sums them in float64."""
    change, tokens = CASES[name]
    model = outside.model_of({**TINY[name].config, **change})
    given = outside.prompts(int(model.config.get_text_config().vocab_size), tokens)
    theirs, truth = outside.run(model, given), float64.run(model, given)
    outside.write(model, tmp_path / "case", given, {})
    engine = Engine.start(str(tmp_path / "case"), device="cpu", dtype="F32", max_context=tokens, max_batch=3)
    try:
        ours = engine.trace(given["input_ids"].numpy(), given["attention_mask"].numpy(), {})
    finally:
        engine.close()
    real = given["attention_mask"].bool().numpy()
    off = dict.fromkeys(("ours", "theirs"), 0.0)
    for key, exact in truth.items():
        expected = exact.numpy()[real]
        own = deviation(ours[key][real], expected).relative
        off = {
            "ours": max(off["ours"], own),
            "theirs": max(off["theirs"], deviation(theirs[key].numpy()[real], expected).relative),
        }
        assert own <= LIMIT, key
    assert off["theirs"] > LIMIT, "the case shows nothing any more"
    assert off["ours"] < off["theirs"] / 4, off


def test_float64_runs_are_the_same_model(tmp_path: Path) -> None:
    """On a model without states float32 and float64 agree to float32's rounding."""
    model = outside.model_of(TINY["llama"].config)
    given = outside.prompts(int(model.config.vocab_size), 12)
    theirs, truth = outside.run(model, given), float64.run(model, given)
    real = given["attention_mask"].bool()
    for key, exact in truth.items():
        torch.testing.assert_close(theirs[key][real].double(), exact[real], atol=2e-5, rtol=2e-5)
