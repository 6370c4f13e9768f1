"""Whole models in every storage format: accounted for, read by every rank, equal to what their tensors stand for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from firstlight.engine.errors import Refused
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.parallel.pieces import rank_pieces
from firstlight.engine.parallel.placement import localize
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.files.safetensors_file import Tensor, read, write
from firstlight.engine.weights.formats.announced import announced
from firstlight.engine.weights.formats.packed_int import PackedInt
from firstlight.engine.weights.ledger import Ledger, account
from firstlight.engine.weights.loader import load
from firstlight.engine.weights.loading import placing
from firstlight.engine.weights.synthesize import Values, synthesize
from tests.checkpoints import TINY
from tests.engine.weights.quantized import CONFIGS, compressed

WIDE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 48,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**TINY["llama"].config, **WIDE},
    "qwen3_moe": {**TINY["qwen3_moe"].config, **WIDE, "mlp_only_layers": [1], "num_experts": 4},
    "deepseek_v3": {**TINY["deepseek_v3"].config, **WIDE, "q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 8},
    "gpt_oss": {
        **{key: value for key, value in TINY["llama"].config.items() if key != "rope_parameters"},
        **WIDE,
        "model_type": "gpt_oss",
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
    },
}
MESHES = (Mesh(), Mesh(tp=2), Mesh(ep=2), Mesh(tp=4, ep=2), Mesh(pp=2, tp=2))


def written(model: str, quantization: Mapping[str, Any], home: Path, **more: Any) -> tuple[Ledger, Values]:
    """The account of a synthetic checkpoint, and the values that its tensors stand for."""
    config = {**MODELS[model], "quantization_config": dict(quantization)}
    values = synthesize(config, home, dtype="BF16", **more)
    return settle(home), values


def settle(home: Path) -> Ledger:
    checkpoint = Checkpoint.open(home)
    return account(checkpoint, *FAMILIES.describe(checkpoint.config))


def loaded_is(home: Path, ledger: Ledger, values: Values, mesh: Mesh, dtype: str = "F32") -> None:
    """Every rank of a mesh holds its part of the values, rounded once."""
    checkpoint = Checkpoint.open(home)
    spec, _ = FAMILIES.describe(checkpoint.config)
    for rank in range(mesh.world_size):
        weights = load(checkpoint, rank_pieces(spec, mesh, rank, dtype, ledger))
        assert weights.bytes_read >= weights.bytes_needed
        seen = 0
        for param in spec.parameters():
            if param.name not in weights.params:
                continue
            local = localize(param.shape, param.placements, mesh, mesh.coordinates(rank))
            assert local is not None
            part = values[param.name][tuple(slice(*bounds) for bounds in local.bounds)]
            found = weights.params[param.name]
            expected = torch.from_numpy(np.ascontiguousarray(part)).to(found.dtype)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=lambda m, p=param: f"{p.name}: {m}")
            seen += 1
        assert seen == len(weights.params) > 8


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_every_format_under_every_mesh(model: str, name: str, tmp_path: Path) -> None:
    """tp 4 cuts 96 channels into 24: inside the blocks, groups and words of most formats."""
    ledger, values = written(model, CONFIGS[name], tmp_path)
    assert ledger.findings == ()
    assert ledger.summary()["tensors_unconsumed"] == 0
    packed = {source.packed.name for source in ledger.sources.values() if source.packed is not None}
    assert len(packed) >= 14, "all projections are quantized"
    for source in ledger.sources.values():
        for tensor in source.packed.tensors if source.packed is not None else ():
            assert ledger.consumed[tensor.name], "scales and the like are consumed by the parameter that they serve"
    for mesh in MESHES if model == "qwen3_moe" else (Mesh(tp=2), Mesh(pp=2)):
        loaded_is(tmp_path, ledger, values, mesh)


@pytest.mark.parametrize("name", ["fp8-blocks", "packed-ordered", "mxfp4", "awq"])
def test_latent_attention_and_shared_experts(name: str, tmp_path: Path) -> None:
    ledger, values = written("deepseek_v3", CONFIGS[name], tmp_path, shards=3)
    assert ledger.findings == ()
    loaded_is(tmp_path, ledger, values, Mesh(tp=2, ep=2))


def test_experts_in_blocks_as_gpt_oss_has_them(tmp_path: Path) -> None:
    """Stacked, gate and up in turns, inputs before outputs: of each only what a rank needs."""
    ledger, values = written(
        "gpt_oss",
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
        tmp_path,
    )
    assert ledger.findings == ()
    gate = ledger.sources["layers.0.ffn.experts.1.gate.weight"]
    assert gate.packed is not None
    assert [tensor.name.rsplit(".", 1)[1] for tensor in gate.packed.tensors] == [
        "gate_up_proj_blocks",
        "gate_up_proj_scales",
    ]
    assert gate.region[1][2] == 2
    for mesh in (Mesh(), Mesh(tp=2), Mesh(ep=2), Mesh(tp=2, ep=4)):
        loaded_is(tmp_path, ledger, values, mesh)


@pytest.mark.parametrize(
    ("model", "block"), [("gpt_oss", "mlp"), ("mixtral", "block_sparse_moe"), ("lfm2_moe", "feed_forward")]
)
def test_experts_that_exporters_take_apart_under_names_of_their_own(model: str, block: str) -> None:
    """llm-compressor's `linearize_moe`: whatever the release calls them, `gate_proj`, `up_proj` and `down_proj`."""
    config = MODELS[model] if model in MODELS else TINY[model].config
    _, matcher = FAMILIES.describe(config)
    for part in ("gate", "up", "down"):
        match = matcher.match(f"model.layers.1.{block}.experts.3.{part}_proj.weight")
        assert match is not None
        assert match.params == (f"layers.1.ffn.experts.3.{part}.weight",)


@pytest.mark.parametrize("name", ["fp8-blocks", "float-channel", "packed-int4", "nvfp4", "mxfp4"])
def test_experts_stored_stacked(name: str, tmp_path: Path) -> None:
    """`experts.gate_up_proj` with `experts.gate_up_proj_scale_inv` and the like."""
    ledger, values = written("qwen3_moe", CONFIGS[name], tmp_path, fused=True)
    assert ledger.findings == ()
    assert ledger.sources["layers.0.ffn.experts.3.up.weight"].packed is not None
    for mesh in (Mesh(), Mesh(tp=4, ep=2)):
        loaded_is(tmp_path, ledger, values, mesh)


@pytest.mark.parametrize("name", ["fp8-blocks", "packed-ordered", "awq", "gptq", "nvfp4"])
def test_piece_by_piece_through_little_staging_memory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, values = written("llama", CONFIGS[name], tmp_path)
    monkeypatch.setattr(placing, "STAGING_BYTES", 2000)
    loaded_is(tmp_path, ledger, values, Mesh(tp=2))


def test_the_runs_dtype_is_rounded_to_once(tmp_path: Path) -> None:
    ledger, values = written("llama", CONFIGS["packed-int4"], tmp_path)
    loaded_is(tmp_path, ledger, values, Mesh(tp=2), dtype="BF16")


@pytest.mark.parametrize("where", ["text_config", "compression_config"])
def test_the_configuration_may_stand_elsewhere(where: str, tmp_path: Path) -> None:
    _, values = written("llama", CONFIGS["packed-int4"], tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    said = raw.pop("quantization_config")
    raw.update({"text_config": {"quantization_config": said}} if where == "text_config" else {where: said})
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ledger = settle(tmp_path)
    assert not [finding for finding in ledger.findings if finding.severity == "fatal"]
    loaded_is(tmp_path, ledger, values, Mesh())


def test_modelopt_says_it_beside_the_configuration(tmp_path: Path) -> None:
    """`hf_quant_config.json`, as its older exports have it, with FP8 scales of the cache."""
    _, values = written("llama", CONFIGS["nvfp4-modelopt"], tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    beside = {
        "producer": {"name": "modelopt", "version": "0.33"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "group_size": 16,
            "exclude_modules": ["lm_head"],
        },
    }
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    change(tmp_path, lambda held: held.update({"model.layers.0.self_attn.k_proj.k_scale": np.float32(0.5).reshape(())}))
    ledger = settle(tmp_path)
    assert ledger.findings == ()
    assert "cache" in ledger.left_out["model.layers.0.self_attn.k_proj.k_scale"]
    loaded_is(tmp_path, ledger, values, Mesh(tp=2))


def change(home: Path, edit: Any) -> None:
    held: dict[str, Tensor] = read(home / "model.safetensors")
    edit(held)
    write(home / "model.safetensors", held)


def test_inputs_that_are_no_whole_words(tmp_path: Path) -> None:
    """36 inputs in words of eight: `weight_shape` says how many there are, and is held against the model."""
    config = {**MODELS["llama"], "hidden_size": 36, "quantization_config": CONFIGS["packed-int4"]}
    values = synthesize(config, tmp_path)
    ledger = settle(tmp_path)
    assert ledger.findings == ()
    loaded_is(tmp_path, ledger, values, Mesh(tp=2))
    change(
        tmp_path, lambda held: held.update({"model.layers.1.mlp.up_proj.weight_shape": np.array([96, 37], np.int32)})
    )
    with pytest.raises(Refused, match="weight_shape does not fit") as caught:
        loaded_is(tmp_path, settle(tmp_path), values, Mesh())
    (finding,) = caught.value.findings
    assert (finding.code, finding.expected, finding.found) == ("shape-mismatch", "[96, 36]", "[96, 37]")


def test_a_shape_beside_codes_that_stay_packed_is_held_as_well(tmp_path: Path) -> None:
    written("qwen3_moe", CONFIGS["packed-int4"], tmp_path)
    spec, _ = FAMILIES.describe(Checkpoint.open(tmp_path).config)
    name = "model.layers.0.mlp.experts.1.up_proj.weight_shape"

    def kept() -> None:
        pieces = rank_pieces(spec, Mesh(), 0, "F32", settle(tmp_path), keep_packed=("expert",))
        assert load(Checkpoint.open(tmp_path), pieces).pieces.packings

    kept()
    change(tmp_path, lambda held: held.update({name: np.array([32, 65], np.int32)}))
    with pytest.raises(Refused, match=f"{name} does not fit"):
        kept()


def test_embeddings_may_have_a_format_of_their_own() -> None:
    """A class of modules that is no linear one: its format is not that of all others."""
    quantization = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=8)
    embeddings = {"targets": ["Embedding"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
    quantization["config_groups"] = {"a": embeddings, **quantization["config_groups"]}
    scheme = announced({"quantization_config": quantization})
    found = {name: scheme.of(name) for name in ("model.embed_tokens", "model.layers.0.mlp.up_proj", "lm_head")}
    bits = {name: format_.bits if isinstance(format_, PackedInt) else None for name, format_ in found.items()}
    assert bits == {"model.embed_tokens": 8, "model.layers.0.mlp.up_proj": 4, "lm_head": None}


def test_several_formats_in_one_checkpoint(tmp_path: Path) -> None:
    """Attention in FP8, experts in INT4, each group with a layout of its own."""
    mixed = compressed("mixed-precision", num_bits=4)
    mixed["config_groups"] = {
        "attention": {
            "targets": ["re:.*self_attn.*"],
            "format": "float-quantized",
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        },
        "experts": {
            "targets": [r"re:.*experts\.\d+\..*"],
            "format": "pack-quantized",
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8},
        },
    }
    ledger, values = written("qwen3_moe", mixed, tmp_path)
    assert ledger.findings == ()
    labels = {name: source.packed.format.label for name, source in ledger.sources.items() if source.packed}
    assert labels["layers.0.mixer.q.weight"] == "FP8"
    assert labels["layers.0.ffn.experts.0.gate.weight"] == "packed INT"
    assert "layers.1.ffn.gate.weight" not in labels, "the dense layer is in no group"
    loaded_is(tmp_path, ledger, values, Mesh(tp=2, ep=2))


@pytest.mark.parametrize(("intermediate", "mesh"), [(192, Mesh()), (384, Mesh(tp=4))], ids=["partial", "cut"])
def test_blocks_of_128(intermediate: int, mesh: Mesh, tmp_path: Path) -> None:
    """[192, 256] has 2 x 2 scales, the last of partial blocks; 384 channels over 4 ranks end inside blocks."""
    sizes = {"hidden_size": 256, "intermediate_size": intermediate, "num_key_value_heads": 4, "num_hidden_layers": 1}
    config = {
        **MODELS["llama"],
        **sizes,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    values = synthesize(config, tmp_path)
    ledger = settle(tmp_path)
    assert ledger.findings == ()
    packed = ledger.sources["layers.0.ffn.gate.weight"].packed
    assert packed is not None
    assert packed.tensors[1].shape == (-(-intermediate // 128), 2)
    loaded_is(tmp_path, ledger, values, mesh)


def test_a_scale_that_the_index_does_not_list_is_used_all_the_same(tmp_path: Path) -> None:
    """Headers are the truth: said, and read; never a scale of one in its place."""
    _, values = written("llama", CONFIGS["fp8-blocks"], tmp_path, shards=2)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    scale = "model.layers.0.mlp.up_proj.weight_scale_inv"
    del index["weight_map"][scale]
    path.write_text(json.dumps(index))
    found = [(finding.code, finding.severity, finding.tensors) for finding in Checkpoint.open(tmp_path).findings]
    assert ("unlisted-tensor", "warning", (scale,)) in found
    ledger = settle(tmp_path)
    assert ledger.complete
    loaded_is(tmp_path, ledger, values, Mesh(tp=2))
