"""The account: every tensor and every parameter, either way, and messages that say which and where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.weights.accounts.padding import is_rounded
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.files.safetensors_file import Tensor
from firstlight.engine.weights.ledger import Ledger, account
from firstlight.engine.weights.names.naming import by_pattern, pattern_range
from firstlight.engine.weights.synthesize import synthesize
from tests.engine.weights.accounts import MOE, fatal, one, settle
from tests.engine.weights.files import LLAMA


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    synthesize(LLAMA, tmp_path)
    return tmp_path


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    synthesize(MOE, tmp_path)
    return tmp_path


@pytest.fixture
def fused(tmp_path: Path) -> Path:
    synthesize(MOE, tmp_path, fused=True)
    return tmp_path


def test_a_complete_account(llama: Path) -> None:
    ledger = settle(llama)
    assert ledger.findings == ()
    assert set(ledger.summary().values()) == {21, 0}
    assert ledger.consumed["model.layers.1.mlp.down_proj.weight"] == ("layers.1.ffn.down.weight",)
    assert ledger.sources["layers.1.ffn.down.weight"].tensor == "model.layers.1.mlp.down_proj.weight"
    assert msgspec.json.decode(msgspec.json.encode(ledger), type=Ledger) == ledger


# Names


def test_a_misspelt_name_is_missing_and_unconsumed_and_the_two_are_brought_together(moe: Path) -> None:
    def misspell(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("gate_proj.weight") and "experts" in name]:
            tensors[name.replace("gate_proj", "gate_porj")] = tensors.pop(name)

    missing, unconsumed = fatal(settle(moe, misspell))
    assert missing.code == "missing-tensor"
    assert missing.message == "layers.{0..2}.ffn.experts.{0..3}.gate.weight: 0 of 12 parameters filled"
    assert "perhaps model.layers.{0..2}.mlp.experts.{0..3}.gate_porj.weight, as many" in str(missing.next)
    assert len(missing.tensors) == 12
    assert unconsumed.code == "unconsumed-tensor"
    assert unconsumed.message.startswith("model.layers.{0..2}.mlp.experts.{0..3}.gate_porj.weight: 12 tensors")


def test_a_fused_name_misspelt(fused: Path) -> None:
    def misspell(tensors: dict[str, Tensor]) -> None:
        for layer in range(3):
            name = f"model.layers.{layer}.mlp.experts.gate_up_proj"
            tensors[f"{name}s"] = tensors.pop(name)

    found = fatal(settle(fused, misspell))
    assert [finding.message for finding in found[:2]] == [
        "layers.{0..2}.ffn.experts.{0..3}.gate.weight: 0 of 12 parameters filled",
        "layers.{0..2}.ffn.experts.{0..3}.up.weight: 0 of 12 parameters filled",
    ]
    assert found[2].message.startswith("model.layers.{0..2}.mlp.experts.gate_up_projs: 3 tensors")


def test_some_experts_of_some_layers(moe: Path) -> None:
    def lose(tensors: dict[str, Tensor]) -> None:
        for layer, expert in ((0, 1), (0, 3), (2, 1), (2, 3)):
            del tensors[f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"]

    finding = one(settle(moe, lose))
    assert finding.message == "layers.{0,2}.ffn.experts.{1,3}.up.weight: 8 of 12 parameters filled"
    assert finding.found == "8 filled"


def test_more_layers_and_experts_than_the_configuration_says(moe: Path) -> None:
    found = fatal(settle(moe, num_hidden_layers=2, num_experts=3))
    assert {finding.code for finding in found} == {"unconsumed-tensor", "shape-mismatch"}
    unconsumed = [name for finding in found if finding.code == "unconsumed-tensor" for name in finding.tensors]
    assert "model.layers.2.input_layernorm.weight" in unconsumed
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in unconsumed
    assert [f.tensors for f in found if f.code == "shape-mismatch"] == [
        ("model.layers.0.mlp.gate.weight", "model.layers.1.mlp.gate.weight")
    ]


def test_fewer_experts_than_a_stacked_tensor_holds(fused: Path) -> None:
    """The fused tensors have four experts, the model three: the fourth would be lost in silence."""
    found = fatal(settle(fused, num_experts=3))
    messages = "\n".join(finding.message for finding in found)
    assert {finding.code for finding in found} == {"shape-mismatch"}
    assert "model.layers.{0..2}.mlp.experts.gate_up_proj holds more than is taken by" in messages
    assert "model.layers.{0..2}.mlp.experts.down_proj holds more than is taken by" in messages
    assert any("[4, 12, 8]" in str(finding.found) for finding in found)


def test_more_experts_than_a_stacked_tensor_holds(fused: Path) -> None:
    found = fatal(settle(fused, num_experts=5))
    messages = [finding.message for finding in found if finding.code == "missing-tensor"]
    assert "layers.{0..2}.ffn.experts.4.down.weight: 12 of 15 parameters filled" in messages


def test_two_names_for_one_parameter(llama: Path) -> None:
    def copy(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            if name.startswith("model.layers."):
                tensors[name.removeprefix("model.")] = tensors[name]

    found = fatal(settle(llama, copy))
    assert {finding.code for finding in found} == {"duplicate-tensor"}
    assert len(found) == 9, "one a pattern"
    assert "layers.{0..1}.ffn.down.weight: 2 parameters have two sources" in "\n".join(f.message for f in found)


def test_layers_of_which_nothing_is_there_are_one_finding(llama: Path) -> None:
    finding = one(settle(llama, num_hidden_layers=5))
    assert finding.message == "layers {2..4}: no tensor at all, 27 parameters are not filled"
    assert (finding.code, finding.expected, len(finding.tensors)) == ("missing-tensor", "27 filled", 27)


def test_a_layer_that_lacks_one_tensor_is_not_absent(llama: Path) -> None:
    def lose(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".layers.1." in name and "o_proj" not in name]:
            del tensors[name]

    found = fatal(settle(llama, lose))
    assert len(found) == 8
    assert "layers.1.ffn.up.weight: 1 of 2 parameters filled" in [finding.message for finding in found]


def test_layers_under_another_name_are_brought_together_with_it(llama: Path) -> None:
    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".layers.1." in name]:
            tensors[name.replace("layers.1", "blocks.1")] = tensors.pop(name)

    found = [finding for finding in fatal(settle(llama, rename)) if finding.code == "missing-tensor"]
    assert len(found) == 9
    assert all("perhaps model.blocks.1." in str(finding.next) for finding in found)


def test_left_out_with_a_reason(llama: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    ledger = settle(llama, lambda tensors: tensors.update({name: np.ones(4, np.float32)}))
    assert ledger.findings == ()
    assert ledger.left_out == {name: "recomputed from the configuration"}


@pytest.mark.parametrize("stacked", [False, True])
def test_what_a_missing_shard_held_is_not_looked_for_elsewhere(stacked: bool, tmp_path: Path) -> None:
    synthesize(MOE, tmp_path, shards=3, fused=stacked)
    lost = Checkpoint.open(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    finding = one(settle(tmp_path))
    assert (finding.code, finding.file) == ("missing-tensor", "model-00002-of-00003.safetensors")
    assert finding.next == "fetch model-00002-of-00003.safetensors again, and the index with it"
    held = account(lost, *FAMILIES.describe(MOE))
    assert set(finding.tensors) == {
        param for param, source in held.sources.items() if lost.tensors[source.tensor].file == finding.file
    }


# Shapes


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.mlp.up_proj.weight", (13, 8)),
        ("model.layers.0.mlp.up_proj.weight", (8, 12)),
        ("model.layers.0.mlp.up_proj.weight", (96,)),
        ("model.layers.0.mlp.up_proj.weight", ()),
        ("model.layers.0.mlp.up_proj.weight", (2, 12, 8)),
        ("model.layers.0.mlp.up_proj.weight", (12, 8, 1)),
        ("model.layers.0.mlp.up_proj.weight", (0, 8)),
        ("model.embed_tokens.weight", (31, 8)),
        ("model.embed_tokens.weight", (33, 9)),
        ("model.embed_tokens.weight", (47, 8)),
        ("model.norm.weight", (9,)),
    ],
)
def test_a_shape_that_is_not_the_parameters(name: str, shape: tuple[int, ...], llama: Path) -> None:
    finding = one(settle(llama, lambda tensors: tensors.update({name: np.ones(shape, np.float32)})))
    assert (finding.code, finding.tensors, finding.found) == ("shape-mismatch", (name,), str(list(shape)))
    assert finding.file == "model.safetensors"
    assert name in finding.message


@pytest.mark.parametrize(
    "shape", [(4, 13, 8), (4, 12, 9), (4, 11, 8), (4, 12), (4,), (), (12, 8), (5, 12, 8), (1, 4, 12, 8)]
)
def test_a_stacked_tensor_of_another_shape(shape: tuple[int, ...], fused: Path) -> None:
    name = "model.layers.1.mlp.experts.gate_up_proj"
    found = fatal(settle(fused, lambda tensors: tensors.update({name: np.ones(shape, np.float32)})))
    assert name in {tensor for finding in found for tensor in finding.tensors}


def test_the_same_problem_in_every_layer_is_one_finding(llama: Path) -> None:
    found = fatal(settle(llama, intermediate_size=10))
    assert [finding.message for finding in found] == [
        f"model.layers.{{0..1}}.mlp.{part}_proj.weight does not have the shape of layers.{{0..1}}.ffn.{part}.weight"
        for part in ("down", "gate", "up")
    ]
    assert all(len(finding.tensors) == 2 for finding in found)


@pytest.mark.parametrize(("tail", "severity"), [(0.0, "note"), (2.5, "warning")])
def test_rows_behind_the_vocabulary_are_left_out(tail: float, severity: str, llama: Path) -> None:
    def pad(tensors: dict[str, Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = np.pad(tensors[name], ((0, 3), (0, 0)), constant_values=tail)  # type: ignore[arg-type]

    ledger = settle(llama, pad)
    assert ledger.complete
    assert [(f.code, f.severity, f.tensors) for f in ledger.findings] == [
        ("padded-tensor", severity, ("lm_head.weight",)),
        ("padded-tensor", severity, ("model.embed_tokens.weight",)),
    ]
    assert all("rows 32 to 34 of 35" in finding.message for finding in ledger.findings)
    assert ledger.sources["head.weight"].region == ((0, 32, 1), (0, 8, 1))


@pytest.mark.parametrize(
    ("rows", "stored", "rounded"),
    [(257, 264, True), (257, 320, True), (50257, 51200, True), (256, 264, True), (99, 131, False), (32, 47, False)],
)
def test_how_many_rows_a_vocabulary_may_have_more(rows: int, stored: int, rounded: bool) -> None:
    assert is_rounded(rows, stored) is rounded


def test_many_more_rows_than_tokens_are_another_release_unless_they_are_empty(llama: Path) -> None:
    head_VH = np.ones((47, 8), np.float32)
    finding = one(settle(llama, lambda tensors: tensors.update({"lm_head.weight": head_VH})))
    assert (finding.code, finding.tensors) == ("shape-mismatch", ("lm_head.weight",))
    head_VH[32:] = 0
    assert settle(llama, lambda tensors: tensors.update({"lm_head.weight": head_VH})).complete


# Words


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["layers.3.w"], "layers.3.w"),
        ([f"layers.{i}.w" for i in range(40)], "layers.{0..39}.w"),
        ([f"layers.{i}.w" for i in (0, 1, 2, 7)], "layers.{0..2,7}.w"),
        ([f"layers.{i}.w" for i in range(0, 40, 2)], "layers.{20 of 0..38}.w"),
        ([f"layers.{i}.e.{e}.w" for i in range(3) for e in range(5)], "layers.{0..2}.e.{0..4}.w"),
        (["norm.weight"], "norm.weight"),
        (["w2.7"], "w2.7"),
    ],
)
def test_patterns_show_the_numbers_that_occur(names: list[str], shown: str) -> None:
    ((pattern, group),) = by_pattern(names).items()
    assert group == names
    assert pattern_range(pattern, group) == shown


def test_the_message_of_a_misspelt_tensor_reads_well(llama: Path) -> None:
    def misspell(tensors: dict[str, Tensor]) -> None:
        tensors["model.nrom.weight"] = tensors.pop("model.norm.weight")

    with pytest.raises(Refused) as caught:
        settle(llama, misspell).refuse_if_incomplete()
    assert str(caught.value) == (
        "missing-tensor: norm.weight: 0 of 1 parameters filled\n"
        "  tensors: norm.weight\n"
        "  expected: 1 filled, from model.norm.weight; found: 0 filled\n"
        "  next: perhaps model.nrom.weight, as many and of the same shape: rename them or add a weight rule; "
        "nothing is guessed\n"
        "unconsumed-tensor: model.nrom.weight: 1 tensor that no parameter consumes\n"
        "  file: model.safetensors\n"
        "  tensors: model.nrom.weight\n"
        "  expected: a weight rule, or a rule that leaves it out with a reason; found: no rule\n"
        "  next: add the rule to the family file: dropping weights in silence is not offered"
    )


@pytest.mark.parametrize("change", [lambda name: f"model.{name}", str.upper], ids=["prefix", "upper case"])
def test_where_a_tensor_might_be_is_told_by_words(change: Callable[[str], str], tmp_path: Path) -> None:
    """Of names for tensors of one shape the one with the words of the parameter is named, however long it is."""
    synthesize(LLAMA, tmp_path)
    found = fatal(settle(tmp_path, lambda t: [t.update({change(name): t.pop(name)}) for name in list(t)]))
    said = {finding.tensors[0]: str(finding.next) for finding in found if finding.code == "missing-tensor"}
    assert change("model.embed_tokens.weight") in said["embed.weight"]
    assert change("lm_head.weight") in said["head.weight"]
