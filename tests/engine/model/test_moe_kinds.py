"""Mixtures of experts: published totals, what is refused by key and value, and how their parameters divide."""

import json
from pathlib import Path
from typing import Any

import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.model.spec import MLP, MoE, Router, Scope
from firstlight.engine.parallel.census import census
from firstlight.engine.parallel.constraints import violations
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.parallel.plan import active_parameters
from tests.families import moe_kinds

FACTS = Path("data/models")


def spec_of(name: str, **changes: Any) -> Any:
    """The spec of a tiny model with keys changed."""
    return FAMILIES.describe({**moe_kinds.TINY[name].config, **changes})[0]


def test_the_totals_of_gpt_oss() -> None:
    """OpenAI's model card, table 1: 116.83 B parameters, 5.13 B active."""
    spec, _ = FAMILIES.describe(json.loads((FACTS / "gpt-oss-120b.json").read_text()))
    assert sum(kind.elements for kind in census(spec)) == 116_829_156_672
    assert active_parameters(spec) / 1e9 == pytest.approx(5.13, abs=0.005)
    assert not [finding for finding in spec.findings if finding.code == "unread-config-key"]


def test_experts_free_of_charge_count_for_the_router_alone() -> None:
    paid, free = spec_of("longcat_flash", zero_expert_num=0), spec_of("longcat_flash", zero_expert_num=4)
    counts = [sum(kind.elements for kind in census(spec)) for spec in (paid, free)]
    layers, hidden = free.num_layers, free.hidden
    assert counts[1] - counts[0] == layers * 4 * (hidden + 1)  # a row and a bias of the router each
    assert [len(layer.whole) for layer in free.layers] == [2] * layers
    assert len(free.layers[0].cache().tensors) == 2 * len(free.layers[0].whole[0].cache().tensors)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("gpt_oss", "hidden_act", "gelu"),
        ("minimax_m2", "use_qk_norm", False),
        ("minimax_m2", "scoring_func", "softmax"),
        ("minimax_m2", "shared_intermediate_size", 8),
        ("hunyuan_v1_moe", "use_cla", True),
        ("hunyuan_v1_moe", "moe_topk", [3, 2, 3]),
        ("cohere2_moe", "expert_selection_fn", "sparsemax"),
        ("cohere2_moe", "shared_expert_combination_strategy", "gated"),
        ("phimoe", "num_experts_per_tok", 3),
        ("longcat_flash", "zero_expert_type", "zero"),
        ("longcat_flash", "norm_topk_prob", True),
        ("laguna", "moe_apply_router_weight_on_input", True),
        ("laguna", "gating", "per-token"),
        ("hy_v3", "mlp_layer_types", ["dense", "sparse", "shared"]),
        ("exaone_moe", "hidden_act", "situ"),
    ],
)
def test_what_no_block_computes_is_refused_by_key_and_value(name: str, key: str, value: object) -> None:
    with pytest.raises(Refused) as refused:
        spec_of(name, **{key: value})
    (finding,) = refused.value.findings
    assert finding.code == "unsupported-block"
    assert key in finding.message or "num_experts_per_tok" in finding.message
    assert finding.found is not None


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("olmoe", {"num_experts_per_tok": 9}),
        ("dots1", {"n_group": 3}),
        ("dots1", {"topk_group": 5}),
        ("dots1", {"topk_group": 1}),  # two experts a group, three are wanted
        ("hy_v3", {"mlp_layer_types": ["dense"]}),
        ("laguna-heads", {"num_attention_heads_per_layer": [4]}),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(name: str, changes: dict[str, object]) -> None:
    with pytest.raises(Refused, match="config-invalid"):
        spec_of(name, **changes)


@pytest.mark.parametrize("name", moe_kinds.TINY)
def test_every_key_of_a_configuration_is_read(name: str) -> None:
    """Of the architecture's own keys: what no family reads would be passed over."""
    ours = {"head_dim", "num_experts", "num_local_experts", "intermediate_size", "moe_intermediate_size"}
    unread = [f.message for f in spec_of(name).findings if f.code == "unread-config-key"]
    assert not [message for message in unread if not any(key in message for key in ours)], unread


def test_a_mesh_that_cuts_experts_unevenly_is_refused() -> None:
    spec = spec_of("gpt_oss", num_local_experts=6)
    assert not violations(spec, Mesh(ep=3, tp=2))
    assert {finding.code for finding in violations(spec, Mesh(ep=4))} == {"indivisible"}


def test_biases_are_held_where_their_experts_are() -> None:
    moe = MoE(num_experts=4, intermediate=6, activation="silu", router=Router(top_k=1, bias=True), bias=True)
    params = {param.name: param for param in moe.parameters(Scope(prefix="", layer=0, hidden=8))}
    assert params["router.bias"].shape == (4,)
    assert params["experts.1.gate.bias"].storage == params["experts.1.up.bias"].storage == "experts.gate_up_bias"
    assert params["experts.1.gate.bias"].placements == params["experts.1.gate.weight"].placements
    assert params["experts.3.down.bias"].shape == (8,)
    assert len(params["experts.3.down.bias"].placements) == 1, "whole on every rank of tp: added on one of them"


def test_experts_without_a_gate_have_two_matrices() -> None:
    shared = MLP(intermediate=5, activation="relu2", gated=False)
    moe = MoE(num_experts=2, intermediate=6, activation="relu2", router=Router(top_k=1), gated=False, shared=shared)
    names = {param.name for param in moe.parameters(Scope(prefix="", layer=0, hidden=8))}
    assert {name for name in names if name.startswith("experts.0")} == {"experts.0.up.weight", "experts.0.down.weight"}
    assert moe.entry == "experts.up"
