"""Whole releases as sparse files: real names, shapes, dtypes and index, headers only, a few megabytes on the disk."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from firstlight.engine.weights.files.header import DTYPE_BITS

Stored = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


def write_release(home: Path, config: Mapping[str, Any], tensors: Iterable[Stored], shards: int) -> Path:
    """A checkpoint directory of `shards` files of about equal size, in the order given, and its index.

    The files are as long as their headers say and hold nothing else, so reading a weight gives zeros.
    """
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.json").write_text(json.dumps(config))
    listed = list(tensors)
    sizes = [math.prod(shape) * DTYPE_BITS[dtype] // 8 for _, dtype, shape in listed]
    total, weight_map, start, passed = sum(sizes), {}, 0, 0
    for number in range(1, shards + 1):
        stop = start
        while stop < len(listed) and (number == shards or passed < total * number / shards):
            passed += sizes[stop]
            stop += 1
        file = f"model-{number:05}-of-{shards:06}.safetensors"
        _write_shard(home / file, listed[start:stop], sizes[start:stop])
        weight_map.update(dict.fromkeys((name for name, _, _ in listed[start:stop]), file))
        start = stop
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (home / "model.safetensors.index.json").write_bytes(msgspec.json.encode(index))
    return home


def _write_shard(path: Path, tensors: list[Stored], sizes: list[int]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for (name, dtype, shape), nbytes in zip(tensors, sizes, strict=True):
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (end, end + nbytes)}
        end += nbytes
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)


def shipped_config(name: str) -> dict[str, Any]:
    """A configuration of data/models, without the keys that say where it was found."""
    raw = json.loads(resources.files("firstlight.data").joinpath(f"models/{name}.json").read_text())
    return {key: value for key, value in raw.items() if not key.startswith("_")}


def kimi_k3(home: Path) -> Path:
    """Kimi K3 as released: 497,220 tensors in 96 shards, 1.56 TB."""
    config = shipped_config("kimi-k3")
    return write_release(home, config, kimi_k3_tensors(config), 96)


def kimi_k3_tensors(config: Mapping[str, Any]) -> Iterator[Stored]:
    """Every tensor of a Kimi K3 checkpoint in layer order. Source: its published layout, see docs of the family."""
    text, vision = config["text_config"], config["vision_config"]
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    model = "language_model.model."
    yield model + "embed_tokens.weight", "BF16", (vocab, hidden)
    full = {number - 1 for number in text["linear_attn_config"]["full_attn_layers"]}
    for layer in range(text["num_hidden_layers"]):
        prefix = f"{model}layers.{layer}."
        for part in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            yield f"{prefix}{part}.weight", "BF16", (hidden,)
        for part in ("self_attention_res_proj", "mlp_res_proj"):
            yield f"{prefix}{part}.weight", "BF16", (1, hidden)
        mixer = _mla(text) if layer in full else _kda(text)
        yield from ((f"{prefix}self_attn.{name}", dtype, shape) for name, dtype, shape in mixer)
        if layer < text["first_k_dense_replace"]:
            yield from _gated(f"{prefix}mlp.", hidden, text["intermediate_size"])
        else:
            yield from ((f"{prefix}block_sparse_moe.{name}", dtype, shape) for name, dtype, shape in _latent_moe(text))
    yield model + "norm.weight", "BF16", (hidden,)
    yield model + "output_attn_res_norm.weight", "BF16", (hidden,)
    yield model + "output_attn_res_proj.weight", "BF16", (1, hidden)
    yield "language_model.lm_head.weight", "BF16", (vocab, hidden)
    yield from _moonvit(vision, hidden)


def _gated(prefix: str, hidden: int, wide: int) -> Iterator[Stored]:
    for part in ("gate", "up"):
        yield f"{prefix}{part}_proj.weight", "BF16", (wide, hidden)
    yield f"{prefix}down_proj.weight", "BF16", (hidden, wide)


def _kda(text: Mapping[str, Any]) -> Iterator[Stored]:
    linear, hidden = text["linear_attn_config"], text["hidden_size"]
    heads, dim = linear["num_heads"], linear["head_dim"]
    wide = heads * dim
    for part in "qkvg":
        yield f"{part}_proj.weight", "BF16", (wide, hidden)
    for part in "qkv":
        yield f"{part}_conv1d.weight", "F32", (wide, 1, linear["short_conv_kernel_size"])
    yield "A_log", "F32", (max(dim, heads),)
    yield "dt_bias", "F32", (wide,)
    yield "f_a_proj.weight", "BF16", (dim, hidden)
    yield "f_b_proj.weight", "BF16", (wide, dim)
    yield "b_proj.weight", "BF16", (heads, hidden)
    yield "o_norm.weight", "F32", (dim,)
    yield "o_proj.weight", "BF16", (hidden, wide)


def _mla(text: Mapping[str, Any]) -> Iterator[Stored]:
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    nope, rope, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
    q_rank, kv_rank = text["q_lora_rank"], text["kv_lora_rank"]
    yield "q_a_proj.weight", "BF16", (q_rank, hidden)
    yield "q_a_layernorm.weight", "BF16", (q_rank,)
    yield "q_b_proj.weight", "BF16", (heads * (nope + rope), q_rank)
    yield "kv_a_proj_with_mqa.weight", "BF16", (kv_rank + rope, hidden)
    yield "kv_a_layernorm.weight", "BF16", (kv_rank,)
    yield "kv_b_proj.weight", "BF16", (heads * (nope + value), kv_rank)
    yield "g_proj.weight", "BF16", (heads * value, hidden)
    yield "o_proj.weight", "BF16", (hidden, heads * value)


def _latent_moe(text: Mapping[str, Any]) -> Iterator[Stored]:
    hidden, experts, latent = text["hidden_size"], text["num_experts"], text["routed_expert_hidden_size"]
    wide = text["moe_intermediate_size"]
    yield "gate.weight", "BF16", (experts, hidden)
    yield "gate.e_score_correction_bias", "F32", (experts,)
    yield "routed_expert_down_proj.weight", "BF16", (latent, hidden)
    yield "routed_expert_up_proj.weight", "BF16", (hidden, latent)
    yield "routed_expert_norm.weight", "BF16", (latent,)
    yield from _gated("shared_experts.", hidden, wide * text["num_shared_experts"])
    for expert in range(experts):
        for part, rows, columns in (("w1", wide, latent), ("w2", latent, wide), ("w3", wide, latent)):
            yield f"experts.{expert}.{part}.weight_packed", "U8", (rows, columns // 2)
            yield f"experts.{expert}.{part}.weight_scale", "U8", (rows, columns // 32)


def _moonvit(vision: Mapping[str, Any], hidden: int) -> Iterator[Stored]:
    tower, wide, blocks = "vision_tower.", vision["vt_hidden_size"], vision["vt_num_hidden_layers"]
    fed, qkv = vision["vt_intermediate_size"], 3 * vision["qkv_hidden_size"]
    yield tower + "patch_embed.proj.weight", "BF16", (wide, 3, vision["patch_size"], vision["patch_size"])
    places = (vision["init_pos_emb_height"], vision["init_pos_emb_width"], wide)
    yield tower + "patch_embed.pos_emb.weight", "BF16", places
    for block in range(blocks):
        prefix = f"{tower}encoder.blocks.{block}."
        for part, shape in (
            ("norm0", (wide,)),
            ("norm1", (wide,)),
            ("wqkv", (qkv, wide)),
            ("wo", (wide, qkv // 3)),
            ("mlp.fc0", (fed, wide)),
            ("mlp.fc1", (wide, fed)),
        ):
            yield f"{prefix}{part}.weight", "BF16", shape
    yield tower + "encoder.final_layernorm.weight", "BF16", (wide,)
    merged = math.prod(vision["merge_kernel_size"]) * wide
    yield "mm_projector.proj.0.weight", "BF16", (merged, merged)
    yield "mm_projector.proj.2.weight", "BF16", (hidden, merged)
    yield "mm_projector.post_norm.weight", "BF16", (hidden,)
