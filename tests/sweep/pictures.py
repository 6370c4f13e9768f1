"""Models that see, varied as somebody else would choose them: other sizes, patches, mergers, layers, heads, pictures.

A variant is a configuration and the pictures of each row of a batch; the tensors are as the vendor's processor makes
them, and rows are padded at the left as for generating.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tests import vision_checkpoints as seeing
from tests.sweep import small

Raw = dict[str, Any]
Size = tuple[int, int]
ROWS: tuple[tuple[int, ...], ...] = ((0, 1), (2,), ())


@dataclass(frozen=True)
class Variant:
    """`sizes`: rows and columns of each picture, in patches (flat), pixels (sized, masked, anyres), or none (tiles)."""

    base: str
    what: str
    change: Mapping[str, Any]
    kind: str
    sizes: tuple[Size, ...]
    rows: tuple[tuple[int, ...], ...] = ROWS

    @property
    def raw(self) -> Raw:
        return small.merged(copy.deepcopy(bases()[self.base]), self.change)


def given(variant: Variant, seed: int = 1) -> dict[str, torch.Tensor]:
    """Ids, mask and picture tensors of a batch."""
    draw, raw = np.random.default_rng(seed), variant.raw
    variant = _in_order(variant)
    counts, tensors = PIXELS[variant.kind](variant, raw, draw)
    token = raw.get("image_token_id", raw.get("image_token_index"))
    rows = []
    for number, row in enumerate(variant.rows):
        ids = list(draw.integers(3, seeing.IMAGE_TOKEN, 3 + number))
        for index in row:
            ids += [127, *([token] * counts[index]), 128, *draw.integers(3, seeing.IMAGE_TOKEN, 2)]
        rows.append(ids)
    length = max(map(len, rows)) + 1
    ids = torch.tensor([[0] * (length - len(row)) + [int(one) for one in row] for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    tensors = {name: torch.from_numpy(value) for name, value in tensors.items()}
    return {"input_ids": ids, "attention_mask": mask, **tensors}


def _in_order(variant: Variant) -> Variant:
    """Each picture as often as rows show it, in their order."""
    shown = [index for row in variant.rows for index in row]
    number = iter(range(len(shown)))
    rows = tuple(tuple(next(number) for _ in row) for row in variant.rows)
    return replace(variant, sizes=tuple(variant.sizes[index] for index in shown), rows=rows)


Made = tuple[list[int], dict[str, np.ndarray]]


def _flat(variant: Variant, raw: Raw, draw: np.random.Generator) -> Made:
    vision = raw["vision_config"]
    patch, merge = vision["patch_size"], vision["spatial_merge_size"]
    grids = np.array([(1, *size) for size in variant.sizes], dtype=np.int64)
    width = vision.get("in_channels", 3) * vision["temporal_patch_size"] * patch**2
    pixels = draw.standard_normal((int(grids.prod(1).sum()), width)).astype(np.float32)
    return [int(n) // merge**2 for n in grids.prod(1)], {"pixel_values": pixels, "image_grid_thw": grids}


def _moonvit(variant: Variant, raw: Raw, draw: np.random.Generator) -> Made:
    vision = raw["vision_config"]
    grids = np.array([(1, *size) for size in variant.sizes], dtype=np.int64)
    pixels = draw.standard_normal((int(grids.prod(1).sum()), 3, vision["patch_size"], vision["patch_size"]))
    merged = int(np.prod(vision["merge_kernel_size"]))
    made = {"pixel_values": pixels.astype(np.float32), "image_grid_thw": grids}
    return [int(n) // merged for n in grids.prod(1)], made


def _sized(variant: Variant, raw: Raw, draw: np.random.Generator) -> Made:
    edge = raw["vision_config"]["patch_size"] * raw.get("spatial_merge_size", 1)
    largest = np.max(variant.sizes, axis=0)
    pixels = np.zeros((len(variant.sizes), 3, *largest), np.float32)
    for one, (high, wide) in zip(pixels, variant.sizes, strict=True):
        one[:, :high, :wide] = draw.standard_normal((3, high, wide))
    sizes = np.array(variant.sizes, np.int64)
    return [(h // edge) * (w // edge) for h, w in variant.sizes], {"pixel_values": pixels, "image_sizes": sizes}


def _tiles(variant: Variant, raw: Raw, draw: np.random.Generator) -> Made:
    """Each picture is `sizes` (rows x columns of) tiles; features of a tile follow from the configuration."""
    vision = raw["vision_config"]
    side, patch = int(np.ravel(vision["image_size"])[0]), int(np.ravel(vision["patch_size"])[0])
    per = (side // patch) ** 2
    if raw["model_type"] == "gemma3":
        per = raw["mm_tokens_per_image"]
    elif raw["model_type"] == "internvl":
        per = int(per * raw["downsample_ratio"] ** 2)
    elif raw["model_type"] == "llama4":
        per = int(per * vision["pixel_shuffle_ratio"] ** 2)
    elif vision["model_type"] == "clip_vision_model":
        per += raw["vision_feature_select_strategy"] == "full"
    else:
        per -= raw.get("vision_feature_select_strategy") == "default"
    tiles = [rows * columns for rows, columns in variant.sizes]
    pixels = draw.standard_normal((sum(tiles), 3, side, side)).astype(np.float32)
    return [per * count for count in tiles], {"pixel_values": pixels}


def _masked(variant: Variant, raw: Raw, draw: np.random.Generator) -> Made:
    vision = raw["vision_config"]
    side, most = vision["image_size"], max(map(len, variant.rows))
    pixels = np.zeros((len(variant.rows), most, 3, side, side), np.float32)
    mask = np.zeros((len(variant.rows), most, side, side), np.int64)
    for row, pictures in enumerate(variant.rows):
        for tile, picture in enumerate(pictures):
            high, wide = variant.sizes[picture]
            pixels[row, tile, :, :high, :wide] = draw.standard_normal((3, high, wide))
            mask[row, tile, :high, :wide] = 1
    per = (side // vision["patch_size"]) ** 2 // raw["scale_factor"] ** 2
    return [per] * len(variant.sizes), {"pixel_values": pixels, "pixel_attention_mask": mask}


def _anyres(variant: Variant, raw: Raw, draw: np.random.Generator) -> Made:
    """With the reference's own arithmetic for tiles and features."""
    from transformers.image_processing_utils import select_best_resolution

    vision, pinpoints = raw["vision_config"], raw["image_grid_pinpoints"]
    side = vision["image_size"]
    patches = side // vision["patch_size"]
    tiles, counts = [], []
    for high, wide in variant.sizes:
        best = select_best_resolution((high, wide), pinpoints)
        rows, columns = best[0] // side, best[1] // side
        tiles.append(1 + rows * columns)
        counts.append(patches**2 + _unpadded(high, wide, patches, rows, columns))
    pixels = np.zeros((len(tiles), max(tiles), 3, side, side), np.float32)
    for one, count in zip(pixels, tiles, strict=True):
        one[:count] = draw.standard_normal((count, 3, side, side))
    return counts, {"pixel_values": pixels, "image_sizes": np.array(variant.sizes, np.int64)}


def _unpadded(high: int, wide: int, patches: int, rows: int, columns: int) -> int:
    from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

    inner, ends = LlavaNextProcessor._get_unpadded_features(None, high, wide, patches, patches, rows, columns)
    return int(inner + ends)


PIXELS = {"flat": _flat, "moonvit": _moonvit, "sized": _sized, "tiles": _tiles, "masked": _masked, "anyres": _anyres}
SIGLIP = {"model_type": "siglip_vision_model", **seeing.SIGLIP, "vision_use_head": False}
CLIP = {"model_type": "clip_vision_model", **seeing.SIGLIP, "projection_dim": 16, "num_hidden_layers": 3}
LLAVA: Raw = {
    "model_type": "llava",
    "text_config": {"model_type": "llama", **seeing.TEXT},
    "vision_config": CLIP,
    "image_token_index": seeing.IMAGE_TOKEN,
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "tie_word_embeddings": False,
}


def bases() -> Mapping[str, Raw]:
    """What is varied, by name."""
    return {
        **seeing.MODELS,
        "llava clip": LLAVA,
        "llava siglip": {**LLAVA, "vision_config": SIGLIP, "vision_feature_select_strategy": "full"},
        "llava_next siglip": {
            **seeing.MODELS["llava_next"],
            "vision_config": {**SIGLIP, "image_size": 12},
            "vision_feature_select_strategy": "full",
        },
    }


def _vision(**more: Any) -> Raw:
    return {"vision_config": more}


FLATS: Mapping[str, Raw] = {
    "tied": {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": True}},
    "untied": {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": False}},
    "patch 2": _vision(patch_size=2),
    "patch 7, one frame": _vision(patch_size=7, temporal_patch_size=1),
    "merge 1": _vision(spatial_merge_size=1),
    "merge 3": _vision(spatial_merge_size=3),
    "merge 4": _vision(spatial_merge_size=4),
    "one head": _vision(num_heads=1),
    "depth 1": _vision(depth=1, fullatt_block_indexes=[0], deepstack_visual_indexes=[0]),
    "fewer layers of text": {"text_config": {"num_hidden_layers": 2}},
}
OWN: Mapping[str, Mapping[str, Raw]] = {
    "qwen2_5_vl": {
        "window 8": _vision(window_size=8),
        "window 24": _vision(window_size=24),
        "window 112, larger than pictures": _vision(window_size=112),
        "window 20, no multiple": _vision(window_size=20),
        "no whole layers": _vision(fullatt_block_indexes=[]),
        "all layers whole": _vision(fullatt_block_indexes=[0, 1, 2]),
        "last whole": _vision(fullatt_block_indexes=[2]),
        "gelu": _vision(hidden_act="gelu"),
    },
    "qwen2_vl": {
        "gelu": _vision(hidden_act="gelu"),
        "mlp_ratio 3.5": _vision(mlp_ratio=3.5),
        "sliding text": {"text_config": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}},
    },
    "qwen3_vl": {
        "no deep": _vision(deepstack_visual_indexes=[]),
        "deep 1": _vision(deepstack_visual_indexes=[1]),
        "deep 0, 1, 2": _vision(deepstack_visual_indexes=[0, 1, 2]),
        "positions 36": _vision(num_position_embeddings=36),
        "positions 9": _vision(num_position_embeddings=9),
        "positions 1": _vision(num_position_embeddings=1),
    },
    "qwen3_5": {"positions 36": _vision(num_position_embeddings=36)},
    "glm4v": {"image 36": _vision(image_size=36), "image 22, patch 4": _vision(image_size=22)},
    "glm4v_moe": {"image 36": _vision(image_size=36), "no bias": _vision(attention_bias=False)},
}


def flat(base: str) -> Iterator[Variant]:
    for what, change in {**FLATS, **OWN.get(base, OWN["qwen3_vl"] if base == "qwen3_vl_moe" else {})}.items():
        raw = small.merged(copy.deepcopy(seeing.MODELS[base]), change)
        own = copy.deepcopy(change)
        own.get("vision_config", {}).pop("deepstack_visual_indexes" if base[:5] != "qwen3" else "", None)
        own.get("vision_config", {}).pop("fullatt_block_indexes" if base != "qwen2_5_vl" else "", None)
        if base == "qwen3_5" and "deepstack_visual_indexes" in own.get("vision_config", {}):
            own["vision_config"]["deepstack_visual_indexes"] = []
        if base == "qwen3_5" and "num_hidden_layers" in own.get("text_config", {}):
            own["text_config"]["layer_types"] = ["linear_attention", "full_attention"]
        merge = raw["vision_config"]["spatial_merge_size"]
        sizes = tuple((a * merge, b * merge) for a, b in ((1, 1), (5, 3), (2, 7)))
        yield Variant(base, what, own, "flat", sizes, ((0,), (1, 2, 0)) if what.startswith("merge") else ROWS)
    yield Variant(base, "three pictures side by side", {}, "flat", ((4, 4), (2, 2), (2, 12)), ((1, 0, 2), (2, 2)))


def moonvit() -> Iterator[Variant]:
    sizes = ((2, 2), (10, 6), (4, 14))
    for what, change in {
        "high positions": _vision(pos_emb_height=7, pos_emb_width=5),
        "wide positions": _vision(pos_emb_height=4, pos_emb_width=9),
        "positions 2": _vision(pos_emb_height=2, pos_emb_width=2),
        "merge 1 x 1": _vision(merge_kernel_size=[1, 1]),
        "one head, patch 6": _vision(num_attention_heads=1, patch_size=6),
        "tied": {"tie_word_embeddings": True},
        "no query rank": {"text_config": {"q_lora_rank": None}},
    }.items():
        yield Variant("kimi_k25", what, change, "moonvit", sizes)


def sized() -> Iterator[Variant]:
    for base in ("mistral3", "llava-pixtral"):
        edge = 8 if base == "mistral3" else 4
        sizes = tuple((a * edge, b * edge) for a, b in ((1, 1), (5, 2), (2, 6)))
        changes: dict[str, Raw] = {
            "tied": {"tie_word_embeddings": True},
            "layer -2": {"vision_feature_layer": -2},
            "one head": _vision(num_attention_heads=1),
            "silu": _vision(hidden_act="silu"),
            "bias": {"multimodal_projector_bias": base == "mistral3"},
            "relu": {"projector_hidden_act": "relu"},
            "rope": _vision(rope_parameters={"rope_type": "axial", "rope_theta": 500.0}),
        }
        if base == "mistral3":
            changes |= {
                "text of ministral3": {"text_config": {"model_type": "ministral3"}},
                "sliding": {"text_config": {"sliding_window": 7}},
            }
        else:
            changes |= {
                "layers -1 and -2": {"vision_feature_layer": [-1, -2]},
                "layers 1 and 2": {"vision_feature_layer": [1, 2]},
            }
        for what, change in changes.items():
            yield Variant(base, what, change, "sized", sizes)
    for merge in (1, 3):
        sizes = tuple((a * merge * 4, b * merge * 4) for a, b in ((1, 1), (5, 2), (2, 6)))
        yield Variant("mistral3", f"merge {merge}", {"spatial_merge_size": merge}, "sized", sizes)


def llava() -> Iterator[Variant]:
    sizes = ((1, 1),) * 3
    texts = {
        "llama": {},
        "qwen2": {},
        "mistral": {"head_dim": 8, "sliding_window": 6},
        "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 12, "sliding_window": 6},
        "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
        "qwen3": {"head_dim": 12},
        "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "attention_multiplier": 0.3},
        "granitemoe": {"embedding_multiplier": 3.0, "num_local_experts": 4, "num_experts_per_tok": 2},
        "gemma": {"head_dim": 8},
        "cohere": {"logit_scale": 0.3},
        "olmo2": {},
        "phi": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "starcoder2": {},
        "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "minicpm3": {
            "q_lora_rank": 12,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
        },
        "afmoe": {
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "mup_enabled": True,
            "num_dense_layers": 1,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
        "glm4": {"head_dim": 8},
    }
    for kind in ("clip", "siglip"):
        for what, change in {
            "as it is": {},
            "full": {"vision_feature_select_strategy": "full"},
            "layers -2 and -1": {"vision_feature_layer": [-2, -1]},
            "layers 0, 1 and -1, full": {
                "vision_feature_layer": [0, 1, -1],
                "vision_feature_select_strategy": "full",
            },
            "layer 1": {"vision_feature_layer": 1},
            "layer -1": {"vision_feature_layer": -1},
            "image 26, patch 4": _vision(image_size=26),
            "patch 12": _vision(patch_size=12),
            "gelu": {**_vision(hidden_act="gelu"), "projector_hidden_act": "gelu_pytorch_tanh"},
            "no bias": {"multimodal_projector_bias": False},
            "eps": _vision(layer_norm_eps=0.01),
            "tied": {"tie_word_embeddings": True},
        }.items():
            yield Variant(f"llava {kind}", what, change, "tiles", sizes)
    for text, more in texts.items():
        yield Variant("llava clip", f"text of {text}", {"text_config": {"model_type": text, **more}}, "tiles", sizes)


def anyres() -> Iterator[Variant]:
    sizes = ((20, 44), (30, 14), (40, 37))
    for what, change, shown in (
        ("tied", {"tie_word_embeddings": True}, sizes),
        ("layer -1", {"vision_feature_layer": -1}, sizes),
        ("layers -1 and -2", {"vision_feature_layer": [-1, -2]}, sizes),
        ("other canvases", {"image_grid_pinpoints": [[12, 48], [48, 12], [36, 24]]}, sizes),
        ("narrow pictures", {}, ((2, 90), (90, 2), (7, 7))),
        ("patch 6", _vision(patch_size=6), sizes),
        ("gelu", _vision(hidden_act="gelu"), sizes),
        ("text of llama", {"text_config": {"model_type": "llama"}}, sizes),
    ):
        yield Variant("llava_next", what, change, "anyres", shown)
    for what, change in (("as it is", {}), ("layer -1", {"vision_feature_layer": -1})):
        yield Variant("llava_next siglip", what, change, "anyres", sizes)


def tiles() -> Iterator[Variant]:
    one, more = ((1, 1),) * 3, ((1, 1), (1, 3), (2, 2))
    for what, change in {
        "tied": {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": True}},
        "untied": {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": False}},
        "image 24, 4 tokens": {"mm_tokens_per_image": 4},
        "image 24, 36 tokens": {"mm_tokens_per_image": 36},
        "all sliding": {"text_config": {"layer_types": ["sliding_attention"] * 3, "sliding_window": 4}},
        "softcaps": {"text_config": {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 8.0}},
        "bidirectional": {"text_config": {"use_bidirectional_attention": True}},
        "eps": _vision(layer_norm_eps=0.01),
        "local theta": {
            "text_config": {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                }
            }
        },
    }.items():
        yield Variant("gemma3", what, change, "tiles", more)
    for what, change in {
        "tied": {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": True}},
        "untied": {"tie_word_embeddings": False},
        "downsample 1/4": {"downsample_ratio": 0.25},
        "downsample 1": {"downsample_ratio": 1.0},
        "rms": _vision(norm_type="rms_norm"),
        "rms, last norm": _vision(norm_type="rms_norm", use_mean_pooling=False),
        "last norm": _vision(use_mean_pooling=False),
        "no query norm": _vision(use_qk_norm=False),
        "no bias": _vision(attention_bias=False),
        "no positions": _vision(use_absolute_position_embeddings=False),
        "image 24, patch 6": _vision(image_size=[24, 24], patch_size=[6, 6]),
        "layer 1": {"vision_feature_layer": 1},
        "layer -2": {"vision_feature_layer": -2},
        "text of llama": {"text_config": {"model_type": "llama"}},
        "text of qwen3": {"text_config": {"model_type": "qwen3", "head_dim": 12}},
        "text of qwen3_moe": {"text_config": {"model_type": "qwen3_moe", "head_dim": 12, **seeing.MOE}},
        "text of gpt_oss": {
            "text_config": {
                "model_type": "gpt_oss",
                "head_dim": 8,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "sliding_window": 6,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            }
        },
    }.items():
        yield Variant("internvl", what, change, "tiles", more)
    for what, change in {
        "untied": {},
        "tied": {"tie_word_embeddings": True},
        "chunks of 5": {"text_config": {"attention_chunk_size": 5}},
        "no rope every 2": {"text_config": {"no_rope_layer_interval": 2, "floor_scale": 4, "attn_scale": 0.5}},
        "no query norm": {"text_config": {"use_qk_norm": False}},
        "all experts, 2 of them": {"text_config": {"interleave_moe_layer_step": 1, "num_experts_per_tok": 2}},
        "shuffle 1": {"vision_config": {"pixel_shuffle_ratio": 1.0, "intermediate_size": 24}},
        "image 24, patch 6": _vision(image_size=24, patch_size=6),
        "theta": _vision(rope_parameters={"rope_type": "axial", "rope_theta": 300.0}),
    }.items():
        yield Variant("llama4", what, change, "tiles", more if what != "tied" else one)


def masked() -> Iterator[Variant]:
    sizes = ((16, 16), (12, 7), (16, 4), (3, 16))
    for base in ("idefics3", "smolvlm"):
        for what, change in {
            "tied": {"tie_word_embeddings": True},
            "untied": {"tie_word_embeddings": False},
            "scale 1": {"scale_factor": 1},
            "scale 4": {"scale_factor": 4},
            "patch 2": _vision(patch_size=2),
            "patch 8": {**_vision(patch_size=8)},
            "gelu": _vision(hidden_act="gelu"),
            "text of qwen2": {"text_config": {"model_type": "qwen2"}},
        }.items():
            yield Variant(base, what, change, "masked", sizes, ((0, 1, 2), (3,), ()))


def all_variants(names: Sequence[str]) -> Iterator[Variant]:
    for base in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", "glm4v_moe"):
        if not names or base in names:
            yield from flat(base)
    for own in (moonvit, sized, llava, anyres, tiles, masked):
        yield from (one for one in own() if not names or one.base in names)
