"""Tiny vision-language models as raw configurations, of every kind of tower, merger and position.

Grids and pictures are given with them: of several sizes, tall and wide, so that windows, kernels and sections matter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.checkpoints import quiet, randomize

VOCAB = 131
IMAGE_TOKEN = 125

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _mrope(sections: list[int], theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, "mrope_section": sections, **more}}


def _tokens(**more: int) -> dict[str, int]:
    return {"image_token_id": IMAGE_TOKEN, "video_token_id": 126, "vision_start_token_id": 127, **more}


QWEN_VISION = {
    "depth": 3,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
QWEN2_VL = {
    "model_type": "qwen2_vl",
    "text_config": {"model_type": "qwen2_vl_text", **TEXT, **_mrope([1, 1, 2]), "use_sliding_window": False},
    "vision_config": {
        "model_type": "qwen2_vl_vision",
        **QWEN_VISION,
        "embed_dim": 24,
        "hidden_size": 32,
        "mlp_ratio": 2,
    },
    **_tokens(vision_end_token_id=128),
}
QWEN2_5_VL = {
    "model_type": "qwen2_5_vl",
    "text_config": {"model_type": "qwen2_5_vl_text", **TEXT, **_mrope([2, 1, 1]), "use_sliding_window": False},
    "vision_config": {
        "model_type": "qwen2_5_vl_vision",
        **QWEN_VISION,
        "hidden_size": 24,
        "intermediate_size": 36,
        "out_hidden_size": 32,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    **_tokens(vision_end_token_id=128),
}
QWEN3_VISION = {
    **QWEN_VISION,
    "hidden_size": 24,
    "intermediate_size": 40,
    "out_hidden_size": 32,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
}
QWEN3_VL = {
    "model_type": "qwen3_vl",
    "text_config": {
        "model_type": "qwen3_vl_text",
        **TEXT,
        "head_dim": 12,
        **_mrope([2, 2, 2], 500000.0, mrope_interleaved=True),
    },
    "vision_config": {"model_type": "qwen3_vl_vision", **QWEN3_VISION},
    **_tokens(vision_end_token_id=128),
}
MOE = {
    "moe_intermediate_size": 20,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
QWEN3_VL_MOE = {
    **QWEN3_VL,
    "model_type": "qwen3_vl_moe",
    "text_config": {**QWEN3_VL["text_config"], "model_type": "qwen3_vl_moe_text", **MOE},  # type: ignore[dict-item]
    "vision_config": {"model_type": "qwen3_vl_moe_vision", **QWEN3_VISION, "deepstack_visual_indexes": [2, 0]},
}
GLM_VISION = {
    **QWEN_VISION,
    "hidden_size": 24,
    "intermediate_size": 40,
    "out_hidden_size": 32,
    "image_size": 20,
    "attention_bias": False,
}
GLM4V = {
    "model_type": "glm4v",
    "text_config": {
        "model_type": "glm4v_text",
        **TEXT,
        **_mrope([1, 1, 0], partial_rotary_factor=0.5),
    },
    "vision_config": {"model_type": "glm4v_vision", **GLM_VISION},
    **_tokens(image_start_token_id=127, image_end_token_id=128),
}
GLM4V_MOE = {
    "model_type": "glm4v_moe",
    "text_config": {
        "model_type": "glm4v_moe_text",
        **TEXT,
        "head_dim": 16,
        **_mrope([2, 1, 1], partial_rotary_factor=0.5),
        "moe_intermediate_size": 20,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "attention_bias": True,
        "use_qk_norm": False,
    },
    "vision_config": {"model_type": "glm4v_moe_vision", **GLM_VISION, "attention_bias": True},
    **_tokens(image_start_token_id=127, image_end_token_id=128),
}
SIGLIP = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 4,
}
GEMMA3 = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        **TEXT,
        "head_dim": 12,
        "query_pre_attn_scalar": 20,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_hidden_layers": 3,
    },
    "vision_config": {"model_type": "siglip_vision_model", **SIGLIP, "vision_use_head": False},
    "mm_tokens_per_image": 9,
    "image_token_index": IMAGE_TOKEN,
    "boi_token_index": 126,
    "eoi_token_index": 127,
}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 4,
    "hidden_act": "gelu",
}
MISTRAL3 = {
    "model_type": "mistral3",
    "text_config": {"model_type": "mistral", **TEXT, "head_dim": 8, "sliding_window": None},
    "vision_config": PIXTRAL,
    "image_token_index": IMAGE_TOKEN,
    "spatial_merge_size": 2,
    "vision_feature_layer": -1,
    "tie_word_embeddings": False,
}
LLAVA_PIXTRAL = {
    "model_type": "llava",
    "text_config": {"model_type": "mistral", **TEXT, "head_dim": 8, "sliding_window": None},
    "vision_config": PIXTRAL,
    "image_token_index": IMAGE_TOKEN,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "tie_word_embeddings": False,
}
INTERNVL = {
    "model_type": "internvl",
    "text_config": {"model_type": "qwen2", **TEXT, "use_sliding_window": False},
    "vision_config": {
        "model_type": "internvl_vision",
        **SIGLIP,
        "image_size": [16, 16],
        "patch_size": [4, 4],
        "use_qk_norm": True,
        "attention_bias": True,
        "norm_type": "layer_norm",
    },
    "image_token_id": IMAGE_TOKEN,
    "image_seq_length": 4,
    "downsample_ratio": 0.5,
    "tie_word_embeddings": False,
}
IDEFICS3 = {
    "model_type": "idefics3",
    "text_config": {"model_type": "llama", **TEXT},
    "vision_config": {"model_type": "idefics3_vision", **SIGLIP, "image_size": 16},
    "image_token_id": IMAGE_TOKEN,
    "scale_factor": 2,
    "pad_token_id": 0,
}
SMOLVLM = {
    **IDEFICS3,
    "model_type": "smolvlm",
    "vision_config": {**IDEFICS3["vision_config"], "model_type": "smolvlm_vision"},
}  # type: ignore[dict-item]
LLAVA_NEXT = {
    "model_type": "llava_next",
    "text_config": {"model_type": "mistral", **TEXT, "head_dim": 8, "sliding_window": None},
    "vision_config": {
        "model_type": "clip_vision_model",
        **SIGLIP,
        "image_size": 12,
        "num_hidden_layers": 3,
        "projection_dim": 16,
    },
    "image_token_index": IMAGE_TOKEN,
    "image_grid_pinpoints": [[12, 24], [24, 12], [24, 24], [36, 12], [12, 36]],
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "tie_word_embeddings": False,
}
LLAMA4 = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text",
        **TEXT,
        "head_dim": 8,
        "intermediate_size_mlp": 40,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "vision_config": {
        "model_type": "llama4_vision_model",
        "hidden_size": 24,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
        "projector_input_dim": 20,
        "projector_output_dim": 20,
        "vision_output_dim": 20,
        "pixel_shuffle_ratio": 0.5,
    },
    "image_token_index": IMAGE_TOKEN,
    "boi_token_index": 126,
    "eoi_token_index": 127,
    "tie_word_embeddings": False,
}
KIMI_K25 = {
    "model_type": "kimi_k25",
    "text_config": {
        "model_type": "deepseek_v3",
        **TEXT,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "moe_intermediate_size": 20,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "vision_config": {
        "model_type": "kimi_k25_vision",
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": 4,
        "pos_emb_height": 5,
        "pos_emb_width": 5,
        "pos_emb_time": 4,
        "merge_kernel_size": [2, 2],
    },
    "image_token_id": IMAGE_TOKEN,
    "projection_hidden_size": 24,
    "tie_word_embeddings": False,
}
MINIMAX_M3 = {  # all keys seen: with padding in front the reference chooses others
    "model_type": "minimax_m3_vl",
    "text_config": {
        "model_type": "minimax_m3_vl_text",
        **TEXT,
        "head_dim": 8,
        "rotary_dim": 4,
        "dense_intermediate_size": 40,
        "shared_intermediate_size": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "index_n_heads": 2,
        "index_head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    },
    "vision_config": {
        "model_type": "minimax_m3_vl_vision",
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "hidden_size": 40,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": 4,
    },
    "image_token_index": IMAGE_TOKEN,
    "video_token_index": 126,
    "projector_hidden_size": 28,
    "tie_word_embeddings": False,
}
QWEN3_5 = {
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        **TEXT,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        **_mrope([2, 1, 1], 10000000.0, mrope_interleaved=True, partial_rotary_factor=0.5),
    },
    "vision_config": {"model_type": "qwen3_5", **QWEN3_VISION, "deepstack_visual_indexes": []},
    **_tokens(vision_end_token_id=128),
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5": QWEN3_5,
    "qwen2_vl": QWEN2_VL,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": QWEN3_VL_MOE,
    "glm4v": GLM4V,
    "glm4v_moe": GLM4V_MOE,
    "gemma3": GEMMA3,
    "mistral3": MISTRAL3,
    "llava-pixtral": LLAVA_PIXTRAL,
    "internvl": INTERNVL,
    "idefics3": IDEFICS3,
    "smolvlm": SMOLVLM,
    "llava_next": LLAVA_NEXT,
    "llama4": LLAMA4,
    "kimi_k25": KIMI_K25,
    "minimax_m3_vl": MINIMAX_M3,
}


class Pictures:
    """Pictures of a batch: how many features each gives, row by row, and how tensors for them are drawn."""

    rows = ((0, 1), (2,), ())  # the pictures of each row: two, one, none

    def __init__(self, kind: str, sizes: tuple[tuple[int, int], ...], counts: tuple[int, ...]) -> None:
        self.kind = kind
        self.sizes = sizes  # rows and columns: in patches (flat) or pixels
        self.counts = counts

    def tensors(self, draw: np.random.Generator, config: dict[str, Any]) -> dict[str, np.ndarray]:
        """Under the vendor's names and dtypes."""
        vision = config["vision_config"]
        patch = np.ravel(vision["patch_size"])[0]
        if self.kind in ("flat", "moonvit"):
            grids = np.array([(1, *size) for size in self.sizes], dtype=np.int64)
            patches = int(grids.prod(axis=1).sum())
            shape = (3 * vision.get("temporal_patch_size", 1) * patch**2,)
            pixels = draw.standard_normal((patches, *(shape if self.kind == "flat" else (3, patch, patch))))
            return {"pixel_values": pixels.astype(np.float32), "image_grid_thw": grids}
        if self.kind == "sized":
            largest = np.max(self.sizes, axis=0)
            pixels = np.zeros((len(self.sizes), 3, *largest), dtype=np.float32)
            for one, (high, wide) in zip(pixels, self.sizes, strict=True):
                one[:, :high, :wide] = draw.standard_normal((3, high, wide))
            return {"pixel_values": pixels, "image_sizes": np.array(self.sizes, dtype=np.int64)}
        side = np.ravel(vision["image_size"])[0]
        if self.kind == "tiles":
            return {"pixel_values": draw.standard_normal((len(self.sizes), 3, side, side)).astype(np.float32)}
        if self.kind == "anyres":
            tiles = [4, 4, 5]  # the whole, and 1 x 3, 3 x 1, 2 x 2
            pixels = np.zeros((len(self.sizes), max(tiles), 3, side, side), dtype=np.float32)
            for one, count in zip(pixels, tiles, strict=True):
                one[:count] = draw.standard_normal((count, 3, side, side))
            return {"pixel_values": pixels, "image_sizes": np.array(self.sizes, dtype=np.int64)}
        assert self.kind == "masked"
        pixels = np.zeros((len(self.rows), 2, 3, side, side), dtype=np.float32)
        mask = np.zeros((len(self.rows), 2, side, side), dtype=np.int64)
        for row, pictures in enumerate(self.rows):
            for tile, picture in enumerate(pictures):
                high, wide = self.sizes[picture]
                pixels[row, tile, :, :high, :wide] = draw.standard_normal((3, high, wide))
                mask[row, tile, :high, :wide] = 1
        return {"pixel_values": pixels, "pixel_attention_mask": mask}


FLAT = Pictures("flat", ((4, 6), (10, 2), (6, 8)), (6, 5, 12))
PICTURES: dict[str, Pictures] = {
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", "glm4v_moe", "minimax_m3_vl"), FLAT
    ),
    "kimi_k25": Pictures("moonvit", FLAT.sizes, FLAT.counts),
    "gemma3": Pictures("tiles", ((24, 24),) * 3, (9, 9, 9)),
    "mistral3": Pictures("sized", ((16, 24), (40, 8), (24, 32)), (6, 5, 12)),
    "llava-pixtral": Pictures("sized", ((8, 12), (20, 4), (12, 16)), (6, 5, 12)),
    "internvl": Pictures("tiles", ((16, 16),) * 3, (4, 4, 4)),
    "llama4": Pictures("tiles", ((16, 16),) * 3, (4, 4, 4)),
    "idefics3": Pictures("masked", ((16, 16), (16, 8), (12, 16)), (4, 4, 4)),
    "smolvlm": Pictures("masked", ((16, 16), (16, 16), (16, 16)), (4, 4, 4)),
    # 3 x 3 patches a tile: the whole picture, and its own part of a canvas of tiles with a mark behind each row
    "llava_next": Pictures("anyres", ((20, 44), (30, 14), (40, 37)), (9 + 3 * 7 + 3, 9 + 7 * 3 + 7, 9 + 6 * 6 + 6)),
}


def build(name: str, directory: Path) -> Path:
    """Write the checkpoint of a model into `directory` / its name, once; returns where it is."""
    home = directory / name
    if (home / "config.json").exists():
        return home
    with quiet():
        from transformers import AutoConfig, AutoModelForImageTextToText

        config = AutoConfig.for_model(**json.loads(json.dumps(MODELS[name])))
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
        torch.manual_seed(sum(map(ord, name)))
        randomize(model)
        for key, value in model.named_parameters():
            if "lambda_" in key:  # they stand for a factor
                value.data.copy_(1.0 + 0.3 * torch.randn(value.shape))
        model.save_pretrained(home)
    return home


def inputs(name: str, seed: int = 0) -> dict[str, np.ndarray]:
    """A golden file's inputs: three rows, one padded at the left, with two, one and no pictures."""
    draw, pictures = np.random.default_rng(seed), PICTURES[name]
    own = [sum(pictures.counts[index] for index in row) for row in pictures.rows]
    length = max(own) + 12
    ids = draw.integers(3, IMAGE_TOKEN, (len(own), length), dtype=np.int64)
    mask = np.ones_like(ids)
    mask[1, :5] = 0
    for row, indices in enumerate(pictures.rows):
        place = 2 if row != 1 else 7
        for index in indices:
            ids[row, place : place + pictures.counts[index]] = IMAGE_TOKEN
            place += pictures.counts[index] + 2
    ids[mask == 0] = 0
    return {"input_ids": ids, "attention_mask": mask, **pictures.tensors(draw, MODELS[name])}


def write_golden(name: str, home: Path, steps: int = 4) -> Path:
    """The golden file of a model beside its checkpoint, made by transformers once."""
    path = home.with_suffix(".golden.safetensors")
    if not path.exists():
        from firstlight.workbench.golden import Golden
        from firstlight.workbench.reference import Reference

        given = inputs(name)
        Golden.of({**given, **Reference.open(home).run(given, generate=steps)}, name).write(path)
    return path
