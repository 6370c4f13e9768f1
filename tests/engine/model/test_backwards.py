"""Rules read from right to left name tensors that, read from left to right, lead to the parameter again."""

from __future__ import annotations

from pathlib import Path

import pytest

from firstlight.engine.model.backwards import Backwards
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.weights.synthesize import synthesize
from tests.engine.weights.accounts import MOE, fatal, settle
from tests.families.groups import TINY


@pytest.mark.parametrize("name", sorted(TINY))
def test_the_name_of_a_tensor_leads_back_to_the_parameter(name: str) -> None:
    spec, matcher = FAMILIES.describe(dict(TINY[name].config))
    backwards = Backwards(matcher.rules)
    params = [param.name for param in spec.parameters() if not (spec.tied_head and param.name == "head.weight")]
    for param in params:
        tensor = backwards.tensor_of(param)
        assert tensor is not None, param
        found = matcher.match(tensor)
        assert found is not None, tensor
        assert any(Backwards((found.rule,)).rules_of(param)), (param, tensor)


def test_a_parameter_that_no_rule_fills_has_no_tensor() -> None:
    assert Backwards(()).tensor_of("norm.weight") is None


def test_a_finding_names_the_tensor_that_a_release_should_have(tmp_path: Path) -> None:
    synthesize(MOE, tmp_path)
    lacks = [f"model.layers.{layer}.mlp.experts.3.down_proj.weight" for layer in (0, 2)]
    (finding,) = fatal(settle(tmp_path, lambda tensors: [tensors.pop(name) for name in lacks]))
    assert (finding.code, finding.tensors[0]) == ("missing-tensor", "layers.0.ffn.experts.3.down.weight")
    assert finding.expected == f"12 filled, from {lacks[0]} and so on"
