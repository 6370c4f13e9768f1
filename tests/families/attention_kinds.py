"""Tiny models whose attention, positions or norms are of a kind that Llama has not."""

from typing import Any

from tests.families.tiny import Tiny, llama, rope


def _kind(model_type: str, **more: Any) -> dict[str, Any]:
    return llama(model_type=model_type, **more)


def _by_kind(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    return {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", **full},
            "sliding_attention": {"rope_type": "default", **sliding},
        }
    }


ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]

TINY: dict[str, Tiny] = {
    # Llama's layout with another number or flag
    "arcee": Tiny(_kind("arcee", head_dim=8, hidden_act="relu2", mlp_bias=True)),
    "ernie4_5": Tiny(_kind("ernie4_5", head_dim=12, use_bias=True, tie_word_embeddings=True)),
    "granite": Tiny(
        _kind(
            "granite",
            embedding_multiplier=3.0,
            attention_multiplier=0.4,
            residual_multiplier=0.3,
            logits_scaling=0.7,
            attention_bias=True,
            mlp_bias=True,
        )
    ),
    "helium": Tiny(_kind("helium", head_dim=8, attention_bias=True)),
    "internlm3": Tiny(_kind("internlm3", head_dim=12, qkv_bias=True, bias=True)),
    "ministral3": Tiny(
        _kind(
            "ministral3",
            head_dim=8,
            sliding_window=9,
            **rope(
                "yarn",
                factor=16.0,
                beta_fast=32.0,
                beta_slow=1.0,
                mscale=1.0,
                mscale_all_dim=1.0,
                original_max_position_embeddings=8,
                llama_4_scaling_beta=0.5,
            ),
        ),
        40,
    ),
    "seed_oss": Tiny(_kind("seed_oss", head_dim=12)),
    "smollm3": Tiny(_kind("smollm3", num_hidden_layers=4, no_rope_layer_interval=3)),
    # others
    "gemma": Tiny(_kind("gemma", head_dim=12, tie_word_embeddings=True)),
    "gemma3": Tiny(
        _kind(
            "gemma3_text",
            head_dim=8,
            query_pre_attn_scalar=20,
            sliding_window=7,
            layer_types=ALTERNATING,
            tie_word_embeddings=True,
            **_by_kind({"rope_theta": 50000.0, "rope_type": "linear", "factor": 3.0}, {"rope_theta": 300.0}),
        ),
        40,
    ),
    "gemma3-older-keys": Tiny(
        _kind("gemma3_text", head_dim=8, sliding_window=7, query_pre_attn_scalar=8),
        40,
        fields={
            "rope_parameters": None,
            "layer_types": None,
            "sliding_window_pattern": 2,
            "rope_theta": 70000.0,
            "rope_local_base_freq": 500.0,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
    ),
    "vaultgemma": Tiny(
        _kind("vaultgemma", head_dim=8, query_pre_attn_scalar=20, sliding_window=8, attn_logit_softcapping=4.0), 40
    ),
    "glm": Tiny(_kind("glm", head_dim=16)),
    "glm4": Tiny(_kind("glm4", head_dim=8)),
    "gpt2": Tiny(
        {
            "model_type": "gpt2",
            "vocab_size": 131,
            "n_embd": 32,
            "n_head": 4,
            "n_layer": 3,
            "n_positions": 64,
            "scale_attn_by_inverse_layer_idx": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
    ),
    "olmo": Tiny(_kind("olmo", clip_qkv=1.1)),
    "olmo2": Tiny(_kind("olmo2", attention_bias=True)),
    "olmo3": Tiny(
        _kind(
            "olmo3",
            sliding_window=7,
            layer_types=ALTERNATING,
            max_position_embeddings=256,
            **_by_kind(
                {"rope_theta": 5000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
                {"rope_theta": 5000.0},
            ),
        ),
        40,
    ),
    "phi": Tiny(_kind("phi", qk_layernorm=True, num_key_value_heads=4)),
    "phi3": Tiny(
        _kind(
            "phi3",
            sliding_window=11,
            max_position_embeddings=256,
            original_max_position_embeddings=32,
            **rope(
                "longrope",
                short_factor=[1.0, 1.2, 1.5],
                long_factor=[1.5, 3.0, 6.0],
                partial_rotary_factor=0.75,
            ),
        ),
        40,
    ),
}
MESHES: dict[str, tuple[str, ...]] = {
    "gemma3": ("tp2 pp2",),
    "glm": ("tp4",),
    "gpt2": ("tp2", "pp2"),
    "granite": ("tp2 pp2",),
    "olmo2": ("tp2", "tp4"),  # two key heads: at tp 4 each counts twice in the mean of squares
    "phi": ("tp2 pp2",),
    "phi3": ("tp2",),
}
STEPPED = ("gemma3", "gpt2", "ministral3", "olmo3")
