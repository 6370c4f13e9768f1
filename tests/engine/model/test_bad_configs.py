"""Configurations with values that cannot be: refused in words, whatever the key and whatever the value."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from firstlight.engine.errors import Refused
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
    assert "could not convert string to float: 'small'; rms_norm_eps = 'small' was read last" in finding.message


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
