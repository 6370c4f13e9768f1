"""Tiny models whose experts are chosen, weighed, computed, shared or stored in a way that Mixtral has not."""

from typing import Any

from tests.families.tiny import VOCAB, Tiny, llama, rope

GROUPED = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
}
YARN = rope(
    "yarn",
    150000.0,
    factor=32.0,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
    original_max_position_embeddings=16,
)


def _moe(model_type: str, **more: Any) -> dict[str, Any]:
    """Experts of `moe_intermediate_size`, beside dense layers of `intermediate_size`."""
    return llama(
        **{"model_type": model_type, "head_dim": 8, "moe_intermediate_size": 20, "num_experts_per_tok": 3, **more}
    )


def _eight(model_type: str, **more: Any) -> dict[str, Any]:
    """Eight experts of `intermediate_size` on every layer."""
    return llama(
        **{"model_type": model_type, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 20, **more}
    )


def _without(keys: dict[str, Any], *names: str, **more: Any) -> dict[str, Any]:
    return {**{key: value for key, value in keys.items() if key not in names}, **more}


TINY: dict[str, Tiny] = {
    # softmax
    "qwen2_moe": Tiny(
        _moe("qwen2_moe", num_experts=8, shared_expert_intermediate_size=24, mlp_only_layers=[0]), shards=2
    ),
    "qwen2_moe-step": Tiny(
        _moe(
            "qwen2_moe",
            num_experts=8,
            shared_expert_intermediate_size=24,
            decoder_sparse_step=2,
            norm_topk_prob=True,
            qkv_bias=False,
            use_sliding_window=True,
            sliding_window=6,
            max_window_layers=2,
            num_hidden_layers=4,
        )
    ),
    "ernie4_5_moe": Tiny(_moe("ernie4_5_moe", moe_num_experts=8, moe_k=3, moe_num_shared_experts=2, use_bias=True)),
    "ernie4_5_moe-range": Tiny(
        _moe(
            "ernie4_5_moe",
            moe_num_experts=8,
            moe_k=3,
            moe_num_shared_experts=0,
            moe_layer_start_index=0,
            moe_layer_end_index=3,
            moe_layer_interval=2,
            num_hidden_layers=5,
            moe_norm_min=0.9,
            tie_word_embeddings=True,
        )
    ),
    "hunyuan_v1_moe": Tiny(
        _moe(
            "hunyuan_v1_moe",
            num_experts=8,
            moe_topk=[3, 3, 3],
            attention_bias=True,
            **rope("dynamic", alpha=100.0, factor=1.0),
        )
    ),
    "olmoe": Tiny(_eight("olmoe", num_experts=8, clip_qkv=0.8)),
    "olmoe-normalized": Tiny(_eight("olmoe", num_experts=8, norm_topk_prob=True, attention_bias=True)),
    "flex_olmo": Tiny(_eight("flex_olmo", num_experts=8)),
    # softmax of the chosen
    "gpt_oss": Tiny(_eight("gpt_oss", head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=7), 40),
    "gpt_oss-limits": Tiny(
        _eight(
            "gpt_oss",
            head_dim=8,
            num_local_experts=4,
            sliding_window=7,
            swiglu_limit=0.8,
            swiglu_alpha=1.2,
            attention_bias=False,
            max_position_embeddings=512,
            **YARN,
        ),
        40,
    ),
    "granitemoe": Tiny(_eight("granitemoe")),
    "granitemoeshared": Tiny(
        _eight(
            "granitemoeshared",
            shared_intermediate_size=24,
            attention_multiplier=0.4,
            residual_multiplier=0.3,
            embedding_multiplier=3.0,
            logits_scaling=0.7,
            attention_bias=True,
        )
    ),
    "cohere2_moe": Tiny(
        _moe("cohere2_moe", num_experts=8, num_shared_experts=1, sliding_window=7, sliding_window_pattern=2)
    ),
    "cohere2_moe-dense": Tiny(
        _moe(
            "cohere2_moe",
            num_experts=8,
            num_shared_experts=2,
            sliding_window=7,
            sliding_window_pattern=2,
            expert_selection_fn="sigmoid",
            shared_expert_combination_strategy="sum",
            mlp_layer_types=["dense", "sparse", "sparse"],
            prefix_dense_intermediate_size=28,
            tie_word_embeddings=True,
            logit_scale=2.0,
            attention_bias=True,
            rms_norm_eps=1e-3,
        )
    ),
    "dbrx": Tiny(
        {
            "model_type": "dbrx",
            "vocab_size": VOCAB,
            "d_model": 40,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.8, "rope_theta": 5000.0},
            "ffn_config": {"ffn_hidden_size": 20, "moe_num_experts": 4, "moe_top_k": 2},
            **rope("yarn", 5000.0, factor=2.0, original_max_position_embeddings=32),
        }
    ),
    # some experts free of charge
    "longcat_flash": Tiny(
        _moe(
            "longcat_flash",
            **LATENT,
            num_hidden_layers=4,
            n_routed_experts=8,
            zero_expert_num=4,
            moe_topk=3,
            ffn_hidden_size=40,
            expert_ffn_hidden_size=20,
        )
    ),
    # one expert after the other
    "phimoe": Tiny(
        _eight(
            "phimoe",
            num_local_experts=4,
            num_experts_per_tok=2,
            attention_bias=True,
            lm_head_bias=True,
            router_jitter_noise=0.2,
            sliding_window=9,
        ),
        40,
    ),
    # sigmoid
    "minimax_m2": Tiny(_eight("minimax_m2", head_dim=8, rotary_dim=4)),
    "dots1": Tiny(_moe("dots1", **GROUPED, first_k_dense_replace=1, sliding_window=7, max_window_layers=2)),
    "exaone_moe": Tiny(
        _moe(
            "exaone_moe",
            num_experts=8,
            num_shared_experts=2,
            n_group=4,
            topk_group=2,
            sliding_window=7,
            sliding_window_pattern=2,
        )
    ),
    "flint": Tiny(_moe("flint", num_experts=8, shared_expert_intermediate_size=24, sliding_window=7)),
    "hy_v3": Tiny(
        _moe(
            "hy_v3",
            num_experts=8,
            num_shared_experts=2,
            router_scaling_factor=1.7,
            mlp_bias=True,
            attention_bias=True,
            mlp_layer_types=["sparse", "dense", "sparse"],
        )
    ),
    "kolibri1": Tiny(_moe("kolibri1", num_local_experts=8, shared_expert_intermediate_size=24, sliding_window=7)),
    "kolibri1-normalized": Tiny(
        _moe(
            "kolibri1",
            num_local_experts=8,
            shared_expert_intermediate_size=24,
            sliding_window=7,
            norm_topk_prob=True,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
        )
    ),
    "solar_open": Tiny(_moe("solar_open", **GROUPED, attention_bias=True)),
    "afmoe": Tiny(
        _moe(
            "afmoe",
            num_experts=8,
            num_shared_experts=2,
            sliding_window=7,
            global_attn_every_n_layers=2,
            mup_enabled=True,
            route_scale=1.7,
        )
    ),
    "laguna": Tiny(_moe("laguna", num_experts=8, shared_expert_intermediate_size=24)),
    "laguna-heads": Tiny(
        _moe(
            "laguna",
            num_experts=8,
            shared_expert_intermediate_size=24,
            moe_router_logit_softcapping=2.0,
            moe_routed_scaling_factor=1.7,
            gating="per-element",
            num_attention_heads_per_layer=[4, 2, 8],
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            sliding_window=7,
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 70000.0, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
            },
            mlp_layer_types=["sparse", "dense", "sparse"],
        )
    ),
    "axk1": Tiny(_without(_moe("axk1", **GROUPED, **LATENT), "head_dim", first_k_dense_replace=1)),
    "sarvam_moe": Tiny(_moe("sarvam_moe", **GROUPED, attention_bias=True)),
    "sarvam_mla": Tiny(_without(_moe("sarvam_mla", **GROUPED, **LATENT), "head_dim")),
    "mellum": Tiny(
        _moe(
            "mellum",
            num_local_experts=8,
            sliding_window=7,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            mlp_layer_types=["sparse", "dense", "sparse"],
        )
    ),
    "granitemoe_swa": Tiny(
        _moe(
            "granitemoe_swa",
            num_local_experts=8,
            shared_intermediate_size=24,
            attention_multiplier=0.4,
            sliding_window=7,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            layer_rope_theta=[0, 10000.0, 300.0],
        )
    ),
}
MESHES: dict[str, tuple[str, ...]] = {
    "qwen2_moe": ("tp2", "ep2", "tp2 ep2", "pp2"),
    "ernie4_5_moe": ("tp2", "tp2 ep2", "pp2"),
    "hunyuan_v1_moe": ("tp2 ep2", "pp2"),
    "olmoe": ("tp2", "tp2 ep2", "pp2"),
    "gpt_oss": ("tp2", "ep2", "tp2 ep2", "pp2"),
    "granitemoeshared": ("tp2 ep2", "pp2"),
    "cohere2_moe-dense": ("tp2", "tp2 ep2", "pp2"),
    "dbrx": ("tp2 ep2", "pp2"),
    "longcat_flash": ("tp2", "tp2 ep2", "pp2"),
    "phimoe": ("tp2", "tp2 ep2", "pp2"),
    "minimax_m2": ("tp2", "tp2 ep2", "pp2"),
    "dots1": ("tp2 ep2",),
    "flint": ("tp2 ep2", "pp2"),
    "laguna-heads": ("tp2", "tp2 ep2", "pp2"),
    "hy_v3": ("tp2", "tp2 ep2"),
    "afmoe": ("tp2", "tp2 ep2", "pp2"),
    "axk1": ("tp2 ep2", "pp2"),
    "sarvam_moe": ("tp2 ep2", "pp2"),
    "mellum": ("tp2 ep2", "pp2"),
    "granitemoe_swa": ("tp2 ep2", "pp2"),
}
STEPPED: tuple[str, ...] = ("gpt_oss", "cohere2_moe", "longcat_flash", "phimoe", "afmoe")
