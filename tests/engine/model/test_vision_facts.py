"""Released models with pictures have the parameters that their publishers' shards have."""

import json
from pathlib import Path
from typing import Any

import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.model.spec import ModelSpec
from firstlight.engine.parallel.census import census

FACTS = Path("data/models")
# What a file of known facts leaves out, and a release has.
MISSING: dict[str, dict[str, Any]] = {
    "qwen2.5-vl-3b": {"vocab_size": 151936},
    "smolvlm-256m": {
        "text_config": {"vocab_size": 49280},
        "vision_config": {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "image_size": 512,
        },
    },
    "llama-4-maverick": {
        "vision_config": {
            "hidden_size": 1408,
            "intermediate_size": 5632,
            "num_hidden_layers": 34,
            "num_attention_heads": 16,
            "image_size": 336,
            "patch_size": 14,
            "pixel_shuffle_ratio": 0.5,
            "projector_input_dim": 4096,
            "projector_output_dim": 4096,
            "vision_output_dim": 4096,
        }
    },
}
EXACT = {
    "qwen2.5-vl-3b": 3_754_622_976,
    "smolvlm-256m": 256_484_928,
    "llama-4-maverick": 401_583_781_376,
}
BILLIONS = {
    "qwen3-vl-235b-a22b": 235.7,
    "kimi-vl-a3b": 16.4,
    "kimi-k2.5": 1026.9,
    "qwen3.5-397b-a17b": 396.8,
}


def raw(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FACTS / f"{name}.json").read_text())
    for key, value in MISSING.get(name, {}).items():
        found[key] = {**found.get(key, {}), **value} if isinstance(value, dict) else value
    return found


def parameters(spec: ModelSpec) -> int:
    return sum(kind.elements for kind in census(spec) if not (spec.tied_head and kind.param.name == "head.weight"))


@pytest.mark.parametrize("name", EXACT)
def test_all_parameters_of_a_release(name: str) -> None:
    spec, _ = FAMILIES.describe(raw(name))
    assert spec.vision is not None
    assert parameters(spec) == EXACT[name]
    assert not [found for found in spec.findings if found.code == "unread-config-key"]


@pytest.mark.parametrize("name", BILLIONS)
def test_parameters_as_model_cards_round_them(name: str) -> None:
    spec, _ = FAMILIES.describe(raw(name))
    assert spec.vision is not None
    assert parameters(spec) / 1e9 == pytest.approx(BILLIONS[name], abs=0.05)


def test_a_tower_that_no_file_describes_is_said() -> None:
    spec, _ = FAMILIES.describe(json.loads((FACTS / "llama-4-maverick.json").read_text()))
    assert spec.vision is None
    assert "config-invalid" in {found.code for found in spec.findings}


@pytest.mark.parametrize("name", ["qwen2.5-vl-3b", "smolvlm-256m"])
def test_a_size_that_no_file_states_is_not_guessed(name: str) -> None:
    with pytest.raises(Refused, match="vocab_size"):
        FAMILIES.describe(json.loads((FACTS / f"{name}.json").read_text()))
