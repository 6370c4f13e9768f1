"""The account: every tensor and every parameter, either way, and messages that say which and where."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.model.rules import Matcher, rule
from firstlight.engine.weights import ledger as ledger_module
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.gaps import by_pattern, pattern_range
from firstlight.engine.weights.ledger import Ledger, account
from firstlight.engine.weights.safetensors_file import Tagged, Tensor, bfloat16, read, write
from firstlight.engine.weights.source import Source
from firstlight.engine.weights.synthesize import outlines_of, synthesize, value_of
from tests.engine.weights.files import LLAMA

MOE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "head_dim": 4,
    "num_hidden_layers": 3,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
}
Change = Callable[[dict[str, Tensor]], Any]


def settle(home: Path, change: Change | None = None, **config: Any) -> Ledger:
    """The account of a single-file checkpoint after a change to its tensors or its configuration."""
    if change is not None:
        tensors = read(home / "model.safetensors")
        change(tensors)
        write(home / "model.safetensors", tensors)
    if config:
        raw = json.loads((home / "config.json").read_text())
        (home / "config.json").write_text(json.dumps({**raw, **config}))
    checkpoint = Checkpoint.open(home)
    return account(checkpoint, *FAMILIES.describe(checkpoint.config))


def fatal(ledger: Ledger) -> list[Finding]:
    found = [finding for finding in ledger.findings if finding.severity == "fatal"]
    assert ledger.complete is not bool(found)
    for finding in found:
        assert finding.tensors
        assert finding.expected
        assert finding.found
        assert finding.next
    if found:
        with pytest.raises(Refused):
            ledger.refuse_if_incomplete()
    return found


def one(ledger: Ledger) -> Finding:
    (finding,) = fatal(ledger)
    return finding


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
    again = msgspec.json.decode(msgspec.json.encode(ledger), type=Ledger)
    assert again == ledger


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
    assert finding.next == "fetch model-00002-of-00003.safetensors again, where the index places them"
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
        ("model.embed_tokens.weight", (33, 8)),
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


# Dtypes and scales


def quantize(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if "proj" in name]:
        shape = tensors[name].shape  # type: ignore[union-attr]
        tensors[name] = Tagged("F8_E4M3", np.zeros(shape, np.uint8))
        tensors[f"{name}_scale_inv"] = np.ones((1, 1), np.float32)


def test_a_quantized_checkpoint_is_refused_by_name(llama: Path) -> None:
    found = fatal(settle(llama, quantize))
    assert {finding.code for finding in found} == {"unsupported-format"}
    assert found[0].message.startswith("14 tensors are stored as F8_E4M3, which is not read yet")
    assert len(found) == 1 + 7, "the weights together, the scales by pattern"


def test_a_scale_alone_and_a_weight_without_one(llama: Path) -> None:
    def lose(tensors: dict[str, Tensor]) -> None:
        quantize(tensors)
        del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]
        tensors["model.layers.7.mlp.up_proj.weight_scale_inv"] = np.ones((1, 1), np.float32)

    found = [finding for finding in fatal(settle(llama, lose)) if finding.code == "unpaired-scale"]
    assert [finding.tensors for finding in found] == [
        ("model.layers.7.mlp.up_proj.weight_scale_inv",),
        ("model.layers.0.mlp.up_proj.weight",),
    ]
    assert "a scale of one is never put in its place" in str(found[1].next)


@pytest.fixture
def two_shards(tmp_path: Path) -> Path:
    """A quantized toy in two shards: FP8 weights with their scales, and a configuration that says so."""
    config = {**LLAMA, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    synthesize(config, tmp_path, shards=2)
    weight_map = {}
    for path in sorted(tmp_path.glob("*.safetensors")):
        tensors = read(path)
        quantize(tensors)
        write(path, tensors)
        weight_map.update(dict.fromkeys(tensors, path.name))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_a_quantized_checkpoint_without_one_of_its_shards(two_shards: Path) -> None:
    """The file and what it held are named, and neither side of the account is whole: nothing can be started."""
    gone = two_shards / "model-00002-of-00002.safetensors"
    held = set(read(gone))
    gone.unlink()
    checkpoint = Checkpoint.open(two_shards)
    (finding,) = checkpoint.findings
    assert (finding.code, finding.file, set(finding.tensors)) == ("missing-shard", gone.name, held)
    with pytest.raises(Refused, match="is not there"):
        checkpoint.refuse_if_broken()
    ledger = account(checkpoint, *FAMILIES.describe(checkpoint.config))
    assert not ledger.complete
    (missing,) = [finding for finding in ledger.findings if finding.code == "missing-tensor"]
    assert missing.file == gone.name
    assert "layers.1.ffn.down.weight" in missing.tensors


def test_a_scale_that_the_index_does_not_list_is_there_all_the_same(two_shards: Path) -> None:
    path = two_shards / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    scale = "model.layers.0.mlp.up_proj.weight_scale_inv"
    del index["weight_map"][scale]
    path.write_text(json.dumps(index))
    checkpoint = Checkpoint.open(two_shards)
    (finding,) = checkpoint.findings
    assert (finding.code, finding.severity, finding.tensors) == ("unlisted-tensor", "warning", (scale,))
    ledger = account(checkpoint, *FAMILIES.describe(checkpoint.config))
    assert "unpaired-scale" not in {finding.code for finding in ledger.findings}


def test_whole_numbers_are_no_weights(llama: Path) -> None:
    name = "model.norm.weight"
    finding = one(settle(llama, lambda tensors: tensors.update({name: np.ones(8, np.int32)})))
    assert (finding.code, finding.found) == ("unsupported-format", "I32")


# The output head


def test_a_tied_head_is_in_the_account(llama: Path) -> None:
    ledger = settle(llama, lambda tensors: tensors.pop("lm_head.weight"), tie_word_embeddings=True)
    assert ledger.complete
    assert [(finding.code, finding.severity) for finding in ledger.findings] == [("tied-head", "note")]
    assert ledger.sources["head.weight"] == Source(
        "model.embed_tokens.weight", ((0, 32, 1), (0, 8, 1)), transpose=False, tied=True
    )
    assert ledger.consumed["model.embed_tokens.weight"] == ("embed.weight", "head.weight")


@pytest.mark.parametrize("flag", [False, None])
def test_a_head_that_is_not_tied_must_be_there(flag: bool | None, llama: Path) -> None:
    finding = one(settle(llama, lambda tensors: tensors.pop("lm_head.weight"), tie_word_embeddings=flag))
    assert finding.code == "missing-tensor"
    assert finding.tensors == ("head.weight",)
    assert "tie_word_embeddings must say so" in str(finding.next)


def test_a_head_of_its_own_is_used_whatever_the_flag_says(llama: Path) -> None:
    ledger = settle(llama, tie_word_embeddings=True)
    (finding,) = ledger.findings
    assert ledger.complete
    assert (finding.code, finding.severity) == ("conflicting-flag", "warning")
    assert ledger.sources["head.weight"].tensor == "lm_head.weight"
    assert not ledger.sources["head.weight"].tied


def test_an_equal_copy_of_the_embedding(llama: Path) -> None:
    ledger = settle(
        llama, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}), tie_word_embeddings=True
    )
    (finding,) = ledger.findings
    assert (finding.code, finding.severity, finding.found) == ("tied-head", "note", "equal copy")


def test_heads_are_compared_in_steps_and_only_until_they_differ(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_bytes: list[int] = []

    def count(self: Checkpoint, name: str, offset_bytes: int = 0, nbytes: int | None = None) -> bytes:
        read_bytes.append(nbytes or 0)
        return Checkpoint.__dict__["_original"](self, name, offset_bytes, nbytes)

    monkeypatch.setattr(Checkpoint, "_original", Checkpoint.read_bytes, raising=False)
    monkeypatch.setattr(Checkpoint, "read_bytes", count)
    checkpoint = Checkpoint.open(llama)
    head, embed = "lm_head.weight", "model.embed_tokens.weight"
    assert not ledger_module.equal_tensors(checkpoint, head, embed, step_bytes=100)
    assert read_bytes == [100, 100]
    assert ledger_module.equal_tensors(checkpoint, head, head, step_bytes=100)
    assert sum(read_bytes[2:]) == 2 * 32 * 8 * 4


def test_a_head_in_a_file_that_was_cut_is_an_error_not_a_difference(llama: Path) -> None:
    tensors = read(llama / "model.safetensors")
    first = {"lm_head.weight": tensors.pop("lm_head.weight")}
    write(llama / "model-00001-of-00002.safetensors", tensors)
    write(llama / "model-00002-of-00002.safetensors", first)
    (llama / "model.safetensors").unlink()
    path = llama / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    finding = one(settle(llama, tie_word_embeddings=True))
    assert finding.code == "read-failed"
    assert finding.file == path.name


VLM: dict[str, Any] = {
    "model_type": "llava",
    "text_config": {**LLAMA, "tie_word_embeddings": False},
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
    },
    "image_token_index": 31,
}


@pytest.mark.parametrize("outer", [None, False, True])
@pytest.mark.parametrize("inner", [None, False, True])
@pytest.mark.parametrize("head", [True, False])
def test_the_tie_flag_at_either_level(outer: bool | None, inner: bool | None, head: bool, tmp_path: Path) -> None:
    """A head in the file is used always; an absent one is tied only if a level says so; disagreement is said."""
    config = json.loads(json.dumps(VLM))
    config["text_config"].pop("tie_word_embeddings")
    config.update({} if outer is None else {"tie_word_embeddings": outer})
    config["text_config"].update({} if inner is None else {"tie_word_embeddings": inner})
    synthesize(config, tmp_path, tied=not head)
    checkpoint = Checkpoint.open(tmp_path)
    spec, matcher = FAMILIES.describe(checkpoint.config)
    ledger = account(checkpoint, spec, matcher)
    disagree = None not in (outer, inner) and outer is not inner
    assert disagree == any(finding.code == "conflicting-flag" for finding in spec.findings)
    if head:
        assert ledger.complete
        assert ledger.sources["head.weight"].tensor.endswith("lm_head.weight")
        said = any(finding.code == "conflicting-flag" for finding in ledger.findings)
        assert said == bool(outer or inner), "a head that the flag denies is said"
    else:
        assert ledger.complete == bool(outer or inner)
        if ledger.complete:
            assert ledger.sources["head.weight"].tied


# Rules of every kind, there and back


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
        "  expected: 1 filled; found: 0 filled\n"
        "  next: perhaps model.nrom.weight, as many and of the same shape: rename them or add a weight rule; "
        "nothing is guessed\n"
        "unconsumed-tensor: model.nrom.weight: 1 tensors that no parameter consumes\n"
        "  tensors: model.nrom.weight\n"
        "  expected: a weight rule, or a rule that leaves it out with a reason; found: no rule\n"
        "  next: add the rule to the family file: dropping weights in silence is not offered"
    )
