"""Keys that say two things, or something else than the headers: each kind is named, with both values; else silence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from firstlight.engine.findings import Finding
from firstlight.engine.weights.files.header import TensorInfo
from firstlight.engine.weights.names.stock import Kind, stock_of
from firstlight.workbench.contradictions import contradictions
from tests.engine.weights.files import LLAMA

SHAPES: Mapping[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (32, 8),
    **{f"model.layers.{i}.mlp.experts.{e}.up_proj.weight": (12, 8) for i in range(2) for e in range(4)},
    "vision_tower.layers.5.fc1.weight": (12, 8),
    "lm_head.weight": (32, 8),
}
CONFIG = {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "dtype": "float32"}
NESTED = {"model_type": "x", "text_config": CONFIG, "vision_config": {"hidden_size": 99, "vocab_size": 7}}


def kinds(shapes: Mapping[str, tuple[int, ...]] = SHAPES, dtype: str = "F32") -> list[Kind]:
    return stock_of(TensorInfo(name, dtype, shape, "a.safetensors", 0, 4) for name, shape in shapes.items())


def found(config: Mapping[str, Any], held: list[Kind] | None = None) -> list[Finding]:
    findings = list(contradictions(config, held or kinds(), whole=True))
    for finding in findings:
        assert finding.expected != finding.found
        assert finding.next
        assert finding.file == "config.json"
    return findings


@pytest.mark.parametrize("config", [CONFIG, NESTED])
def test_what_agrees_is_silent(config: Mapping[str, Any]) -> None:
    assert found(config) == []


CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "two dtypes": ({"torch_dtype": "bfloat16"}, "conflicting-flag", "torch_dtype and dtype"),
    "two numbers of experts": ({"n_routed_experts": 5}, "conflicting-flag", "num_experts and n_routed_experts"),
    "two image tokens": ({"image_token_id": 4, "image_token_index": 5}, "conflicting-flag", "image_token_index mean"),
    "two rope bases": ({"rope_parameters": {"rope_theta": 5e5}}, "conflicting-flag", "rope_theta and rope_parameters"),
    "two rope factors": (
        {
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
            "rope_parameters": {"rope_type": "yarn", "factor": 8.0, "rope_theta": 1e4},
        },
        "conflicting-flag",
        "rope_scaling.factor and rope_parameters.factor",
    ),
    "two ways to stretch": (
        {
            "rope_scaling": {"type": "linear", "factor": 4.0},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        "conflicting-flag",
        "rope_scaling asks for linear and rope_parameters for default",
    ),
    "one way under two names": (
        {"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 4.0}},
        "conflicting-flag",
        "rope_scaling.rope_type and rope_scaling.type mean the same",
    ),
    "stretched by nothing": (
        {"rope_scaling": {"rope_type": "yarn"}},
        "conflicting-flag",
        "no factor says how far",
    ),
    "a key of no kind of positions": (
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "twist": 3}},
        "unread-config-key",
        "rope_parameters: twist is not read",
    ),
    "windows of no size": (
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": None},
        "conflicting-flag",
        "1 layers of sliding_attention, sliding_window is null",
    ),
    "heads that do not divide": ({"num_attention_heads": 3}, "conflicting-flag", "no multiple of num_attention_heads"),
    "more experts chosen than there are": ({"num_experts_per_tok": 5}, "conflicting-flag", "chooses 5 of 4 experts"),
    "types of other layers": ({"layer_types": ["full_attention"] * 3}, "conflicting-flag", "3 entries for 2 layers"),
    "more layers than stored": ({"num_hidden_layers": 3}, "conflicting-flag", "the headers hold 2 layers"),
    "fewer layers than stored": ({"num_hidden_layers": 1}, "conflicting-flag", "up to number 1"),
    "more experts than stored": ({"num_experts": 6}, "conflicting-flag", "num_experts is 6, the headers hold 4"),
    "fewer experts than stored": ({"num_experts": 3}, "conflicting-flag", "the headers hold 4 experts"),
    "a padded embedding": ({"vocab_size": 30}, "padded-tensor", "the token embedding has 32 rows; the last 2"),
    "an embedding cut": ({"vocab_size": 40}, "conflicting-flag", "the token embedding has 32 rows"),
    "another dtype stored": ({"dtype": "bfloat16"}, "conflicting-flag", "most are stored as F32"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_nested", [False, True])
def test_each_kind_is_named(case: str, is_nested: bool) -> None:
    change, code, words = CASES[case]
    config = {**CONFIG, **change}
    (finding,) = found({**NESTED, "text_config": config} if is_nested else config)
    assert finding.code == code
    assert words in finding.message.replace("text_config.", "")


LEVELS = {
    "vocab_size": (64, "the embedding has 32 rows, so text_config is right"),
    "tie_word_embeddings": (True, "a head in the file is used"),
    "num_hidden_layers": (4, "correct the one that is wrong"),
    "rope_theta": (5e5, "correct the one that is wrong"),
    "eos_token_id": (7, "correct the one that is wrong"),
}


@pytest.mark.parametrize("key", LEVELS)
def test_one_key_at_two_levels(key: str) -> None:
    value, way = LEVELS[key]
    (finding,) = found({**NESTED, "text_config": {"eos_token_id": 2, **CONFIG}, key: value})
    assert finding.code == "conflicting-flag"
    assert finding.message == f"{key} differs between the top level and text_config"
    assert finding.found == f"top level: {value}"
    assert way in str(finding.next)


def test_extra_prediction_layers_are_no_contradiction() -> None:
    extra = {**SHAPES, "model.layers.2.mlp.experts.0.up_proj.weight": (12, 8)}
    assert found({**CONFIG, "num_nextn_predict_layers": 1}, kinds(extra)) == []
    (finding,) = found(CONFIG, kinds(extra))
    assert "num_hidden_layers is 2" in finding.message


def test_what_is_not_all_there_is_not_held_against_headers() -> None:
    changed = {**CONFIG, "num_hidden_layers": 5, "vocab_size": 99, "dtype": "bfloat16"}
    assert list(contradictions(changed, kinds(), whole=False)) == []
