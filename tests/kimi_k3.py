"""A tiny random Kimi K3: the release's keys, tensor names, dtypes and packing at toy sizes, and its golden file.

Every parameter matters: norms away from one, router biases away from zero, the attention residuals' scores spread, and
A_log padded behind the heads with zeros, as the release has it. The golden file comes from `tests.reference.kimi_k3`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.reference.kimi_k3 import KimiK3
from tests.reference.mxfp4 import dequantize, quantize

FACTS = Path(__file__).parent.parent / "data" / "models" / "kimi-k3.json"
SPECIAL = ("[BOS]", "[EOS]", "[PAD]", "<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>")
BOS, EOS, PAD, MEDIA_PAD = 0, 1, 2, 6
TEXT: Mapping[str, Any] = {
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "attn_res_block_size": 3,
    "hidden_size": 64,
    "intermediate_size": 128,
    "kv_lora_rank": 32,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_hidden_layers": 6,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "routed_expert_hidden_size": 32,
    "routed_scaling_factor": 1.3,
    "v_head_dim": 16,
    "vocab_size": 512,
}
LINEAR: Mapping[str, Any] = {
    "full_attn_layers": [4, 6],
    "kda_layers": [1, 2, 3, 5],
    "head_dim": 16,
    "num_heads": 4,
}
VISION: Mapping[str, Any] = {
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 8,
    "mm_hidden_size": 32,
    "qkv_hidden_size": 48,
    "text_hidden_size": 64,
    "vt_hidden_size": 32,
    "vt_intermediate_size": 80,
    "vt_num_attention_heads": 2,
    "vt_num_hidden_layers": 2,
}
PREPROCESSOR: Mapping[str, Any] = {
    "auto_map": {
        "AutoImageProcessor": "kimi_k3_vision_processing.KimiK3VisionProcessor",
        "AutoProcessor": "kimi_k3_processor.KimiK3Processor",
    },
    "media_proc_cfg": {
        "in_patch_limit": 64,
        "patch_size": 14,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_kernel_size": 2,
        "fixed_output_tokens": None,
        "patch_limit_on_one_side": 16,
        "transparent_bg_config": {
            "pattern": "chessboard",
            "chessboard_square_size": 8,
            "chessboard_square_on_top_left": True,
            "chessboard_white_value": 255,
            "chessboard_gray_value": 180,
        },
        "transparent_bg_fill_stage": "after_resize",
    },
}
CORPUS = (
    "What animal is in this picture? A cat, two owls and three foxes sit on the wall behind the house.",
    "The capital of France is Paris, and the river through it is the Seine. What does a cow say? It says moo.",
    "Describe the picture in one sentence: a red disc on white, a blue square on black, a green tree in the rain.",
)
CHAT = (
    "{% for message in messages %}{{ message['role'] + ': ' }}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ '<|media_begin|>image<|media_content|><|media_pad|><|media_end|>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '[EOS]' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def tiny_config(text: Mapping[str, Any] = {}, linear: Mapping[str, Any] = {}) -> dict[str, Any]:
    """The release's `config.json` with toy sizes; `text` and `linear` change keys of the text and of its KDA part."""
    config = {key: value for key, value in json.loads(FACTS.read_text()).items() if not key.startswith("_")}
    config |= {key: TEXT[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config["media_placeholder_token_id"] = MEDIA_PAD
    config["text_config"] |= {**TEXT, **text}
    config["text_config"]["linear_attn_config"] |= {**LINEAR, **linear}
    config["vision_config"] |= VISION
    return config


def write_checkpoint(
    home: Path, config: Mapping[str, Any] | None = None, seed: int = 0, shards: int = 4, packed: bool = True
) -> Path:
    """A whole release at toy size in `home`: shards with their index, configuration, tokenizer and processor.

    `packed` False: the twin with the same numbers in bfloat16 and nothing quantized.
    """
    home.mkdir(parents=True, exist_ok=True)
    config = tiny_config() if config is None else config
    torch.manual_seed(seed)
    tensors = dict(draw(config))
    write_side_files(home)
    _speak(tensors["language_model.lm_head.weight"], home)
    if not packed:
        tensors = dict(unpacked(tensors))
        text = {key: value for key, value in config["text_config"].items() if key != "quantization_config"}
        config = {**config, "text_config": text}
    names = list(tensors)
    index: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:06d}.safetensors"
        own = names[number * len(names) // shards : (number + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in own}, home / file, {"format": "pt"})
        index |= dict.fromkeys(own, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    (home / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": index})
    )
    (home / "config.json").write_text(json.dumps(config))
    return home


def draw(config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Random tensors under the release's names, in its dtypes."""
    text, linear = config["text_config"], config["text_config"]["linear_attn_config"]
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    model = "language_model.model"
    yield f"{model}.embed_tokens.weight", (0.5 * torch.randn(vocab, hidden)).bfloat16()
    for index in range(text["num_hidden_layers"]):
        layer = f"{model}.layers.{index}"
        for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            yield f"{layer}.{name}.weight", _around_one(hidden)
        for name in ("self_attention_res_proj", "mlp_res_proj"):
            yield f"{layer}.{name}.weight", _matrix(1, hidden)
        if index + 1 in linear["full_attn_layers"]:
            yield from _latent_attention(f"{layer}.self_attn", text)
        else:
            yield from _delta_attention(f"{layer}.self_attn", linear, hidden)
        if index < text["first_k_dense_replace"]:
            yield from _mlp(f"{layer}.mlp", text["intermediate_size"], hidden)
        else:
            yield from _latent_moe(f"{layer}.block_sparse_moe", text)
    yield f"{model}.norm.weight", _around_one(hidden)
    yield f"{model}.output_attn_res_norm.weight", _around_one(hidden)
    yield f"{model}.output_attn_res_proj.weight", _matrix(1, hidden)
    yield "language_model.lm_head.weight", _matrix(vocab, hidden)
    yield from _vision(config["vision_config"], hidden)


def unpacked(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The same tensors with bfloat16 for MXFP4, which holds all of its numbers exactly."""
    for name, tensor in tensors.items():
        if name.endswith("weight_packed"):
            scale = tensors[name.replace("_packed", "_scale")]
            yield name.removesuffix("_packed"), dequantize(tensor, scale).bfloat16()
        elif not name.endswith("weight_scale"):
            yield name, tensor


def _delta_attention(prefix: str, config: Mapping[str, Any], hidden: int) -> Iterator[tuple[str, Tensor]]:
    heads, dim = config["num_heads"], config["head_dim"]
    width = heads * dim
    for part in "qkvg":
        yield f"{prefix}.{part}_proj.weight", _matrix(width, hidden)
    for part in "qkv":
        yield f"{prefix}.{part}_conv1d.weight", 0.6 * torch.randn(width, 1, config["short_conv_kernel_size"])
    padded = torch.zeros(max(heads, dim))
    padded[:heads] = torch.log(torch.empty(heads).uniform_(1.0, 16.0))
    yield f"{prefix}.A_log", padded
    yield f"{prefix}.dt_bias", 0.3 * torch.randn(width)
    yield f"{prefix}.f_a_proj.weight", _matrix(dim, hidden)
    yield f"{prefix}.f_b_proj.weight", 0.5 * _matrix(width, dim)
    yield f"{prefix}.b_proj.weight", _matrix(heads, hidden)
    yield f"{prefix}.o_norm.weight", _around_one(dim).float()
    yield f"{prefix}.o_proj.weight", _matrix(hidden, width)


def _latent_attention(prefix: str, text: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    heads, hidden = text["num_attention_heads"], text["hidden_size"]
    nope, shared, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
    q_rank, kv_rank = text["q_lora_rank"], text["kv_lora_rank"]
    yield f"{prefix}.q_a_proj.weight", _matrix(q_rank, hidden)
    yield f"{prefix}.q_a_layernorm.weight", _around_one(q_rank)
    yield f"{prefix}.q_b_proj.weight", _matrix(heads * (nope + shared), q_rank)
    yield f"{prefix}.kv_a_proj_with_mqa.weight", _matrix(kv_rank + shared, hidden)
    yield f"{prefix}.kv_a_layernorm.weight", _around_one(kv_rank)
    yield f"{prefix}.kv_b_proj.weight", _matrix(heads * (nope + value), kv_rank)
    if text["mla_use_output_gate"]:
        yield f"{prefix}.g_proj.weight", _matrix(heads * value, hidden)
    yield f"{prefix}.o_proj.weight", _matrix(hidden, heads * value)


def _mlp(prefix: str, width: int, hidden: int) -> Iterator[tuple[str, Tensor]]:
    yield f"{prefix}.gate_proj.weight", _matrix(width, hidden)
    yield f"{prefix}.up_proj.weight", 4.0 * _matrix(width, hidden)  # far enough out for the activation to bend it
    yield f"{prefix}.down_proj.weight", 0.3 * _matrix(hidden, width)


def _latent_moe(prefix: str, text: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    hidden, latent, width = text["hidden_size"], text["routed_expert_hidden_size"], text["moe_intermediate_size"]
    yield f"{prefix}.gate.weight", _matrix(text["num_experts"], hidden)
    yield f"{prefix}.gate.e_score_correction_bias", 0.3 * torch.randn(text["num_experts"])
    yield f"{prefix}.routed_expert_down_proj.weight", _matrix(latent, hidden)
    yield f"{prefix}.routed_expert_up_proj.weight", _matrix(hidden, latent)
    if text["latent_moe_use_norm"]:
        yield f"{prefix}.routed_expert_norm.weight", _around_one(latent)
    yield from _mlp(f"{prefix}.shared_experts", width * text["num_shared_experts"], hidden)
    for expert in range(text["num_experts"]):
        for part, rows, columns in (("w1", width, latent), ("w2", latent, width), ("w3", width, latent)):
            packed, scale = quantize(torch.randn(rows, columns) * 1.5 / columns**0.5)
            yield f"{prefix}.experts.{expert}.{part}.weight_packed", packed
            yield f"{prefix}.experts.{expert}.{part}.weight_scale", scale


def _vision(config: Mapping[str, Any], text_hidden: int) -> Iterator[tuple[str, Tensor]]:
    hidden, width, size = config["vt_hidden_size"], config["vt_intermediate_size"], config["patch_size"]
    merged = hidden * config["merge_kernel_size"][0] * config["merge_kernel_size"][1]
    tower = "vision_tower"
    yield f"{tower}.patch_embed.proj.weight", _matrix(hidden, 3, size, size)
    rows, columns = config["init_pos_emb_height"], config["init_pos_emb_width"]
    yield f"{tower}.patch_embed.pos_emb.weight", (0.5 * torch.randn(rows, columns, hidden)).bfloat16()
    for index in range(config["vt_num_hidden_layers"]):
        block = f"{tower}.encoder.blocks.{index}"
        yield f"{block}.norm0.weight", _around_one(hidden)
        yield f"{block}.norm1.weight", _around_one(hidden)
        yield f"{block}.wqkv.weight", _matrix(3 * config["qkv_hidden_size"], hidden)
        yield f"{block}.wo.weight", _matrix(hidden, config["qkv_hidden_size"])
        yield f"{block}.mlp.fc0.weight", _matrix(width, hidden)
        yield f"{block}.mlp.fc1.weight", _matrix(hidden, width)
    yield f"{tower}.encoder.final_layernorm.weight", _around_one(hidden)
    yield "mm_projector.proj.0.weight", _matrix(merged, merged)
    yield "mm_projector.proj.2.weight", _matrix(text_hidden, merged)
    yield "mm_projector.post_norm.weight", 0.5 * _around_one(text_hidden)


def _speak(head: Tensor, home: Path) -> None:
    """Make what the toy says text, and the toy sure of it: single bytes and ids without a token are never said."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(home / "tokenizer.json"))
    words = [id_ for id_ in range(len(head)) if len((backend.id_to_token(id_) or "").lstrip("Ġ")) > 1]
    sharp = torch.full((len(head), 1), 0.01)
    sharp[[id_ for id_ in words if id_ >= len(SPECIAL)]] = 4.0
    head.mul_(sharp)


def _matrix(*shape: int) -> Tensor:
    fan_in = torch.Size(shape[1:]).numel()
    return (torch.randn(shape) * 1.2 / fan_in**0.5).bfloat16()


def _around_one(size: int) -> Tensor:
    return (1.0 + 0.3 * torch.randn(size)).bfloat16()


def write_side_files(home: Path) -> None:
    """Tokenizer, chat template, processor and generation settings: small, but text and pictures go all the way."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.save(str(home / "tokenizer.json"))
    names = {"bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]"}
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, **names}
    (home / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (home / "chat_template.jinja").write_text(CHAT)
    (home / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    (home / "generation_config.json").write_text(json.dumps({"bos_token_id": BOS, "eos_token_id": EOS}))


def golden_inputs(home: Path, tokens: int = 90, pictures: bool = True, seed: int = 1) -> dict[str, Tensor]:
    """Two sequences, the second shorter; with pictures the first has one, the second two (one of two frames)."""
    config = json.loads((home / "config.json").read_text())
    draw_from = torch.Generator().manual_seed(seed)
    ids = torch.randint(len(SPECIAL), config["text_config"]["vocab_size"], (2, tokens), generator=draw_from)
    mask = torch.ones_like(ids)
    found = {"input_ids": ids, "attention_mask": mask}
    if pictures:
        grids = torch.tensor([[1, 4, 6], [1, 2, 4], [2, 8, 8]])
        patches, size = int(grids.prod(1).sum()), config["vision_config"]["patch_size"]
        found["pixel_values"] = torch.randn(patches, 3, size, size, generator=draw_from)
        found["grid_thws"] = grids
        for row, start, count in ((0, 5, 6), (1, 2, 2), (1, 10, 16)):
            ids[row, start : start + count] = config["media_placeholder_token_id"]
    short = tokens // 4
    ids[1, -short:], mask[1, -short:] = PAD, 0
    return found


def write_golden(home: Path, path: Path, steps: int = 4, **inputs: Any) -> Path:
    """The golden file of a checkpoint of this module, by the independent reference."""
    given = golden_inputs(home, **inputs)
    with torch.inference_mode():
        found = KimiK3.open(home).run(given, generate=steps)
    save_file({name: tensor.contiguous() for name, tensor in {**given, **found}.items()}, path)
    return path
