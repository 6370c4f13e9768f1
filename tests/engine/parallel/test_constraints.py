"""What cannot be divided is refused at once, with every reason, the sizes that work and another way."""

from __future__ import annotations

from typing import Any

import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.model.spec import ModelSpec
from firstlight.engine.parallel.constraints import allowed, placements, refuse_impossible, violations
from firstlight.engine.parallel.mesh import ATTENTIONS, Attention, Mesh
from tests.engine.weights.files import LLAMA


def spec(heads: int, kv_heads: int, layers: int = 8, **more: Any) -> ModelSpec:
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": heads * 4,
        "intermediate_size": heads * 8,
        "num_hidden_layers": layers,
    }
    return FAMILIES.describe({**LLAMA, **sizes, **more})[0]


def moe(heads: int = 8, experts: int = 6) -> ModelSpec:
    return spec(
        heads,
        2,
        model_type="mixtral",
        num_local_experts=experts,
        num_experts_per_tok=2,
    )


def test_fewer_key_heads_than_ranks_are_replicated() -> None:
    model = spec(8, 2)
    assert violations(model, Mesh(tp=4)) == ()
    assert allowed(model, "tp", 64) == (1, 2, 4, 8)
    refuse_impossible(model, Mesh(tp=8, pp=8))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "reason", "expected", "way"),
    [
        (25, 5, 4, "25 query heads do not divide by tp 4", "tp in 1, 5, 25", "--tp 1, or --tp 5, or --pp 4 instead"),
        (
            64,
            8,
            3,
            "64 query heads do not divide by tp 3",
            "tp in 1, 2, 4, 8, 16, 32, 64",
            "--tp 2, or --tp 4, or --pp 3",
        ),
        (12, 6, 4, "6 key/value heads do not divide by tp 4", "tp in 1, 2, 3, 6, 12", "--tp 3, or --tp 6"),
        (12, 3, 2, "3 key/value heads do not divide by tp 2", "tp in 1, 3, 6, 12", "--tp 1, or --tp 3"),
        (64, 8, 128, "64 query heads do not divide by tp 128", "1, 2, 4, 8, 16, 32, 64", "use --tp 64"),
    ],
)
def test_heads_that_do_not_divide(heads: int, kv_heads: int, tp: int, reason: str, expected: str, way: str) -> None:
    with pytest.raises(Refused) as caught:
        refuse_impossible(spec(heads, kv_heads), Mesh(tp=tp))
    (finding,) = caught.value.findings
    assert finding.code == "indivisible"
    assert finding.found == f"tp {tp}"
    assert reason in finding.message
    assert expected in str(finding.expected)
    assert way in str(finding.next)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "intermediate", "helps"),
    [
        (9, 3, 2, 1536, True),  # SmolLM2 135M
        (25, 5, 4, 100, True),
        (9, 3, 2, 27, False),  # 27 channels do not divide either
    ],
)
def test_leaving_mixers_whole_is_offered_where_nothing_else_is_against_it(
    heads: int, kv_heads: int, tp: int, intermediate: int, helps: bool
) -> None:
    model = spec(heads, kv_heads, intermediate_size=intermediate)
    (finding,) = violations(model, Mesh(tp=tp))
    assert ("--attention whole" in str(finding.next)) == helps
    left = violations(model, Mesh(tp=tp, attention="whole"))
    assert (not left) == helps
    assert "heads" not in "".join(one.message for one in left)
    assert "--attention" not in "".join(str(one.next) for one in left)


def test_the_way_out_by_layers_is_offered_as_far_as_there_are_layers() -> None:
    for layers, way in ((1, None), (2, "--pp 2 instead"), (8, "--pp 3 instead")):
        (finding,) = violations(spec(64, 8, layers=layers), Mesh(tp=3))
        assert way in str(finding.next) if way else "--pp" not in str(finding.next)


def test_all_reasons_come_at_once() -> None:
    found = violations(moe(experts=6), Mesh(tp=3, ep=4, pp=99, sp=2))
    assert [finding.code for finding in found] == ["indivisible", "indivisible", "indivisible"]
    assert "8 layers do not fill 99 pipeline stages" in found[0].message
    assert "8 query heads do not divide by tp 3" in found[1].message
    assert "6 experts do not divide by ep 4" in found[2].message
    assert "ep in 1, 2, 3, 6" in str(found[2].expected)
    for finding in found:
        assert finding.expected
        assert finding.found
        assert finding.next


def test_experts_are_needed_for_expert_parallelism() -> None:
    (finding,) = violations(spec(8, 2), Mesh(ep=2))
    assert finding.code == "unsupported-axis"
    assert "this model has none" in finding.message


def test_an_odd_width_is_a_reason() -> None:
    (finding,) = violations(spec(8, 2, intermediate_size=100), Mesh(tp=8))
    assert "100 feed-forward channels do not divide by tp 8" in finding.message
    assert allowed(spec(8, 2, intermediate_size=100), "tp") == (1, 2, 4)


def test_any_vocabulary_can_be_cut() -> None:
    assert violations(spec(8, 2, vocab_size=257), Mesh(tp=8)) == ()


@pytest.mark.parametrize("model", [spec(8, 2), spec(25, 5), spec(12, 3), moe(), moe(12, 16)])
@pytest.mark.parametrize("axis", ["tp", "ep", "pp"])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_allowed_is_what_is_not_refused(model: ModelSpec, axis: str, attention: Attention) -> None:
    """Every size up to 40, asked one by one."""
    meshes = {size: Mesh(**{axis: size}, attention=attention) for size in range(1, 41)}
    one_by_one = tuple(size for size, mesh in meshes.items() if not violations(model, mesh))
    assert allowed(model, axis, 40, attention=attention) == one_by_one
    assert allowed(model, axis, 40, placements(model), attention) == one_by_one
    assert allowed(model, axis, 3, attention=attention) == tuple(size for size in one_by_one if size <= 3)
