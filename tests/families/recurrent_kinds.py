"""Tiny models of layers that keep a state: linear attention, state spaces, short convolutions."""

from typing import Any

from tests.families.tiny import VOCAB, Tiny, llama, rope


def _base(**more: Any) -> dict[str, Any]:
    return llama(**{"max_position_embeddings": 128, **more})


def _kimi_linear(**more: Any) -> dict[str, Any]:
    return _base(
        **{
            "model_type": "kimi_linear",
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "linear_head_dim": 12,
            "linear_num_heads": 4,
            "moe_intermediate_size": 20,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            **more,
        }
    )


def _qwen3_next(**more: Any) -> dict[str, Any]:
    return _base(
        **{
            "model_type": "qwen3_next",
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 24,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            **more,
        }
    )


def _mamba2(**more: Any) -> dict[str, Any]:
    return {
        "model_type": "mamba2",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 12,
        "n_groups": 2,
        "chunk_size": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **more,
    }


def _hybrid(model_type: str, **more: Any) -> dict[str, Any]:
    return _base(
        **{
            "model_type": model_type,
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 12,
            "mamba_chunk_size": 64,
            "num_experts_per_tok": 2,
            **more,
        }
    )


def _nemotron_h(*kinds: str, **more: Any) -> dict[str, Any]:
    return _base(
        **{
            "model_type": "nemotron_h",
            "layers_block_type": list(kinds),
            "head_dim": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 12,
            "n_groups": 2,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "moe_shared_expert_intermediate_size": 24,
            "routed_scaling_factor": 1.7,
            "layer_norm_epsilon": 1e-5,
            "num_hidden_layers": None,
            **more,
        }
    )


def _minimax(**more: Any) -> dict[str, Any]:
    return _base(
        **{
            "model_type": "minimax",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "block_size": 32,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "full_attn_alpha_factor": 1.3,
            "full_attn_beta_factor": 0.8,
            "linear_attn_alpha_factor": 1.1,
            "linear_attn_beta_factor": 0.7,
            "mlp_alpha_factor": 1.2,
            "mlp_beta_factor": 0.9,
            **more,
        }
    )


def _bailing_hybrid(**more: Any) -> dict[str, Any]:
    return _kimi_linear(
        **{
            "model_type": "bailing_hybrid",
            "head_dim": 12,
            "num_local_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_mtp_layers": 0,
            **more,
        }
    )


def _lfm2(**more: Any) -> dict[str, Any]:
    layers = ["conv", "full_attention", "conv"]
    return _base(**{"model_type": "lfm2", "layer_types": layers, "block_multiple_of": 8, **more})


def _mamba(**more: Any) -> dict[str, Any]:
    return {
        "model_type": "mamba",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 6,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **more,
    }


def _jamba(**more: Any) -> dict[str, Any]:
    return _base(
        **{
            "model_type": "jamba",
            "mamba_d_state": 6,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            **more,
        }
    )


def _falcon_h1(**more: Any) -> dict[str, Any]:
    return _hybrid(
        "falcon_h1",
        **{
            "head_dim": 8,
            "mamba_d_ssm": 64,
            "num_hidden_layers": 2,
            "attention_in_multiplier": 0.8,
            "attention_out_multiplier": 1.1,
            "key_multiplier": 0.6,
            "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 0.9,
            "ssm_multipliers": [1.1, 0.9, 1.2, 0.8, 1.05],
            "mlp_multipliers": [0.9, 1.2],
            "embedding_multiplier": 1.5,
            "lm_head_multiplier": 0.7,
            **more,
        },
    )


TINY: dict[str, Tiny] = {
    "kimi_linear": Tiny(_kimi_linear(), 70, shards=2),
    "qwen3_next": Tiny(_qwen3_next(), 70, shards=2),
    "qwen3_next-dense": Tiny(_qwen3_next(num_experts=0, attention_bias=True, linear_conv_kernel_dim=3)),
    "qwen3_5": Tiny(_qwen3_next(model_type="qwen3_5_text", num_experts=None), 70),
    "qwen3_5_moe": Tiny(_qwen3_next(model_type="qwen3_5_moe_text", linear_num_key_heads=4)),
    "mamba2": Tiny(_mamba2(), 70),
    "mamba2-bias": Tiny(_mamba2(use_bias=True, use_conv_bias=False, n_groups=1)),
    "bamba": Tiny(_hybrid("bamba", attn_layer_indices=[1]), 70),
    "bamba-bias": Tiny(_hybrid("bamba", attn_layer_indices=[0], attention_bias=True, mlp_bias=True, mamba_n_groups=2)),
    "granitemoehybrid": Tiny(
        _hybrid(
            "granitemoehybrid",
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            num_local_experts=4,
            shared_intermediate_size=24,
            embedding_multiplier=2.0,
            logits_scaling=3.0,
            residual_multiplier=0.7,
            attention_multiplier=0.4,
        ),
        70,
    ),
    "granitemoehybrid-dense": Tiny(
        _hybrid(
            "granitemoehybrid",
            layer_types=["full_attention", "linear_attention", "linear_attention"],
            num_local_experts=0,
            shared_intermediate_size=24,
            position_embedding_type="rope",
            mamba_proj_bias=True,
        )
    ),
    "bailing_hybrid": Tiny(_bailing_hybrid(), 40),
    "bailing_hybrid-unbounded": Tiny(_bailing_hybrid(kda_safe_gate=False, q_lora_rank=20, first_k_dense_replace=0)),
    "olmo_hybrid": Tiny(
        _base(
            model_type="olmo_hybrid",
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            linear_key_head_dim=12,  # as wide as the values: the reference saves its filters in three equal parts
            linear_value_head_dim=6,
            linear_num_value_heads=8,
        ),
        70,
    ),
    "olmo_hybrid-rope": Tiny(
        _base(
            model_type="olmo_hybrid",
            layer_types=["full_attention", "linear_attention"],
            num_hidden_layers=2,
            linear_allow_neg_eigval=False,
            linear_value_head_dim=6,
            **rope("default"),
        )
    ),
    "mamba": Tiny(_mamba()),
    "falcon_mamba": Tiny(_mamba(model_type="falcon_mamba", use_bias=True, tie_word_embeddings=False), 40),
    "jamba": Tiny(_jamba(), 40),
    "jamba-dense": Tiny(_jamba(num_experts=1, mamba_proj_bias=True, mamba_conv_bias=False, mamba_dt_rank=5)),
    "falcon_h1": Tiny(_falcon_h1(), 70),
    "falcon_h1-norm": Tiny(_falcon_h1(mamba_rms_norm=True, mamba_n_groups=2, projectors_bias=True, mlp_bias=True)),
    "falcon_h1-norm-behind": Tiny(
        _falcon_h1(mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_proj_bias=True, attention_bias=True)
    ),
    "lfm2": Tiny(_lfm2()),
    "lfm2-bias": Tiny(_lfm2(conv_bias=True, conv_L_cache=4, block_auto_adjust_ff_dim=False, tie_word_embeddings=True)),
    "lfm2_moe": Tiny(
        _lfm2(
            model_type="lfm2_moe",
            num_dense_layers=1,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=20,
            routed_scaling_factor=1.6,
        )
    ),
    "lfm3": Tiny(
        _lfm2(
            model_type="lfm3",
            layer_types=["conv", "sliding_attention", "full_attention"],
            head_dim=12,
            sliding_window=9,
            block_multiple_of=None,
        ),
        40,
    ),
    "lfm3-plain": Tiny(
        _lfm2(
            model_type="lfm3",
            layer_types=["full_attention", "conv"],
            num_hidden_layers=2,
            use_sandwich_norm=False,
            use_attention_gate=False,
            conv_bias=True,
            attention_bias=True,
            block_multiple_of=None,
        )
    ),
    "lara_mini": Tiny(
        _qwen3_next(
            model_type="lara_mini",
            layer_types=["linear_attention", "sliding_attention", "full_attention"],
            sliding_window=9,
            intermediate_size=None,
        ),
        40,
    ),
    "recurrent_gemma": Tiny(
        _base(
            model_type="recurrent_gemma",
            block_types=["recurrent", "attention"],
            lru_width=32,
            attention_window_size=9,
            tie_word_embeddings=True,
        ),
        40,
    ),
    "minimax": Tiny(_minimax(), 70),
    "minimax-gelu": Tiny(_minimax(head_dim=12, hidden_act="gelu"), 40),
    "nemotron_h": Tiny(_nemotron_h("linear_attention", "moe", "full_attention", "mlp"), 70),
    "nemotron_h-latent": Tiny(
        _nemotron_h("moe", "linear_attention", "full_attention", moe_latent_size=16, use_bias=True)
    ),
    "nemotron_h-bias": Tiny(
        _nemotron_h("mlp", "linear_attention", "full_attention", "moe", mlp_bias=True, use_conv_bias=False)
    ),
}
MESHES: dict[str, tuple[str, ...]] = {
    "kimi_linear": ("tp2", "pp2 ep2"),
    "qwen3_next": ("tp2", "pp2 ep2"),
    "qwen3_5": ("tp2", "pp2"),
    "qwen3_5_moe": ("tp2 ep2",),
    "mamba2": ("tp2",),
    "bamba": ("tp2", "pp2"),
    "granitemoehybrid": ("tp2 ep2",),
    "bailing_hybrid": ("tp2 ep2",),
    "olmo_hybrid": ("tp2",),
    "mamba": ("tp2",),
    "falcon_mamba": ("pp2",),
    "jamba": ("tp2 ep2",),
    "falcon_h1": ("tp2",),
    "lfm2": ("tp2",),
    "lfm3": ("tp2",),
    "lara_mini": ("tp2 ep2",),
    "lfm2_moe": ("tp2 ep2",),
    "recurrent_gemma": ("tp2",),
    "minimax": ("tp2", "pp2 ep2"),
    "nemotron_h": ("tp2", "pp2 ep2"),
}
STEPPED: tuple[str, ...] = (
    "kimi_linear",
    "qwen3_next",
    "qwen3_5",
    "mamba2",
    "granitemoehybrid",
    "nemotron_h",
    "minimax",
    "lfm2",
    "jamba",
    "falcon_h1",
    "recurrent_gemma",
)
