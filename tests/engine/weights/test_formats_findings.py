"""Quantized checkpoints that are not whole, or not what their configuration says: named, never guessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.parallel.pieces import rank_pieces
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.files.safetensors_file import Tagged, Tensor
from firstlight.engine.weights.formats.announced import KNOWN, READERS, announced
from firstlight.engine.weights.formats.scheme import Modules
from firstlight.engine.weights.ledger import Ledger
from firstlight.engine.weights.loader import load
from firstlight.engine.weights.synthesize import synthesize
from tests.engine.weights.quantized import CONFIGS, compressed
from tests.engine.weights.test_formats_load import MODELS, change, loaded_is, settle, written

UP = "model.layers.0.mlp.up_proj"


def fatal(ledger: Ledger) -> list[Finding]:
    found = [finding for finding in ledger.findings if finding.severity == "fatal"]
    assert ledger.complete is not bool(found)
    assert all(finding.tensors and finding.expected and finding.found and finding.next for finding in found)
    return found


def edit_config(home: Path, **fields: Any) -> None:
    raw = json.loads((home / "config.json").read_text())
    (home / "config.json").write_text(json.dumps({**raw, **fields}))


# Parts of a weight

PARTS = {
    "fp8-blocks": (".weight_scale_inv", "weight_scale_inv"),
    "float-channel": (".weight_scale", "weight_scale"),
    "packed-int4": (".weight_scale", "weight_scale"),
    "nvfp4": (".weight_global_scale", "weight_global_scale"),
    "nvfp4-modelopt": (".weight_scale_2", "weight_scale_2"),
    "awq": (".qzeros", "qzeros"),
    "gptq": (".scales", "scales"),
    # What is announced is never done without: an asymmetric weight read as a symmetric one is another weight.
    "int8": (".weight_zero_point", "weight_zero_point"),
    "packed-int8": (".weight_zero_point", "weight_zero_point"),
    "packed-ordered": (".weight_g_idx", "weight_g_idx"),
    "gptq, its order": (".g_idx", "g_idx"),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_is_missing_is_named_and_nothing_takes_its_place(name: str, tmp_path: Path) -> None:
    written("llama", CONFIGS[name.partition(",")[0]], tmp_path)
    ending, part = PARTS[name]
    change(tmp_path, lambda held: held.pop(UP + ending))
    (finding,) = fatal(settle(tmp_path))
    assert (finding.code, finding.expected, finding.found) == ("unpaired-scale", f"{part} for each", "none")
    assert [tensor.startswith(UP) for tensor in finding.tensors] == [True]
    assert "never put in its place" in str(finding.next)


def test_a_scale_of_nothing(tmp_path: Path) -> None:
    written("llama", CONFIGS["fp8-blocks"], tmp_path)
    lost = "model.layers.1.mlp.up_proj.weight"
    change(tmp_path, lambda held: held.pop(lost))
    codes = {finding.code: finding for finding in fatal(settle(tmp_path))}
    assert codes.keys() == {"unpaired-scale", "missing-tensor"}
    assert codes["unpaired-scale"].tensors == (lost + "_scale_inv",)
    assert codes["missing-tensor"].tensors == ("layers.1.ffn.up.weight",)


@pytest.mark.parametrize(
    ("name", "part", "value", "code"),
    [
        ("fp8-blocks", ".weight_scale_inv", np.ones((6, 3), np.float32), "shape-mismatch"),
        ("fp8-blocks", ".weight_scale_inv", np.ones((6, 4), np.int32), "conflicting-flag"),
        ("float-channel", ".weight_scale", np.ones((95, 1), np.float32), "shape-mismatch"),
        ("packed-int4", ".weight_scale", np.ones((96, 15), np.float32), "shape-mismatch"),
        ("mxfp4", ".weight_scale", np.ones((96, 1), np.uint8), "shape-mismatch"),
        ("nvfp4", ".weight_scale", np.ones((96, 4), np.uint8), "conflicting-flag"),
        ("awq", ".scales", np.ones((4, 95), np.float16), "shape-mismatch"),
        ("gptq", ".g_idx", np.zeros(63, np.int32), "shape-mismatch"),
    ],
)
def test_a_part_of_another_shape_or_dtype(name: str, part: str, value: Any, code: str, tmp_path: Path) -> None:
    written("llama", CONFIGS[name], tmp_path)
    change(tmp_path, lambda held: held.update({UP + part: value}))
    (finding,) = fatal(settle(tmp_path))
    assert finding.code == code
    assert part[1:] in finding.message
    assert str(list(value.shape)) in str(finding.found) or code == "conflicting-flag"


def test_zero_points_are_used_where_they_are_though_they_are_not_announced(tmp_path: Path) -> None:
    """Headers are the truth: an asymmetric export under a configuration that says symmetric."""
    _, values = written("llama", CONFIGS["int8"], tmp_path)
    edit_config(tmp_path, quantization_config=compressed("int-quantized", num_bits=8, type="int", strategy="channel"))
    ledger = settle(tmp_path)
    assert ledger.complete
    loaded_is(tmp_path, ledger, values, Mesh(tp=2))


def test_an_order_that_nobody_announced_may_be_missing(tmp_path: Path) -> None:
    written("llama", CONFIGS["gptq"], tmp_path)
    edit_config(tmp_path, quantization_config={**CONFIGS["gptq"], "desc_act": False})
    change(tmp_path, lambda held: held.pop(UP + ".g_idx"))
    assert settle(tmp_path).complete


def test_zero_points_that_are_not_in_the_middle_though_sym_says_so(tmp_path: Path) -> None:
    """As where a checkpoint of the second version calls itself one of the first: every code would be off by one."""
    _, values = written("llama", CONFIGS["gptq"], tmp_path)

    def middle(held: dict[str, Tensor], code: int) -> None:
        for name in [name for name in held if name.endswith(".qzeros")]:
            held[name] = np.full(held[name].shape, code * 0x11111111, np.uint32).view(np.int32)  # type: ignore[union-attr]

    edit_config(tmp_path, quantization_config={**CONFIGS["gptq"], "sym": True})
    change(tmp_path, lambda held: middle(held, 8))
    with pytest.raises(Refused, match="qzeros does not fit") as caught:
        loaded_is(tmp_path, settle(tmp_path), values, Mesh())
    (finding,) = caught.value.findings
    assert finding.expected == "zero points of 8, since sym is true"
    assert finding.found == "zero points of 9, as checkpoint_format 'gptq_v2' stores them"
    change(tmp_path, lambda held: middle(held, 7))
    edit_config(tmp_path, quantization_config={**CONFIGS["gptq"], "sym": True, "checkpoint_format": "gptq_v2"})
    with pytest.raises(Refused, match="of 7, as checkpoint_format 'gptq' stores them"):
        loaded_is(tmp_path, settle(tmp_path), values, Mesh())
    edit_config(tmp_path, quantization_config={**CONFIGS["gptq"], "sym": True})
    checkpoint = Checkpoint.open(tmp_path)
    spec, _ = FAMILIES.describe(checkpoint.config)
    assert load(checkpoint, rank_pieces(spec, Mesh(), 0, "F32", settle(tmp_path))).params


@pytest.mark.parametrize("kept", [(), ("attention", "mlp")], ids=["unpacked", "kept"])
def test_awq_without_zero_points_has_them_all_the_same(kept: tuple[str, ...], tmp_path: Path) -> None:
    """They are written, in the middle of the codes; others belong to another configuration."""
    quantization = {**CONFIGS["awq"], "zero_point": False}
    _, values = written("llama", quantization, tmp_path)
    loaded_is(tmp_path, settle(tmp_path), values, Mesh(tp=2))
    change(tmp_path, lambda held: held.update({UP + ".qzeros": np.full((4, 12), 0x88878888, np.uint32).view(np.int32)}))
    checkpoint = Checkpoint.open(tmp_path)
    spec, _ = FAMILIES.describe(checkpoint.config)
    with pytest.raises(Refused, match=f"{UP}.qzeros does not fit") as caught:
        load(checkpoint, rank_pieces(spec, Mesh(), 0, "F32", settle(tmp_path), keep_packed=kept))
    assert caught.value.findings[0].found == "zero points of 7"


@pytest.mark.parametrize("kept", [(), ("attention", "mlp")], ids=["unpacked", "kept"])
@pytest.mark.parametrize(("name", "ending"), [("gptq", ".g_idx"), ("packed-ordered", ".weight_g_idx")])
def test_inputs_of_a_group_that_is_not_there(name: str, ending: str, kept: tuple[str, ...], tmp_path: Path) -> None:
    written("llama", CONFIGS[name], tmp_path)
    change(tmp_path, lambda held: held.update({UP + ending: np.arange(64, dtype=np.int32)}))
    checkpoint = Checkpoint.open(tmp_path)
    spec, _ = FAMILIES.describe(checkpoint.config)
    with pytest.raises(Refused, match=f"{UP}{ending} does not fit") as caught:
        load(checkpoint, rank_pieces(spec, Mesh(), 0, "F32", settle(tmp_path), keep_packed=kept))
    assert caught.value.findings[0].found == "groups 0 to 63"


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_bias_beside_words_is_left_out_only_if_it_is_zero(value: float, tmp_path: Path) -> None:
    written("llama", CONFIGS["gptq"], tmp_path)
    change(tmp_path, lambda held: held.update({UP + ".bias": np.full(96, value, np.float32)}))
    ledger = settle(tmp_path)
    assert ledger.complete is (value == 0)
    assert ("of zeros" in ledger.left_out.get(UP + ".bias", "")) is (value == 0)


def test_two_files_that_name_two_algorithms(tmp_path: Path) -> None:
    written("llama", CONFIGS["fp8-modelopt"], tmp_path)
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    (finding,) = settle(tmp_path).findings
    assert (finding.code, finding.severity, finding.found) == ("conflicting-flag", "warning", "NVFP4")


def test_what_is_said_at_two_levels_and_options_that_nothing_reads(tmp_path: Path) -> None:
    """Each may be about numbers; where codes and scales fit all the same, it is said."""
    written("llama", CONFIGS["fp8-blocks"], tmp_path)
    more = {**CONFIGS["fp8-blocks"], "activation_scheme": "dynamic", "rotated_by": "hadamard"}
    edit_config(tmp_path, quantization_config=more, text_config={"quantization_config": CONFIGS["fp8-blocks"]})
    levels, options = settle(tmp_path).findings
    assert (levels.code, levels.severity) == ("conflicting-flag", "warning")
    assert "text_config.quantization_config" in levels.message
    assert (options.code, options.found) == ("unread-config-key", "rotated_by")


def test_a_part_that_the_format_does_not_have(tmp_path: Path) -> None:
    written("llama", CONFIGS["fp8-blocks"], tmp_path)
    change(tmp_path, lambda held: held.update({UP + ".weight_scale": np.ones((), np.float32)}))
    (finding,) = fatal(settle(tmp_path))
    assert finding.code == "unpaired-scale"
    assert "weight_scale" in finding.message


def test_activation_scales_have_a_reason_and_caches_too(tmp_path: Path) -> None:
    _, values = written("llama", CONFIGS["fp8-tensor"], tmp_path)
    scales = {UP + ".input_scale": "activations", "model.layers.0.self_attn.k_scale": "cache"}
    scales["model.layers.1.self_attn.v_proj.output_scale"] = "cache"
    change(tmp_path, lambda held: held.update(dict.fromkeys(scales, np.float32(0.5).reshape(()))))
    ledger = settle(tmp_path)
    assert ledger.findings == ()
    for name, word in scales.items():
        assert word in ledger.left_out[name]
    loaded_is(tmp_path, ledger, values, Mesh(tp=2))


def test_an_activation_scale_without_quantization_is_nobodys(tmp_path: Path) -> None:
    synthesize(MODELS["llama"], tmp_path)
    change(tmp_path, lambda held: held.update({"model.layers.0.self_attn.k_scale": np.float32(1).reshape(())}))
    assert {finding.code for finding in fatal(settle(tmp_path))} <= {"unpaired-scale", "unconsumed-tensor"}
    assert not settle(tmp_path).complete


def test_a_plain_copy_beside_the_quantized_one(tmp_path: Path) -> None:
    written("llama", CONFIGS["mxfp4"], tmp_path)
    change(tmp_path, lambda held: held.update({UP + ".weight": np.ones((96, 64), np.float32)}))
    (finding,) = fatal(settle(tmp_path))
    assert finding.code == "duplicate-tensor"


# Configuration against headers


def test_a_configuration_of_another_format(tmp_path: Path) -> None:
    written("llama", CONFIGS["packed-int4"], tmp_path)
    edit_config(tmp_path, quantization_config=CONFIGS["float-channel"])
    findings = fatal(settle(tmp_path))
    assert {finding.code for finding in findings} <= {"conflicting-flag", "unpaired-scale", "unconsumed-tensor"}
    assert findings[0].code == "conflicting-flag"
    assert "announced as FP8" in findings[0].message


def test_blocks_of_another_size_than_announced(tmp_path: Path) -> None:
    written("llama", CONFIGS["fp8-blocks"], tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    findings = fatal(settle(tmp_path))
    assert {finding.code for finding in findings} == {"shape-mismatch"}
    assert findings[0].expected == "[1, 1]"


def test_no_quantization_config_at_all(tmp_path: Path) -> None:
    written("llama", CONFIGS["fp8-blocks"], tmp_path)
    edit_config(tmp_path, quantization_config=None)
    findings = fatal(settle(tmp_path))
    assert {finding.code for finding in findings} == {"unsupported-format"}
    assert "config.json does not say how to read that" in findings[0].message


def test_quantized_though_the_configuration_leaves_it_out(tmp_path: Path) -> None:
    _, values = written("llama", CONFIGS["fp8-blocks"], tmp_path)
    edit_config(
        tmp_path,
        quantization_config={**CONFIGS["fp8-blocks"], "modules_to_not_convert": ["model.layers.1.mlp", "lm_head"]},
    )
    ledger = settle(tmp_path)
    (finding,) = ledger.findings
    assert (finding.code, finding.severity, len(finding.tensors)) == ("conflicting-flag", "warning", 3)
    assert "read as stored" in finding.message
    loaded_is(tmp_path, ledger, values, Mesh(tp=2))


def test_plain_though_the_configuration_counts_it_in(tmp_path: Path) -> None:
    kept = {**CONFIGS["fp8-blocks"], "modules_to_not_convert": ["model.layers.1.mlp"]}
    _, values = written("llama", kept, tmp_path)
    edit_config(tmp_path, quantization_config=CONFIGS["fp8-blocks"])
    ledger = settle(tmp_path)
    (finding,) = ledger.findings
    assert (finding.code, finding.severity, len(finding.tensors)) == ("conflicting-flag", "note", 3)
    loaded_is(tmp_path, ledger, values, Mesh(tp=2))


def test_an_unpacked_copy_whose_configuration_was_left(tmp_path: Path) -> None:
    values = synthesize(MODELS["llama"], tmp_path)
    edit_config(tmp_path, quantization_config=CONFIGS["gptq"])
    ledger = settle(tmp_path)
    (finding,) = ledger.findings
    assert (finding.code, finding.severity) == ("conflicting-flag", "warning")
    assert "remove quantization_config" in str(finding.next)
    loaded_is(tmp_path, ledger, values, Mesh(tp=2))


def test_an_unknown_format_is_refused_by_name_and_the_account_goes_on(tmp_path: Path) -> None:
    written("llama", CONFIGS["packed-int4"], tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": "aqlm", "nbits_per_codebook": 16})
    (first, *_) = settle(tmp_path).findings
    assert (first.code, first.severity) == ("unsupported-format", "fatal")
    assert "'aqlm' is not read here: additive codebooks" in first.message


@pytest.mark.parametrize(("name", "renamed"), [("gptq", ""), ("int8", "weight_qdata")])
def test_a_format_that_is_not_read_is_one_refusal_and_what_follows_are_notes(
    name: str, renamed: str, tmp_path: Path
) -> None:
    """Nobody is sent for a shard, or for another configuration, that is not at fault; what norms lack is no note."""
    written("llama", CONFIGS[name], tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": "torchao"})
    up = "model.layers.0.mlp.up_proj."
    if renamed:
        change(tmp_path, lambda held: held.update({up + renamed: held.pop(up + "weight")}))
    cause, *rest = settle(tmp_path).findings
    assert cause.severity == "fatal"
    assert "'torchao' is not read here" in cause.message
    assert [finding.code for finding in rest if finding.severity != "note"] == []
    assert all("'torchao' is not read here" in str(finding.next) for finding in rest)
    assert len(rest) == len({finding.code for finding in rest})
    assert bool(rest) == bool(renamed)
    change(tmp_path, lambda held: held.pop("model.norm.weight"))
    broken = [finding.code for finding in settle(tmp_path).findings if finding.severity == "fatal"]
    assert broken == ["unsupported-format", "missing-tensor"]


@pytest.mark.parametrize("method", [*KNOWN, "frobnicate", None])
def test_what_is_known_about_tools_that_are_not_read(method: str | None) -> None:
    with pytest.raises(Refused) as caught:
        announced({"quantization_config": {"quant_method": method, "bits": 4}})
    (finding,) = caught.value.findings
    assert finding.code == "unsupported-format"
    assert repr(method) in finding.message
    assert KNOWN.get(str(method), "nothing is known about it here") in finding.message
    assert all(name in str(finding.expected) for name in READERS)


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


@pytest.mark.parametrize(
    ("quantization", "code", "word"),
    [
        ({"quant_method": "awq", "version": "gemv"}, "unsupported-format", "gemv"),
        ({"quant_method": "awq", "format": "gemv_fast"}, "unsupported-format", "gemv_fast"),
        ({"quant_method": "awq", "backend": "llm-awq"}, "unsupported-format", "llm-awq"),
        ({"quant_method": "awq", "pack_dtype": "int64"}, "unsupported-format", "int64"),
        (
            {"quant_method": "gptq", "checkpoint_format": "gptq", "format": "gptq_v2"},
            "config-invalid",
            "one and the same",
        ),
        ({"quant_method": "fp8", "weight_scale_semantics": "log"}, "unsupported-format", "log"),
        ({"quant_method": "awq", "bits": 3}, "unsupported-format", "bits"),
        ({"quant_method": "awq", "zero_point": None, "bits": 8}, "unsupported-format", "bits"),
        ({"quant_method": "gptq", "bits": 5}, "unsupported-format", "bits = 5"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "config-invalid", "group_size"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "unsupported-format", "marlin"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down.*": {"bits": 6}}}, "unsupported-format", "bits = 6"),
        (
            {"quant_method": "gptq", "dynamic": {".*down.*": {"rotation": "x"}}},
            "unsupported-format",
            "down.*: rotation",
        ),
        ({"quant_method": "awq", "dynamic": {".*down.*": {"bits": 8}}}, "unsupported-format", "down.*: bits = 8"),
        ({"quant_method": "fp8", "dynamic": {".*down.*": {"bits": 4}}}, "unsupported-format", "down.*: bits = 4"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "config-invalid", "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "config-invalid", "weight_block_size"),
        ({"quant_method": "fp8", "fmt": "e3m4"}, "unsupported-format", "e3m4"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "config-invalid", "modules_to_not_convert"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "unsupported-format", "pre_quant_scale"),
        ({"quant_method": "modelopt"}, "unsupported-format", "quant_algo"),
        (compressed("marlin-24", **INT4), "unsupported-format", "marlin-24"),
        (compressed("mxfp6-pack-quantized", **INT4), "unsupported-format", "byte boundaries"),
        (compressed("pack-quantized", **{**INT4, "num_bits": 3}), "unsupported-format", "num_bits"),
        (compressed("pack-quantized", **{**INT4, "strategy": "vector"}), "config-invalid", "strategy"),
        (
            {**compressed("pack-quantized", **INT4), "sparsity_config": {"format": "sparse-bitmask"}},
            "unsupported-format",
            "bit mask",
        ),
        (
            {**compressed("pack-quantized", **INT4), "transform_config": {"config_groups": {"R1": {}}}},
            "unsupported-format",
            "rotat",
        ),
        ({**compressed("pack-quantized", **INT4), "ignore": ["re:("]}, "config-invalid", "unterminated"),
        ({**compressed("pack-quantized", **INT4), "ignore": ["re:(.*a)+x"]}, "config-invalid", "never end"),
        ({"load_in_4bit": True}, "unsupported-format", "bitsandbytes"),
        (["fp8"], "config-invalid", "an object"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_options_that_are_not_read_are_refused(quantization: Any, code: str, word: str) -> None:
    with pytest.raises(Refused) as caught:
        announced({"quantization_config": quantization}).of("a.b")
    (finding,) = caught.value.findings
    assert finding.code == code
    assert word in str(finding)


@pytest.mark.parametrize(
    ("patterns", "inside", "outside"),
    [
        (["lm_head"], ["lm_head", "model.lm_head"], ["model.lm_header"]),
        (
            ["model.layers.1.mlp"],
            ["model.layers.1.mlp.up_proj"],
            ["model.layers.11.mlp.up_proj", "model.layers.1.mlp2"],
        ),
        (["mlp.gate"], ["model.layers.0.mlp.gate"], ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp"]),
        (["model.layers.*.self_attn"], ["model.layers.7.self_attn.q_proj"], ["model.layers.7.mlp.up_proj"]),
        (["*.mlp.gate", "visual*"], ["model.layers.3.mlp.gate", "visual.blocks.0.qkv"], ["model.layers.3.mlp.up_proj"]),
        ([r"re:.*mlp\.(gate|up)_proj.*"], ["a.mlp.up_proj"], ["a.mlp.experts.0.up_proj", "a.mlp.down_proj"]),
        (["re:.*self_attn.*", "["], ["a.self_attn.o_proj", "["], ["a.mlp.up_proj"]),
        ([], [], ["lm_head"]),
    ],
    ids=str,
)
def test_names_of_modules(patterns: list[str], inside: list[str], outside: list[str]) -> None:
    modules = Modules(patterns)
    assert [name for name in inside if name not in modules] == []
    assert [name for name in outside if name in modules] == []


def test_settings_of_some_modules(tmp_path: Path) -> None:
    """GPTQModel's `dynamic`: the first pattern that names a module counts, and none is a setting of all."""
    dynamic = {
        "+:.*layers\\.1\\..*down": {"bits": 8, "group_size": 32, "damp_percent": 0.1},
        "-:.*down_proj": {},
        ".*up_proj": {"group_size": 8, "sym": False},
        "-:.*layers\\.0\\.mlp\\.up": {},
    }
    ledger, values = written("llama", {**CONFIGS["gptq"], "desc_act": False, "dynamic": dynamic}, tmp_path)
    assert ledger.findings == ()
    packed = {name: source.packed for name, source in ledger.sources.items() if source.packed is not None}
    found = {name: weight.format.describe() for name, weight in packed.items() if ".ffn." in name}
    assert found == {
        **{f"layers.{layer}.ffn.up.weight": "GPTQ INT4, groups of 8, g_idx" for layer in range(2)},
        **{f"layers.{layer}.ffn.gate.weight": "GPTQ INT4, groups of 16, g_idx" for layer in range(2)},
        "layers.1.ffn.down.weight": "GPTQ INT8, groups of 32, g_idx",
    }
    loaded_is(tmp_path, ledger, values, Mesh(tp=2))


def test_extra_prediction_layers_are_left_out_with_their_scales(tmp_path: Path) -> None:
    config = {**MODELS["deepseek_v3"], "quantization_config": CONFIGS["fp8-blocks"], "num_nextn_predict_layers": 1}
    synthesize(config, tmp_path)
    extra = "model.layers.2.mlp.experts.0.up_proj.weight"
    more = {extra: Tagged("F8_E4M3", np.zeros((16, 16), np.uint8)), f"{extra}_scale_inv": np.ones((1, 1), np.float32)}
    change(tmp_path, lambda held: held.update(more))
    ledger = settle(tmp_path)
    assert ledger.findings == ()
    assert {name: "prediction" in ledger.left_out[name] for name in more} == dict.fromkeys(more, True)


KEYS = """quant_method weight_block_size fmt bits group_size version zero_point config_groups format ignore targets
    weights
    num_bits type strategy block_structure symmetric actorder dynamic quant_algo quantized_layers exclude_modules
    modules_to_not_convert sparsity_config transform_config modules_in_block_to_quantize quantization expert_dtype
    checkpoint_format kv_cache_scheme""".split()
_texts = st.sampled_from(
    [
        *READERS,
        "float",
        "int",
        "group",
        "block",
        "channel",
        "pack-quantized",
        "float-quantized",
        "NVFP4",
        "re:(",
        "re:a{99999999999}",
        "Linear",
    ]
)
_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 130) | st.floats(allow_nan=False) | _texts | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner, max_size=6)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(KEYS), _values, max_size=8), _texts)
@settings(max_examples=300)
def test_any_configuration_is_read_or_refused(options: dict[str, Any], method: str) -> None:
    """Whatever stands in it: a scheme, or one finding; and a scheme answers for any name."""
    try:
        scheme = announced({"quantization_config": {"quant_method": method, **options}})
    except Refused as refused:
        codes = [finding.code for finding in refused.findings]
    else:
        codes = []
    assert codes in ([], ["unsupported-format"], ["config-invalid"])
    if codes:
        return
    for module in ("model.layers.3.mlp.experts.0.up_proj", "lm_head", ""):
        found = scheme.of(module)
        assert found is None or found in scheme.formats
        assert found is None or found.nbytes((256, 256), ((0, 256), (0, 256))) > 0
