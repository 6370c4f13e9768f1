"""A tiny random Kimi-VL under its release's names, and a golden file by an independent reference of what sees.

transformers has no Kimi-VL. Its text is DeepSeek-V3's, which transformers computes from embeddings; MoonViT, the
projector and the places of pictures are computed here and in `tests/reference/moonvit.py`, which share no code with the
engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.checkpoints import TINY
from tests.reference import moonvit
from tests.sweep import outside

PLACEHOLDER = 125
HIDDEN, LAYERS, HEADS, PATCH = 24, 2, 2, 4
VISION: dict[str, Any] = {
    "model_type": "moonvit",
    "patch_size": PATCH,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "init_pos_emb_height": 7,
    "init_pos_emb_width": 5,
    "merge_kernel_size": [2, 2],
}
GRIDS = ((4, 6), (10, 2), (6, 8))
ROWS = ((0, 1), (2,), ())


def tower(width: int) -> dict[str, Tensor]:
    """Tensors of tower and projector, norms away from one and biases away from zero."""
    draw = torch.Generator().manual_seed(7)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw) / (shape[-1] ** 0.5 if len(shape) == 2 else 4.0)

    found: dict[str, Tensor] = {
        "vision_tower.patch_embed.proj.weight": matrix(HIDDEN, 3, PATCH, PATCH),
        "vision_tower.patch_embed.pos_emb.weight": 2 * matrix(7, 5, HIDDEN),
    }
    merged, inner = 4 * HIDDEN, VISION["intermediate_size"]
    affine = {
        "multi_modal_projector.linear_1": (merged, merged),
        "multi_modal_projector.linear_2": (width, merged),
    }
    norms = ["vision_tower.encoder.final_layernorm", "multi_modal_projector.pre_norm"]
    for index in range(LAYERS):
        block = f"vision_tower.encoder.blocks.{index}."
        norms += [f"{block}norm0", f"{block}norm1"]
        affine |= {f"{block}wqkv": (3 * HIDDEN, HIDDEN), f"{block}wo": (HIDDEN, HIDDEN)}
        affine |= {f"{block}mlp.fc0": (inner, HIDDEN), f"{block}mlp.fc1": (HIDDEN, inner)}
    found |= {f"{name}.weight": matrix(*shape) for name, shape in affine.items()}
    found |= {f"{name}.weight": 1 + 0.3 * torch.randn(HIDDEN, generator=draw) for name in norms}
    biases = {**{name: shape[0] for name, shape in affine.items()}, **dict.fromkeys(norms, HIDDEN)}
    biases["vision_tower.patch_embed.proj"] = HIDDEN
    return found | {f"{name}.bias": 0.3 * torch.randn(size, generator=draw) for name, size in biases.items()}


def write(home: Path, steps: int = 3) -> Path:
    """The checkpoint in `home` and its golden file beside it; the file's path."""
    text = outside.model_of({**TINY["deepseek_v3-full-q"].config, "max_position_embeddings": 128})
    eyes = tower(text.config.hidden_size)
    home.mkdir(parents=True)
    stored = {f"language_model.{name}": value.clone() for name, value in text.state_dict().items()}
    save_file({**_apart(stored), **eyes}, home / "model.safetensors", {"format": "pt"})
    config = {key: value for key, value in text.config.to_dict().items() if key not in ("architectures", "dtype")}
    whole = {
        "architectures": ["KimiVLForConditionalGeneration"],
        "model_type": "kimi_vl",
        "media_placeholder_token_id": PLACEHOLDER,
        "vision_config": VISION,
        "text_config": config,
        "torch_dtype": "float32",
    }
    (home / "config.json").write_text(json.dumps(whole))
    given = inputs(text.config.vocab_size)
    return outside.write_golden(home, given, expected(text, eyes, given, steps))


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts one by one, as releases store them."""
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name] = value
            continue
        base = name.rpartition(".")[0]
        for index, one in enumerate(value):
            parts = (
                {"gate_proj": one.chunk(2)[0], "up_proj": one.chunk(2)[1]} if "gate_up" in name else {"down_proj": one}
            )
            found |= {f"{base}.{index}.{part}.weight": matrix.contiguous() for part, matrix in parts.items()}
    return found


def inputs(vocab: int) -> dict[str, Tensor]:
    """Rows with two, one and no pictures, the second padded in front."""
    draw = torch.Generator().manual_seed(3)
    counts = [rows * columns // 4 for rows, columns in GRIDS]
    ids = torch.randint(3, min(PLACEHOLDER, vocab), (3, 28), generator=draw)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    for row, pictures in enumerate(ROWS):
        place = 6
        for index in pictures:
            ids[row, place : place + counts[index]] = PLACEHOLDER
            place += counts[index] + 1
    ids[mask == 0] = 0
    patches = sum(rows * columns for rows, columns in GRIDS)
    pixels = torch.randn(patches, 3, PATCH, PATCH, generator=draw)
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels, "image_grid_hws": torch.tensor(GRIDS)}


@torch.inference_mode()
def expected(text: Any, eyes: dict[str, Tensor], given: dict[str, Tensor], steps: int) -> dict[str, Tensor]:
    """What a golden file holds."""
    names = {"multi_modal_projector.pre_norm": "mm_projector.pre_norm"}
    names |= {
        "multi_modal_projector.linear_1": "mm_projector.proj.0",
        "multi_modal_projector.linear_2": "mm_projector.proj.2",
    }
    plain = {}
    for name, value in eyes.items():
        base, _, kind = name.rpartition(".")
        plain[f"{names.get(base, base)}.{kind}"] = value
    config = {**VISION, "vt_num_hidden_layers": LAYERS, "vt_num_attention_heads": HEADS}
    grids = torch.cat((torch.ones(len(GRIDS), 1, dtype=torch.int64), given["image_grid_hws"]), dim=1)
    features = moonvit.image_features(plain, config, given["pixel_values"], grids)
    mask = given["attention_mask"]
    out = _run(text, given["input_ids"], mask, features)
    found = {f"hidden.{i}": state for i, state in enumerate(out.hidden_states)}
    found |= {"logits": out.logits, "image_features": features}
    ids = given["input_ids"]
    for _ in range(steps):
        ids = torch.cat((ids, _run(text, ids, mask, features).logits[:, -1:].argmax(-1)), dim=1)
        mask = torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)
    return {**found, "generated": ids[:, -steps:]}


def _run(text: Any, ids: Tensor, mask: Tensor, features: Tensor) -> Any:
    embedded = text.get_input_embeddings()(ids)
    embedded[ids == PLACEHOLDER] = features
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return text(
        inputs_embeds=embedded, attention_mask=mask, position_ids=positions, output_hidden_states=True, use_cache=False
    )
