"""Tiny models whose attention, positions or norms are of a kind that Llama has not."""

from typing import Any

import torch

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


def _latent(model_type: str, **more: Any) -> dict[str, Any]:
    return llama(
        **{
            "model_type": model_type,
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "moe_intermediate_size": 20,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.7,
            "max_position_embeddings": 4096,
            **more,
        }
    )


def _sparse(model_type: str, **more: Any) -> dict[str, Any]:
    """Eight index heads: with fewer, many scores are exactly zero, and single steps choose others of them."""
    return _latent(
        model_type,
        **{"n_group": 1, "topk_group": 1, "index_n_heads": 8, "index_head_dim": 12, "index_topk": 10, **more},
    )


ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]

OLD = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": 131, "eos_token_id": 2}

TINY: dict[str, Tiny] = {
    # Llama's layout with another number or flag
    "arcee": Tiny(_kind("arcee", head_dim=8, hidden_act="relu2", mlp_bias=True)),
    "cwm": Tiny(_kind("cwm", head_dim=8, num_hidden_layers=4, sliding_window=7), 40),
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
    "granite_swa": Tiny(_kind("granite_swa", sliding_window=7, layer_types=ALTERNATING, attention_bias=True), 40),
    "hyperclovax": Tiny(_kind("hyperclovax", logits_scaling=0.7, residual_multiplier=0.3, attention_multiplier=0.4)),
    "exaone": Tiny(_kind("exaone", attention_bias=True, mlp_bias=True, head_dim=12)),
    "jais2": Tiny(_kind("jais2", head_dim=8)),
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
    # Two of its numbers are tensors without dims; in bfloat16 they are converted on their way.
    "apertus": Tiny(_kind("apertus", attention_bias=True), stored=torch.bfloat16),
    "cohere": Tiny(_kind("cohere", use_qk_norm=True, logit_scale=0.3, tie_word_embeddings=True, layer_norm_eps=1e-5)),
    "cohere2": Tiny(
        _kind("cohere2", sliding_window=7, layer_types=ALTERNATING, attention_bias=True, layer_norm_eps=1e-5), 40
    ),
    "exaone4": Tiny(_kind("exaone4", sliding_window=7, sliding_window_pattern=2, head_dim=12), 40),
    "exaone4-full": Tiny(_kind("exaone4", sliding_window=None, layer_types=["full_attention"] * 3)),
    "falcon": Tiny(
        _kind(
            "falcon", new_decoder_architecture=True, num_kv_heads=2, bias=True, ffn_hidden_size=48, num_hidden_layers=2
        )
    ),
    "falcon-one-key-head": Tiny(_kind("falcon", multi_query=True, num_hidden_layers=2)),
    "gptj": Tiny({**OLD, "model_type": "gptj", "rotary_dim": 4}),
    "gpt_bigcode": Tiny({**OLD, "model_type": "gpt_bigcode"}),
    "gpt_bigcode-heads": Tiny({**OLD, "model_type": "gpt_bigcode", "multi_query": False}),
    "persimmon": Tiny(_kind("persimmon", num_key_value_heads=4, num_hidden_layers=2)),
    "gpt_neox": Tiny(_kind("gpt_neox", num_key_value_heads=4)),
    "hunyuan_v1_dense": Tiny(
        _kind("hunyuan_v1_dense", head_dim=12, **rope("dynamic", alpha=50.0, factor=1.0)),
    ),
    "mimo_v2_flash": Tiny(
        _kind(
            "mimo_v2_flash",
            head_dim=12,
            v_head_dim=10,
            num_key_value_heads=1,
            sliding_window=7,
            layer_types=ALTERNATING,
            mlp_layer_types=["dense", "sparse", "sparse"],
            moe_intermediate_size=20,
            n_routed_experts=8,
            num_experts_per_tok=3,
            **_by_kind(
                {"rope_theta": 5000.0, "partial_rotary_factor": 0.34},
                {"rope_theta": 300.0, "partial_rotary_factor": 0.5},
            ),
        ),
        40,
    ),
    "glm4_moe_lite": Tiny(_latent("glm4_moe_lite", mlp_layer_types=["dense", "sparse", "sparse"])),
    "minicpm3": Tiny(
        _kind(
            "minicpm3",
            num_key_value_heads=4,
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_nope_head_dim=12,
            qk_rope_head_dim=8,
            v_head_dim=10,
            scale_emb=2.5,
            scale_depth=1.1,
            dim_model_base=24,
        )
    ),
    "nemotron": Tiny(_kind("nemotron", mlp_bias=True, attention_bias=True, hidden_act="relu2", norm_eps=1e-5)),
    "stablelm": Tiny(_kind("stablelm", use_qkv_bias=True, head_dim=8, partial_rotary_factor=0.5)),
    "stablelm-parallel": Tiny(_kind("stablelm", use_parallel_residual=True, num_hidden_layers=2)),
    "starcoder2": Tiny(_kind("starcoder2", sliding_window=9, hidden_act="gelu_pytorch_tanh"), 40),
    "youtu": Tiny(
        _kind(
            "youtu",
            num_hidden_layers=2,
            num_key_value_heads=4,
            q_lora_rank=None,
            kv_lora_rank=16,
            qk_nope_head_dim=12,
            qk_rope_head_dim=8,
            v_head_dim=10,
        )
    ),
    "deepseek_v2": Tiny(
        _latent("deepseek_v2", topk_method="group_limited_greedy", n_group=4, topk_group=2, n_shared_experts=2)
    ),
    "deepseek_v2-greedy": Tiny(
        _latent(
            "deepseek_v2",
            q_lora_rank=None,
            **rope("yarn", factor=4.0, mscale=0.7, mscale_all_dim=0.5, original_max_position_embeddings=1024),
        )
    ),
    "deepseek_v32": Tiny(_sparse("deepseek_v32", n_group=4, topk_group=2), 40),
    # One index head: half of the scores are exactly zero, and the choice among them is torch's, of the same row.
    "deepseek_v32-ties": Tiny(_sparse("deepseek_v32", num_hidden_layers=2, index_n_heads=1, index_topk=6), 40),
    "deepseek_v4": Tiny(
        _kind(
            "deepseek_v4",
            num_hidden_layers=4,
            num_key_value_heads=1,
            head_dim=16,
            q_lora_rank=24,
            o_groups=2,
            o_lora_rank=12,
            sliding_window=7,
            layer_types=[
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
            ],
            compress_rates={"compressed_sparse_attention": 3, "heavily_compressed_attention": 8},
            mlp_layer_types=["hash_moe", "moe", "hash_moe", "moe"],
            moe_intermediate_size=20,
            n_routed_experts=8,
            num_experts_per_tok=3,
            routed_scaling_factor=1.7,
            index_n_heads=8,
            index_head_dim=12,
            index_topk=3,
            hc_mult=3,
            hc_sinkhorn_iters=4,
            swiglu_limit=1.5,
            max_position_embeddings=1024,
            **rope("yarn", factor=16.0, original_max_position_embeddings=64),
        ),
        40,
    ),
    "glm_moe_dsa": Tiny(
        _sparse(
            "glm_moe_dsa",
            num_hidden_layers=4,
            indexer_types=["full", "shared", "shared", "full"],
            mlp_layer_types=["dense", "sparse", "dense", "sparse"],
        ),
        40,
    ),
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
    "gemma4": Tiny(
        _kind(
            "gemma4_text",
            head_dim=8,
            global_head_dim=16,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            hidden_size_per_layer_input=0,
            sliding_window=7,
            layer_types=[*ALTERNATING[:2], "full_attention"],
            tie_word_embeddings=True,
        ),
        40,
    ),
    "vaultgemma": Tiny(
        _kind(
            "vaultgemma",
            head_dim=8,
            query_pre_attn_scalar=20,
            sliding_window=8,
            attn_logit_softcapping=4.0,
            **rope("linear", 300.0, factor=3.0),  # of layers with windows too
        ),
        40,
    ),
    "glm": Tiny(_kind("glm", head_dim=16)),
    "glm4": Tiny(_kind("glm4", head_dim=8)),
    "glm4_moe": Tiny(
        _kind(
            "glm4_moe",
            head_dim=8,
            attention_bias=True,
            use_qk_norm=True,
            first_k_dense_replace=1,
            moe_intermediate_size=20,
            n_routed_experts=8,
            num_experts_per_tok=3,
            n_shared_experts=2,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=1.7,
            norm_topk_prob=True,
        )
    ),
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
    "llama4": Tiny(
        _kind(
            "llama4_text",
            head_dim=8,
            intermediate_size=20,
            intermediate_size_mlp=48,
            num_hidden_layers=4,
            no_rope_layers=[1, 0, 1, 0],
            attention_chunk_size=9,
            floor_scale=8,
            attn_scale=0.6,
            interleave_moe_layer_step=2,
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
        40,
    ),
    "llama4-one-expert": Tiny(
        _kind(
            "llama4_text",
            head_dim=8,
            intermediate_size_mlp=48,
            no_rope_layer_interval=2,
            attention_chunk_size=None,
            use_qk_norm=False,
            attn_temperature_tuning=False,
            num_local_experts=4,
            num_experts_per_tok=1,
        )
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
    "deepseek_v2": ("tp2 ep2", "pp2"),
    "deepseek_v4": ("tp2 ep2", "pp2"),
    "deepseek_v32": ("tp2", "pp2 ep2"),
    "glm4_moe": ("tp2 ep2", "pp2"),
    "glm_moe_dsa": ("tp2", "pp2 ep2"),  # the cut is between a layer that chooses and one that takes its choice
    "apertus": ("tp2",),
    "cohere": ("tp2", "tp4"),
    "falcon": ("tp2",),
    "falcon-one-key-head": ("tp2 pp2",),
    "gemma3": ("tp2 pp2",),
    "gpt_neox": ("tp2 pp2",),
    "gptj": ("tp2 pp2",),
    "gpt_bigcode": ("tp2 pp2",),
    "persimmon": ("tp2 pp2",),
    "mimo_v2_flash": ("tp2 ep2",),
    "minicpm3": ("tp2",),
    "nemotron": ("tp2",),
    "starcoder2": ("tp2 pp2",),
    "gemma4": ("tp2",),
    "glm": ("tp4",),
    "glm4": ("tp2 pp2",),
    "gpt2": ("tp2", "pp2"),
    "granite": ("tp2 pp2",),
    "hyperclovax": ("tp2 pp2",),
    "exaone": ("tp2 pp2",),
    "jais2": ("tp2 pp2",),
    "llama4": ("tp2 ep2", "pp2"),
    "olmo2": ("tp2 pp2", "tp4"),  # two key heads: at tp 4 each counts twice in the mean of squares
    "phi": ("tp2 pp2",),
    "phi3": ("tp2 pp2",),
}
STEPPED = (
    "cohere2",
    "deepseek_v2",
    "deepseek_v32",
    "deepseek_v4",
    "gemma3",
    "gemma4",
    "glm4",
    "glm4_moe",
    "glm_moe_dsa",
    "gpt2",
    "granite",
    "llama4",
    "mimo_v2_flash",
    "ministral3",
    "olmo2",
    "olmo3",
)
