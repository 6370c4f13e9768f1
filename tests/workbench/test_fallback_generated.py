"""Tokens that architectures of the reference alone generate: as its plain attention does, as far as it is free to."""

from pathlib import Path
from typing import Any

import pytest

from tests.families.tiny import llama
from tests.sweep import inside, outside

CASES: dict[str, dict[str, Any]] = {
    "paligemma": {  # it may look ahead within a prompt, where it is told to; fast attention does so without
        "model_type": "paligemma",
        "text_config": llama(model_type="gemma", head_dim=8, num_hidden_layers=2),
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 12,
            "patch_size": 4,
            "projection_dim": 32,
        },
        "image_token_index": 130,
        "projection_dim": 32,
    },
    "bart": {  # its files ask for an end at the last step, whatever is likeliest
        "model_type": "bart",
        "vocab_size": 131,
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 48,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "is_decoder": True,
        "is_encoder_decoder": False,
        "forced_eos_token_id": 2,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_generated_tokens_are_those_of_the_reference(tmp_path: Path, name: str) -> None:
    model = outside.model_of(CASES[name])
    given = outside.prompts(131, 16, taken=frozenset({130}))
    if name == "bart":  # padding in front changes what this reference computes
        given = {key: value[:1] for key, value in given.items()}
    found = outside.run(model, given, 4)
    golden = outside.write(model, tmp_path / "case", given, found)
    result = inside.tried(tmp_path / "case", golden)
    assert result.word == "fallback", result
    wrong = {**found, "generated": (found["generated"] + 1) % 131}
    golden = outside.write_golden(tmp_path / "case", given, wrong)
    assert "generated" in inside.tried(tmp_path / "case", golden).why
