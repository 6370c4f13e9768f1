"""Configurations with values that cannot be: refused in words, whatever the key and whatever the value."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.model.config import Config
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.parallel.plan import totals
from firstlight.engine.weights.formats.registry import stored_format
from tests.checkpoints import TINY
from tests.engine.weights.files import LLAMA

VALUES = (None, "two", -1, 0, 1.5, [], {}, [1, 2], "", True, float("nan"), float("inf"), {"a": 1}, 3, 10**15)
MORE = (
    "quantization_config",
    "layer_types",
    "rope_scaling",
    "rope_parameters",
    "text_config",
    "vision_config",
    "torch_dtype",
    "head_dim",
    "sliding_window",
    "mlp_only_layers",
    "rope_theta",
    "partial_rotary_factor",
    "architectures",
)


def places(config: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        yield (*above, key)
        if isinstance(value, Mapping):
            yield from places(value, (*above, key))


@pytest.mark.parametrize(
    "name",
    ["llama", "llama-rope-llama3", "qwen3_moe", "deepseek_v3-yarn", "gemma2", "llava-clip", "mixtral", "qwen2-window"],
)
def test_any_value_of_any_key_is_used_or_refused(name: str) -> None:
    """Every key of the configuration, and some that others have, with fifteen values each; no other exception."""
    refused = used = 0
    for place in dict.fromkeys((*places(TINY[name].config), *((key,) for key in MORE))):
        for value in VALUES:
            config = json.loads(json.dumps(TINY[name].config))
            level = config
            for key in place[:-1]:
                level = level[key]
            level[place[-1]] = value
            try:
                spec, _ = FAMILIES.describe(config)
                totals(spec, stored_format(config, spec.dtype))
                used += 1
            except Refused as error:
                refused += 1
                for finding in error.findings:
                    assert finding.expected
                    assert finding.next
    assert refused > 50
    assert used > 50


def test_the_key_and_the_value_are_named() -> None:
    with pytest.raises(Refused) as caught:
        FAMILIES.describe({**LLAMA, "rms_norm_eps": "small"})
    (finding,) = caught.value.findings
    assert finding.code == "config-invalid"
    assert "rms_norm_eps has an impossible value" in finding.message
    assert (finding.expected, finding.found) == ("a number from 0 to 0.1", "'small'")


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_hidden_layers", 10**9), ("hidden_size", 10**15), ("vocab_size", -5), ("num_attention_heads", True)],
)
def test_sizes_beyond_reason_are_refused_at_once(key: str, value: object) -> None:
    with pytest.raises(Refused, match=f"{key} has an impossible value"):
        FAMILIES.describe({**LLAMA, key: value})


def test_a_spec_survives_json() -> None:
    """Frozen data, JSON both ways: what a family builds has the types that the spec declares."""
    import msgspec

    from firstlight.engine.model.spec import ModelSpec

    for case in TINY.values():
        spec, _ = FAMILIES.describe(case.config)
        assert msgspec.json.decode(msgspec.json.encode(spec), type=ModelSpec) == spec


# A value that was once computed with, or refused under another key's name -> the case, the key as the file spells it.
IMPOSSIBLE = [
    ("llama", "head_dim", "7"),
    ("llama", "head_dim", True),
    ("llama", "num_key_value_heads", -1),
    ("llama", "num_key_value_heads", 0),
    ("llama", "max_position_embeddings", True),
    ("llama", "max_position_embeddings", 0.5),
    ("llama", "max_position_embeddings", 0),
    ("llama", "rms_norm_eps", "1e-6"),
    ("llama", "rms_norm_eps", 7),
    ("llama", "attention_bias", 3),
    ("llama", "rope_parameters", [1]),
    ("llama", "rope_parameters.rope_theta", True),
    ("llama", "rope_parameters.rope_theta", 1e-300),
    ("llama", "rope_parameters.rope_theta", 10**400),
    ("llama", "hidden_size", 10**400),
    ("llama", "num_attention_heads", 1 << 31),
    ("qwen3_moe", "mlp_only_layers", {"a": 1}),
    ("qwen3_moe", "mlp_only_layers", "big"),
    ("qwen3_moe", "mlp_only_layers", [0.5]),
    ("qwen3_moe", "decoder_sparse_step", 0),
    ("qwen2-window", "sliding_window", 0),
    ("deepseek_v3-yarn", "num_nextn_predict_layers", 1 << 31),
    ("deepseek_v3-yarn", "n_shared_experts", -1),
    ("deepseek_v3-yarn", "first_k_dense_replace", 0.5),
    ("deepseek_v3-yarn", "n_group", 0),
    ("deepseek_v3-yarn", "routed_scaling_factor", math.nan),
    ("deepseek_v3-yarn", "routed_scaling_factor", 0),
    ("deepseek_v3-yarn", "rope_parameters.beta_fast", -math.inf),
    ("deepseek_v3-yarn", "rope_parameters.factor", [40.0]),
    ("deepseek_v3-yarn", "rope_parameters.mscale", {}),
    ("deepseek_v3-yarn", "rope_parameters.original_max_position_embeddings", "64"),
    ("gemma2", "attn_logit_softcapping", [5.0]),
    ("gemma2", "final_logit_softcapping", -6.0),
    ("gemma2", "query_pre_attn_scalar", False),
    ("llava-clip", "vision_config", "clip"),
    ("llava-clip", "vision_config.num_channels", 0),
    ("llava-clip", "vision_config.num_attention_heads", 48),
    ("falcon_h1", "ssm_multipliers", [math.nan] * 5),
    ("falcon_h1", "embedding_multiplier", "3"),
    ("mpt", "d_model", -1),
    ("mpt", "attn_config.softmax_scale", 0),
    ("bloom", "n_head", 1 << 40),
    ("phi3", "rope_parameters.long_factor", 1.5),
    ("deepseek_v4", "compress_rates.heavily_compressed_attention", 0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "place", "value"), IMPOSSIBLE, ids=lambda item: str(item)[:40])
def test_nothing_is_computed_with_a_value_that_cannot_be(name: str, place: str, value: object) -> None:
    config = json.loads(json.dumps({**TINY[name].config, **TINY[name].fields}))
    *above, key = place.split(".")
    level = config
    for step in above:
        level = level.setdefault(step, {})
    level[key] = value
    with pytest.raises(Refused) as caught:
        FAMILIES.describe(config)
    (finding,) = caught.value.findings
    said = f"{finding.message} {finding.found}"
    assert (finding.code, finding.file) == ("config-invalid", "config.json")
    assert key in said or above[-1] in said
    assert finding.expected
    assert str(value).strip("'")[:40] in said


@pytest.mark.parametrize(
    ("key", "default", "right", "wrong"),
    [
        ("share_tower_layers", False, True, 3),
        ("scaling", "mean", "std", True),
        ("window_size", 0.5, 0.25, "half"),
        ("query_scale", None, 0.5, "half"),
        ("num_planes", None, 2, 0.5),
    ],
)
def test_what_stands_in_decides_before_a_name_that_misleads(key: str, default: Any, right: Any, wrong: Any) -> None:
    assert Config({key: right}).get(key, default) == right
    with pytest.raises(Refused, match=f"{key} has an impossible value"):
        Config({key: wrong}).get(key, default)


def test_what_an_architecture_computes_with_is_possible() -> None:
    with pytest.raises(Refused, match="head_dim"):
        Config({"head_dim": 0}).get("head_dim")
    for raw in ({}, {"head_dim": 0}):
        config = Config(raw)
        config.assume(head_dim=0)
        assert config.get("head_dim") == 0
    config = Config({"head_dim": True})
    config.assume(head_dim=1)
    with pytest.raises(Refused, match="head_dim"):
        config.get("head_dim")
