"""Configurations of towers with values that cannot be, or that ask for other mathematics: refused in words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.model.spec import ModelSpec
from firstlight.engine.parallel.plan import totals
from firstlight.engine.weights.formats.registry import stored_format
from tests import vision_checkpoints as vision
from tests.engine.model.test_bad_configs import VALUES, places


def changed(config: Mapping[str, Any], place: tuple[str, ...], value: object) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(config))
    level = copy
    for key in place[:-1]:
        level = level[key]
    level[place[-1]] = value
    return copy


def described(config: dict[str, Any]) -> ModelSpec:
    spec, _ = FAMILIES.describe(config)
    totals(spec, stored_format(config, spec.dtype))
    return spec


@pytest.mark.parametrize("name", vision.MODELS)
def test_any_value_of_any_key_is_used_or_refused(name: str) -> None:
    """Keys of the tower and of the top level; nothing but a refusal is raised, and it says what was expected."""
    config = vision.MODELS[name]
    used = refused = 0
    for place in places(config):
        if place[0] == "text_config" and place[1:2] not in (("rope_parameters",), ("tie_word_embeddings",)):
            continue  # those of the text alone are tried with the text's families
        for value in VALUES[::2]:
            try:
                described(changed(config, place, value))
                used += 1
            except Refused as error:
                refused += 1
                for finding in error.findings:
                    assert finding.expected
                    assert finding.next
    assert min(used, refused) > 10


ASKS_FOR_OTHERS: list[tuple[str, str, object]] = [  # what no block here computes
    ("qwen2_vl", "vision_config.hidden_act", "relu6"),
    ("qwen2_vl", "vision_config.model_type", "moonvit"),
    ("qwen2_5_vl", "vision_config.rope_parameters", {"rope_type": "yarn", "factor": 2.0}),
    ("qwen3_vl", "text_config.rope_parameters.mrope_interleaved", False),
    ("gemma3", "vision_config.model_type", "clip_vision_model"),
    ("mistral3", "vision_config.head_dim", 20),
    ("mistral3", "vision_feature_layer", [-2, -1]),
    ("internvl", "vision_feature_select_strategy", "full"),
    ("internvl", "vision_config.norm_type", "group_norm"),
    ("llama4", "vision_config.vision_feature_select_strategy", "full"),
    ("llama4", "vision_config.multi_modal_projector_bias", True),
    ("llava_next", "vision_feature_select_strategy", "full"),
    ("llava-pixtral", "vision_feature_select_strategy", "default"),
    ("kimi_k25", "vision_config.merge_type", "mean"),
    ("kimi_k25", "vision_config.mm_projector_type", "resampler"),
]
IMPOSSIBLE: list[tuple[str, str, object]] = [
    ("qwen2_vl", "text_config.rope_parameters.mrope_section", [1, 1, 1]),
    ("qwen2_vl", "text_config.rope_parameters.mrope_section", [2, 2]),
    ("qwen2_vl", "vision_config", "qwen2_vl"),
    ("qwen2_vl", "vision_config.num_heads", 5),
    ("qwen2_vl", "vision_config.mlp_ratio", -1),
    ("qwen2_5_vl", "vision_config.window_size", 1),
    ("qwen3_vl", "vision_config.num_position_embeddings", 15),
    ("qwen3_vl", "vision_config.deepstack_visual_indexes", [7]),
    ("gemma3", "mm_tokens_per_image", 5),
    ("internvl", "downsample_ratio", 0.3),
    ("llama4", "vision_config.intermediate_size", 20),
    ("llava_next", "image_grid_pinpoints", [[13, 12]]),
    ("llava_next", "vision_feature_layer", 99),
    ("kimi_k25", "media_placeholder_token_id", 1.5),
    ("glm4v", "image_token_id", -1),
]


def at(name: str, place: str, value: object) -> dict[str, Any]:
    return changed(vision.MODELS[name], tuple(place.split(".")), value)


@pytest.mark.parametrize(("name", "place", "value"), ASKS_FOR_OTHERS)
def test_other_mathematics_is_refused_by_its_key(name: str, place: str, value: object) -> None:
    with pytest.raises(Refused) as caught:
        described(at(name, place, value))
    (finding,) = caught.value.findings
    assert finding.code == "unsupported-block"
    assert place.split(".")[-1] in finding.message


@pytest.mark.parametrize(("name", "place", "value"), IMPOSSIBLE)
def test_what_cannot_be_is_refused_by_its_key(name: str, place: str, value: object) -> None:
    with pytest.raises(Refused) as caught:
        described(at(name, place, value))
    (finding,) = caught.value.findings
    assert finding.code == "config-invalid"
    assert finding.found
