"""The choice of implementations: made once, explained, replayable, and never a silent fall-back."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys

import pytest
import torch

from firstlight.kernels import operators, registry, signatures, testing
from firstlight.kernels.registry import NotSupportedError, choose, implementations, operator_names
from firstlight.kernels.registry_types import Implementation

PROTOCOLS = {
    "rms_norm": signatures.RmsNorm,
    "add_rms_norm": signatures.AddRmsNorm,
    "rotary": signatures.Rotary,
    "gated_activation": signatures.GatedActivation,
    "write_cache": signatures.WriteCache,
    "attention": signatures.Attention,
    "selective_attention": signatures.SelectiveAttention,
    "causal_conv": signatures.CausalConv,
    "linear_attention": signatures.LinearAttention,
    "selective_scan": signatures.SelectiveScan,
    "router_topk": signatures.RouterTopk,
    "grouped_matmul": signatures.GroupedMatmul,
    "moe": signatures.Moe,
    "linear_packed": signatures.LinearPacked,
    "moe_packed": signatures.MoePacked,
    "sample": signatures.Sample,
}


def test_every_operator_is_an_attribute_and_has_a_reference() -> None:
    fields = {field.name for field in dataclasses.fields(registry.Choice)} - {"situation", "rows"}
    assert fields == set(operator_names())
    assert all(implementations(operator)[-1].name == "reference" for operator in operator_names())


@pytest.mark.parametrize(
    "one",
    [one for one in operators.IMPLEMENTATIONS if one.operator in PROTOCOLS and one.name != "native"],
    ids=lambda one: f"{one.operator}-{one.name}",
)
def test_every_implementation_is_called_alike(one: Implementation) -> None:
    declared = list(inspect.signature(PROTOCOLS[one.operator].__call__).parameters.values())[1:]
    actual = list(inspect.signature(one.load()).parameters.values())
    assert [(p.name, p.default) for p in actual] == [(p.name, p.default) for p in declared]


def test_every_operator_has_cases_of_different_names() -> None:
    for operator in testing.FOLDERS:
        names = [case.name for case in testing.cases(operator)]
        assert len(names) >= 3
        assert len(names) == len(set(names)), operator


def test_the_choice_is_made_once_and_explained() -> None:
    ops = choose("cpu", torch.float32, {"head_dim": 64})
    chosen = {row.operator: row for row in ops.report() if row.chosen}
    assert set(chosen) == set(operator_names())
    assert all(row.reason for row in ops.report())
    triton = next(row for row in ops.report() if (row.operator, row.implementation) == ("attention", "triton"))
    assert "interpreter" in triton.reason
    with pytest.raises(dataclasses.FrozenInstanceError):
        ops.attention = ops.moe  # type: ignore[misc, assignment]


def test_a_record_replays() -> None:
    first = choose("cpu", torch.float32, force={"attention": "sdpa", "sample": "reference"})
    again = choose("cpu", torch.float32, force=first.record())
    assert again.record() == first.record()
    assert again.record()["sample"] == "reference"


def test_everything_can_be_the_reference() -> None:
    assert set(choose("cpu", torch.bfloat16, force="reference").record().values()) == {"reference"}


def test_impossible_wishes_are_refused_with_the_reason() -> None:
    with pytest.raises(NotSupportedError, match="no operator is called atention"):
        choose("cpu", torch.float32, force={"atention": "reference"})
    with pytest.raises(NotSupportedError, match="no implementation warp9; there are"):
        choose("cpu", torch.float32, force={"attention": "warp9"})
    with pytest.raises(NotSupportedError, match="attention by triton is not possible here: triton does not compile"):
        choose("cpu", torch.float32, force={"attention": "triton"})


def test_a_broken_implementation_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Implementation("moe", "broken", "firstlight.kernels.moe.nowhere", "moe", operators.anywhere)
    monkeypatch.setattr(operators, "IMPLEMENTATIONS", (broken, *operators.IMPLEMENTATIONS))
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        choose("cpu", torch.float32)


def test_a_cpu_never_loads_triton() -> None:
    code = (
        "import sys, torch; from firstlight.kernels.registry import choose;"
        "choose('cpu', torch.float32, force={'linear': 'reference'}); sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
