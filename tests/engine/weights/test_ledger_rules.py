"""Weight rules of every kind, there and back: what one takes apart was put together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.model.rules import Matcher, choices, rule
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.files.safetensors_file import Tagged, Tensor, bfloat16, read, write
from firstlight.engine.weights.ledger import account
from firstlight.engine.weights.synthesize import outlines_of, synthesize, value_of
from tests.engine.weights.accounts import MOE, settle
from tests.engine.weights.files import LLAMA
from tests.engine.weights.releases import shipped_config


def _stacked(tensor: str, *parts: str, **options: Any) -> Mapping[str, Any]:
    return {
        "tensor": tensor,
        "params": tuple(f"layers.{{i}}.ffn.experts.{{e}}.{part}.weight" for part in parts),
        **options,
    }


@pytest.mark.parametrize(
    "forms",
    [
        [_stacked("L.{i}.gu", "gate", "up", stacked=True), _stacked("L.{i}.d", "down", stacked=True)],
        [
            _stacked("L.{i}.gu", "gate", "up", stacked=True, interleaved=True),
            _stacked("L.{i}.d", "down", stacked=True, transpose=True),
        ],
        [
            _stacked("L.{i}.gu", "gate", "up", stacked=True, transpose=True, split_dim=1),
            _stacked("L.{i}.d", "down", stacked=True),
        ],
        [
            _stacked("L.{i}.gu", "gate", "up", stacked=True, transpose=True, split_dim=1, interleaved=True),
            _stacked("L.{i}.d", "down", stacked=True, transpose=True),
        ],
        [_stacked("L.{i}.{e}.gu", "gate", "up", interleaved=True), _stacked("L.{i}.{e}.d", "down", transpose=True)],
        [_stacked("L.{i}.{e}.gu", "gate", "up", transpose=True, split_dim=1), _stacked("L.{i}.{e}.d", "down")],
    ],
)
def test_what_a_rule_takes_apart_was_put_together(forms: list[Mapping[str, Any]], tmp_path: Path) -> None:
    """Stacked, split, interleaved, transposed: the region of each parameter holds exactly its values."""
    synthesize(MOE, tmp_path)
    spec, matcher = FAMILIES.describe(MOE)
    kept = [r for r in matcher.rules if not any("experts" in param for param in r.params)]
    rules = [
        rule(str(form["tensor"]), *form["params"], **{k: v for k, v in form.items() if k not in ("tensor", "params")})
        for form in forms
    ]
    values = {
        param.name: np.random.default_rng(len(param.name)).random(param.shape, np.float32)
        for param in spec.parameters()
    }
    stored = {item.tensor: value_of(item, values) for item in outlines_of(spec, [*kept, *rules])}
    write(tmp_path / "model.safetensors", stored)
    ledger = account(Checkpoint.open(tmp_path), spec, Matcher([*kept, *rules]))
    assert ledger.findings == ()
    for name, source in ledger.sources.items():
        region = tuple(slice(*cut) for cut in source.region)
        found = stored[source.tensor][region]
        found = np.swapaxes(found, -1, -2) if source.transpose else found
        np.testing.assert_array_equal(found.reshape(values[name].shape), values[name])


def test_bfloat16_survives_the_way_there_and_back(tmp_path: Path) -> None:
    values = synthesize(LLAMA, tmp_path, dtype="BF16", shards=4)
    tensors: dict[str, Tensor] = {}
    for path in sorted(tmp_path.glob("*.safetensors")):
        tensors.update(read(path))
    stored = tensors["model.layers.1.mlp.up_proj.weight"]
    assert isinstance(stored, Tagged)
    np.testing.assert_array_equal(stored.float32(), values["layers.1.ffn.up.weight"])
    np.testing.assert_array_equal(stored.bits, bfloat16(values["layers.1.ffn.up.weight"]).bits)
    assert settle(tmp_path).complete
    assert Checkpoint.open(tmp_path).findings == ()


def test_a_parameter_without_a_rule_is_refused(tmp_path: Path) -> None:
    spec, matcher = FAMILIES.describe(LLAMA)
    rules = [r for r in matcher.rules if r.params != ("norm.weight",)]
    with pytest.raises(Refused, match=r"no weight rule of the family says where norm\.weight is stored"):
        outlines_of(spec, rules)


@pytest.mark.parametrize("release", ["kimi-k3", "deepseek-v3", "gpt-oss-120b"])
def test_what_rules_speak_of_begins_as_one_of_them_does(release: str) -> None:
    """Names that do not are known to be strange without being matched."""
    _, matcher = FAMILIES.describe(shipped_config(release))
    names = [name for item in matcher.rules for name in choices(item.tensor)]
    kinds = [re.sub(r"\{\w+\}", "*", name.replace("{*}", "a.b")) for name in names]
    assert all(matcher.knows(kinds))
    assert all((kind + part).startswith(matcher.beginnings) for kind in kinds for part in ("", "_packed", "_scale_inv"))
    assert not any(matcher.knows(f"x.{kind}" for kind in kinds))
