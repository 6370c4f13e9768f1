"""Tiny random checkpoints of every family, written by transformers, in which every parameter matters.

Norms away from one, biases and router biases away from zero, weights large enough that logits are of the order of one
and that no layer is close to the identity: a weight that is dropped, swapped or transposed shows.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests import families
from tests.families.tiny import IMAGE_TOKEN, Tiny, llama, rope


def _longrope(**more: Any) -> dict[str, Any]:
    return llama(
        **rope(
            "longrope",
            short_factor=[1.0, 1.1, 1.3, 1.7],
            long_factor=[1.5, 3.0, 6.0, 9.0],
            factor=4.0,
            original_max_position_embeddings=32,
        ),
        **more,
    )


def _deepseek(**more: Any) -> dict[str, Any]:
    return llama(
        **{
            "model_type": "deepseek_v3",
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "moe_intermediate_size": 20,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "norm_topk_prob": True,
            "max_position_embeddings": 4096,
            **more,
        }
    )


def _qwen3_moe(**more: Any) -> dict[str, Any]:
    return llama(
        **{
            "model_type": "qwen3_moe",
            "head_dim": 12,
            "moe_intermediate_size": 20,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "num_hidden_layers": 4,
            "mlp_only_layers": [1],
            "decoder_sparse_step": 1,
            **more,
        }
    )


def _llava(tower: str, text: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    vision: dict[str, Any] = {
        "model_type": f"{tower}_vision_model",
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 12,
        "patch_size": 4,
        **({"vision_use_head": False} if tower == "siglip" else {"projection_dim": 16}),
    }
    return {
        "model_type": "llava",
        "text_config": dict(text),
        "vision_config": vision,
        "image_token_index": IMAGE_TOKEN,
        "projector_hidden_act": "gelu",
        "tie_word_embeddings": text["tie_word_embeddings"],
        "pad_token_id": 0,
        **more,
    }


def _folded(model_type: str, **more: Any) -> dict[str, Any]:
    """Cohere's: two by two patches become one, the text's logits have no scale."""
    plain = _llava("siglip", llama(model_type="cohere2", num_hidden_layers=2, sliding_window=7, logit_scale=1.0))
    vision = {**plain["vision_config"], "image_size": 16}
    return {**plain, "model_type": model_type, "vision_config": vision, **more}


# One line a case. Lengths are chosen so that windows and trained lengths are crossed where the case is about them.
TINY: dict[str, Tiny] = {
    "llama": Tiny(llama(), shards=2),
    "llama-biases": Tiny(llama(attention_bias=True, mlp_bias=True, head_dim=6, hidden_act="gelu")),
    "llama-tied": Tiny(llama(tie_word_embeddings=True)),
    "llama-vocab257": Tiny(llama(vocab_size=257)),
    "llama-thirds": Tiny(llama(vocab_size=257, hidden_size=48, num_attention_heads=6, num_key_value_heads=3)),
    "llama-bf16": Tiny(llama(attention_bias=True), shards=2, stored=torch.bfloat16),
    "llama-theta": Tiny(llama(max_position_embeddings=8192, num_hidden_layers=2, **rope("default", 500000.0)), 4200),
    "llama-rope-linear": Tiny(llama(max_position_embeddings=256, **rope("linear", factor=4.0)), 96),
    "llama-rope-dynamic": Tiny(llama(**rope("dynamic", factor=2.0)), 110),
    "llama-rope-llama3": Tiny(
        llama(
            max_position_embeddings=8192,
            num_hidden_layers=2,
            **rope(
                "llama3",
                500000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        ),
        4200,
    ),
    "llama-older-keys": Tiny(
        llama(max_position_embeddings=8192, num_hidden_layers=2),
        4200,
        fields={"rope_parameters": None, "rope_theta": 70000.0, "rope_scaling": {"type": "linear", "factor": 2.5}},
    ),
    "llama-rope-yarn": Tiny(
        llama(max_position_embeddings=256, **rope("yarn", factor=4.0, original_max_position_embeddings=64)), 150
    ),
    "llama-rope-short": Tiny(_longrope(max_position_embeddings=64), 24),
    "llama-rope-long": Tiny(_longrope(max_position_embeddings=256), 70),
    "llama-rope-ratio": Tiny(
        _longrope(max_position_embeddings=256),
        70,
        fields={
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.3, 1.7],
                "long_factor": [1.5, 3.0, 6.0, 9.0],
            },
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": Tiny(llama(model_type="mistral", sliding_window=7, head_dim=8), 40),
    "mistral-full": Tiny(llama(model_type="mistral", sliding_window=None, head_dim=8), 40),
    "qwen2": Tiny(llama(model_type="qwen2", use_sliding_window=False, tie_word_embeddings=True)),
    "qwen2-window": Tiny(llama(model_type="qwen2", use_sliding_window=True, sliding_window=6, max_window_layers=1), 40),
    "qwen3": Tiny(llama(model_type="qwen3", head_dim=12, **rope("default", 1000000.0))),
    "qwen3-bias": Tiny(llama(model_type="qwen3", head_dim=12, attention_bias=True, tie_word_embeddings=True)),
    "qwen3_moe": Tiny(_qwen3_moe(), shards=3),
    "qwen3_moe-step": Tiny(
        _qwen3_moe(
            mlp_only_layers=[], decoder_sparse_step=2, norm_topk_prob=False, use_sliding_window=True, sliding_window=9
        ),
        40,
    ),
    "qwen3_moe-bf16": Tiny(_qwen3_moe(num_hidden_layers=2), stored=torch.bfloat16),
    "mixtral": Tiny(llama(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
    "mixtral-window": Tiny(
        llama(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=9), 40
    ),
    "deepseek_v3": Tiny(_deepseek(), shards=2),
    "deepseek_v3-full-q": Tiny(_deepseek(q_lora_rank=None, n_group=1, topk_group=1, norm_topk_prob=False)),
    "deepseek_v3-bias": Tiny(_deepseek(attention_bias=True, first_k_dense_replace=0, n_shared_experts=1)),
    "deepseek_v3-yarn": Tiny(
        _deepseek(
            rope_interleave=False,
            **rope(
                "yarn",
                factor=40.0,
                mscale=1.0,
                mscale_all_dim=0.8,
                beta_fast=32,
                beta_slow=1,
                original_max_position_embeddings=64,
            ),
        ),
        150,
    ),
    "gemma2": Tiny(
        llama(
            model_type="gemma2",
            head_dim=12,
            query_pre_attn_scalar=20,
            sliding_window=8,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=6.0,
            tie_word_embeddings=True,
        ),
        40,
    ),
    "gemma2-uncapped": Tiny(
        llama(
            model_type="gemma2",
            head_dim=6,
            query_pre_attn_scalar=6,
            sliding_window=5,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            tie_word_embeddings=False,
            attention_bias=True,
        )
    ),
    "llava-clip": Tiny(_llava("clip", llama()), picture_tokens=9, shards=2),
    "llava-siglip": Tiny(
        _llava(
            "siglip",
            llama(model_type="qwen2", use_sliding_window=False, tie_word_embeddings=True),
            vision_feature_select_strategy="full",
            vision_feature_layer=-1,
        ),
        picture_tokens=9,
    ),
    "llava-layers": Tiny(
        _llava(
            "clip",
            llama(model_type="mistral", sliding_window=None, head_dim=8),
            vision_feature_layer=[-3, -1],
            vision_feature_select_strategy="full",
            multimodal_projector_bias=False,
        ),
        tokens=28,
        picture_tokens=10,
    ),
    "vipllava": Tiny(
        _llava("clip", llama(num_hidden_layers=2), model_type="vipllava", vision_feature_layer=[-2, -1, 0]),
        picture_tokens=9,
    ),
    "aya_vision": Tiny(_folded("aya_vision", alignment_intermediate_size=28), picture_tokens=4),
    "cohere2_vision": Tiny(
        _folded("cohere2_vision", image_token_id=IMAGE_TOKEN, alignment_intermediate_size=44), picture_tokens=4
    ),
    "llava-moe": Tiny(
        _llava("siglip", _qwen3_moe(num_hidden_layers=2), vision_feature_select_strategy="full"), picture_tokens=9
    ),
    **families.TINY,
}


def build(name: str, directory: Path) -> Path:
    """Write the checkpoint of a case into `directory` / its name, once; returns where it is."""
    case, home = TINY[name], directory / name
    if (home / "config.json").exists():
        return home
    model = _model(dict(case.config))
    torch.manual_seed(sum(map(ord, name)))
    randomize(model)
    model.to(case.stored)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    with quiet():
        model.save_pretrained(home, max_shard_size=size if case.shards == 1 else size // case.shards + 4096)
    if case.fields:
        edit_config(home, **case.fields)
    return home


def _model(config: dict[str, Any]) -> torch.nn.Module:
    with quiet():
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        kind = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
        return kind.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """transformers' remarks and progress bars stay out of the tests' output."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    from transformers.utils import logging as own

    own.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(before)


@torch.no_grad()
def randomize(model: torch.nn.Module) -> None:
    """Draw every parameter and buffer anew so that each matters to the logits."""
    named = [
        *model.named_parameters(),
        *(
            (n, b)
            for n, b in model.named_buffers()
            if n.endswith(("correction_bias", "expert_bias", "tid2eid", "layer_scalar"))
        ),
    ]
    kind = type(model).__name__.lower()
    around_zero = "gemma" in kind and "gemma4" not in kind
    for name, value in named:
        if not value.is_floating_point():  # a table of experts: some of them, each once
            value.copy_(torch.rand(value.shape[0], model.config.n_routed_experts).argsort(dim=1)[:, : value.shape[1]])
            continue
        noise = torch.randn(value.shape)
        own = ".".join(name.split(".")[-3:-1])  # not the block around it: DBRX has projections in a `norm_attn_norm`
        if "norm" in own and name.endswith("weight"):
            value.copy_((0.0 if around_zero else 1.0) + 0.3 * noise)
        elif name.endswith("layer_scalar"):
            value.copy_(1.0 + 0.3 * noise)
        elif name.endswith(("bias", "class_embedding")):
            value.copy_(0.3 * noise)
        elif "embed" in name or "lm_head" in name:
            value.copy_(0.4 * noise)
        else:
            value.copy_(noise * 1.2 / value.shape[-1] ** 0.5)


def edit_config(home: Path, **fields: Any) -> None:
    """Set keys of a saved `config.json`; None removes a key."""
    path = home / "config.json"
    config = json.loads(path.read_text())
    for key, value in fields.items():
        config.pop(key, None) if value is None else config.update({key: value})
    path.write_text(json.dumps(config))


def inputs(name: str, batch: int = 2, seed: int = 0) -> dict[str, np.ndarray]:
    """A golden file's inputs for a case: `input_ids`, `attention_mask` (the last sequence is shorter), pictures."""
    case = TINY[name]
    vocab = case.config.get("vocab_size") or case.config["text_config"]["vocab_size"]
    draw = np.random.default_rng(seed)
    ids = draw.integers(3, vocab - 1, (batch, case.tokens), dtype=np.int64)
    mask = np.ones_like(ids)
    found = {"input_ids": ids, "attention_mask": mask}
    if case.picture_tokens:
        ids[:, 2 : 2 + case.picture_tokens] = IMAGE_TOKEN
        size = case.config["vision_config"]["image_size"]
        found["pixel_values"] = draw.standard_normal((batch, 3, size, size)).astype(np.float32)
    if batch > 1:
        mask[-1, -case.tokens // 4 :] = 0
        ids[-1, -case.tokens // 4 :] = 0
    return found


def write_golden(name: str, home: Path, steps: int = 6) -> Path:
    """The golden file of a case beside its checkpoint, made by transformers once."""
    path = home.with_suffix(".golden.safetensors")
    if not path.exists():
        from firstlight.workbench.golden import Golden
        from firstlight.workbench.reference import Reference

        given = inputs(name, batch=1 if TINY[name].tokens > 1000 else 2)
        Golden.of({**given, **Reference.open(home).run(given, generate=steps)}, name).write(path)
    return path
