"""The account of quantized checkpoints: refused by name, scales paired with what they belong to."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.parallel.hardware import parse_cluster
from firstlight.engine.weights.accounts.gaps import MOST_NAMED
from firstlight.engine.weights.accounts.wire import ledger_of, plain
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.files.safetensors_file import Tensor, read
from firstlight.engine.weights.formats.announced import announced
from firstlight.engine.weights.formats.registry import stored_format
from firstlight.engine.weights.ledger import account
from firstlight.engine.weights.packed import part_names
from firstlight.engine.weights.packing import pack
from firstlight.engine.weights.synthesize import synthesize
from firstlight.workbench.plan import plan
from tests.engine.weights.accounts import fatal, one, quantize, settle
from tests.engine.weights.files import LLAMA
from tests.engine.weights.quantized import CONFIGS, compressed
from tests.engine.weights.quantized import quantize as quantized_copies


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    synthesize(LLAMA, tmp_path)
    return tmp_path


def test_a_quantized_checkpoint_is_refused_by_name(llama: Path) -> None:
    found = fatal(settle(llama, quantize))
    assert {finding.code for finding in found} == {"unsupported-format"}
    assert found[0].message.startswith(
        "14 tensors are stored as F8_E4M3, and config.json does not say how to read that"
    )
    assert len(found) == 2, "the weights together, and the scales"


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


@pytest.mark.parametrize("name", ["packed-int4", "mxfp4", "nvfp4", "awq", "gptq"])
def test_codes_that_nothing_announces_are_one_finding(name: str, tmp_path: Path) -> None:
    """Told by their names; scales, zero points and shapes go with them, and no parameter is called missing as well."""
    synthesize({**LLAMA, "hidden_size": 32, "intermediate_size": 64, "quantization_config": CONFIGS[name]}, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    finding = one(settle(tmp_path))
    assert finding.code == "unsupported-format"
    assert "14 weights are stored as codes with scales" in finding.message
    assert "is not guessed" in str(finding.next)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_ledger_of_quantized_weights_comes_back_as_it_went(name: str, tmp_path: Path) -> None:
    """With all that a format has of its own, by which weights would be unpacked."""
    quantized = CONFIGS[name]
    synthesize({**LLAMA, "hidden_size": 32, "intermediate_size": 64, "quantization_config": quantized}, tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    ledger = account(checkpoint, *FAMILIES.describe(checkpoint.config))
    assert any(source.packed is not None for source in ledger.sources.values())
    assert ledger_of(msgspec.json.encode(ledger, enc_hook=plain)) == ledger


def test_a_scale_beside_a_plain_tensor_of_a_quantized_checkpoint(tmp_path: Path) -> None:
    synthesize({**LLAMA, "quantization_config": CONFIGS["fp8-blocks"]}, tmp_path)
    name = "model.norm.weight_scale"
    finding = one(settle(tmp_path, lambda tensors: tensors.update({name: np.ones(1, np.float32)})))
    assert (finding.code, finding.tensors) == ("unpaired-scale", (name,))


@pytest.fixture
def two_shards(tmp_path: Path) -> Path:
    """A quantized toy in two shards: FP8 weights with their scales, and a configuration that says so."""
    config = {**LLAMA, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    synthesize(config, tmp_path, shards=2)
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


@pytest.mark.parametrize(("form", "more", "is_fine"), [("awq", 32, True), ("gptq", 3, True), ("awq", 1000, False)])
def test_rows_behind_the_vocabulary_of_a_head_in_words(form: str, more: int, is_fine: bool, tmp_path: Path) -> None:
    """The first stored tensor has its rows in words, along another dim: what counts are the rows of the weight."""
    scheme = {**CONFIGS[form], "lm_head": True}
    config = {**LLAMA, "hidden_size": 32, "intermediate_size": 64, "quantization_config": scheme}
    synthesize(config, tmp_path)
    vocabulary = json.loads((tmp_path / "config.json").read_text())["vocab_size"]
    format_ = announced({"quantization_config": scheme}).formats[0]
    weight = np.random.default_rng(0).standard_normal((vocabulary + more, 32)).astype(np.float32)
    parts, _ = pack(weight, format_)

    def head(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("lm_head")]:
            del tensors[name]
        for part in format_.parts:
            tensors[part_names("lm_head.weight", part)[0]] = parts[part.role]

    ledger = settle(tmp_path, head)
    (finding,) = [one for one in ledger.findings if "lm_head.qweight" in one.tensors]
    assert f"rows {vocabulary} to {vocabulary + more - 1} of {vocabulary + more}" in finding.message
    assert (finding.code, finding.severity) == (("padded-tensor", "note") if is_fine else ("shape-mismatch", "fatal"))
    assert ledger.complete == is_fine
    source = ledger.sources["head.weight"]
    assert source.packed is not None
    assert source.region == ((0, vocabulary, 1), (0, 32, 1))


def test_many_kinds_of_strangers_are_few_findings(tmp_path: Path) -> None:
    """Each kind has its finding up to a number, the others one together; nothing is left out of the account."""
    synthesize(LLAMA, tmp_path)
    names = [f"stranger{chr(97 + i % 26)}{chr(97 + i // 26)}.weight" for i in range(MOST_NAMED + 50)]
    ledger = settle(tmp_path, lambda tensors: tensors.update({name: np.ones(2, np.float32) for name in names}))
    found = fatal(ledger)
    assert {one.code for one in found} == {"unconsumed-tensor"}
    assert len(found) == MOST_NAMED + 1
    assert found[-1].message.startswith("50 kinds more")
    assert sorted(name for one in found for name in one.tensors) == sorted(names) == sorted(ledger.unconsumed)


PARTS_OF = {  # what only one tool writes in place of a weight -> the tool
    "weight._data weight._scale input_scale output_scale": "optimum-quanto",
    "_weight_qdata _weight_scale": "torchao",
    "weight weight.absmax weight.quant_map weight.quant_state.bitsandbytes__nf4": "bitsandbytes",
    "weight SCB weight_format": "bitsandbytes",
    "W_q scale zero": "HQQ or SINQ",
    "codebooks codes scales": "AQLM",
    "indices centroids.weight": "VPTQ",
    "weight tables tables2 scales": "HIGGS",
    "dense_weights row_offsets col_vals": "SpQR",
    "weight scales biases": "MLX",
    "compressed bitmask shape row_offsets": "compressed-tensors",
}


@pytest.mark.parametrize("parts", PARTS_OF)
def test_a_tool_that_the_configuration_does_not_name_is_told_by_what_it_wrote(parts: str, llama: Path) -> None:
    up = "model.layers.0.mlp.up_proj."
    codes = {up + part: np.zeros((4, 4), np.uint8) for part in parts.split()}

    def rewrite(held: dict[str, Tensor]) -> None:
        del held[up + "weight"]
        held.update(codes)

    (cause,) = fatal(settle(llama, rewrite))
    assert cause.code == "unsupported-format"
    assert f"as {PARTS_OF[parts]} writes them" in cause.message
    assert "plain copy" in str(cause.next)


def test_the_file_that_optimum_quanto_leaves_is_a_refusal_of_scan_and_plan(llama: Path) -> None:
    (llama / "quanto_qmap.json").write_text("{}")
    (cause,) = settle(llama).findings
    assert (cause.severity, cause.code, cause.file) == ("fatal", "unsupported-format", "quanto_qmap.json")
    with pytest.raises(Refused, match="optimum-quanto"):
        plan(llama, parse_cluster("1xH200"))


def test_mlx_says_it_under_a_key_of_its_own() -> None:
    with pytest.raises(Refused, match="Apple's MLX"):
        announced({"quantization": {"group_size": 64, "bits": 4}})


INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": ["fp8"]},
        {"quant_method": "gptq", "bits": 4, "sym": "yes"},
        {"quant_method": "gptq", "bits": 4, "desc_act": 7},
        {"quant_method": "awq", "bits": 4, "lm_head": [1]},
        {"quant_method": "compressed-tensors", "config_groups": "big"},
        {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": 5}},
        {**compressed("int-quantized", **INT8), "sparsity_config": "dense"},
        compressed("int-quantized", **{**INT8, "symmetric": "7"}),
        compressed("int-quantized", **{**INT8, "type": 5}),
        compressed("pack-quantized", **{**INT8, "strategy": "group", "group_size": -7}),
        compressed("mxfp4-pack-quantized", **{**FP4, "num_bits": 8}),
        compressed("nvfp4-pack-quantized", **FP4),
    ],
    ids=str,
)
def test_no_option_of_a_quantization_is_taken_for_what_it_does_not_say(quantization: Mapping[str, Any]) -> None:
    with pytest.raises(Refused) as caught:
        announced({"quantization_config": quantization})
    (finding,) = caught.value.findings
    assert finding.code in ("config-invalid", "unsupported-format")
    assert finding.expected
    assert finding.found


@pytest.mark.parametrize("form", ["awq", "gptq"])
def test_words_of_a_weight_that_the_architecture_turns_round(
    form: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """GPT-2's are [inputs, outputs]: of its square ones no shape says which way the codes lie."""
    quantized_copies(checkpoint("gpt2"), CONFIGS[form], tmp_path / "packed", tmp_path / "plain")
    opened = Checkpoint.open(tmp_path / "packed")
    ledger = account(opened, *FAMILIES.describe(opened.config))
    refused = [finding for finding in ledger.findings if finding.code == "unsupported-format"]
    assert any("mixer.o.weight turned round" in finding.message for finding in refused)


@pytest.mark.parametrize(
    ("kept", "are_alike"),
    [
        ("transformer.h.3.mlp", False),
        ("*layers.3*", False),
        ("model.layers.4.mlp|model.layers.3.mlp", False),
        ("model.layers.0003.mlp", True),
        ("model.layers.18446744073709551619.mlp", True),
        ("lm_head", True),
    ],
)
def test_layers_that_a_configuration_tells_apart_are_planned_apart(kept: str, are_alike: bool) -> None:
    method = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": [kept]}
    stored = stored_format({"quantization_config": method}, "BF16")
    assert (stored.layer_key(2) == stored.layer_key(3)) == are_alike
