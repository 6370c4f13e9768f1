"""Tiny models in which layers share, choose or weigh keys in ways that neither a window nor a rotation says."""

from typing import Any

from tests.families.tiny import VOCAB, Tiny, llama, rope

_QUARTER = rope("default", partial_rotary_factor=0.25)


def _minimax_m3(**more: Any) -> dict[str, Any]:
    return llama(
        **{
            "model_type": "minimax_m3_vl_text",
            "num_key_value_heads": 2,
            "head_dim": 12,
            "rotary_dim": 6,
            "intermediate_size": 20,
            "dense_intermediate_size": 48,
            "shared_intermediate_size": 24,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 1.7,
            "swiglu_limit": 1.5,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
            "index_n_heads": 2,
            "index_head_dim": 10,
            "index_block_size": 4,
            "index_topk_blocks": 3,
            "index_local_blocks": 1,
            **rope("default", 5000.0, partial_rotary_factor=0.5),
            **more,
        }
    )


def _gemma4(**more: Any) -> dict[str, Any]:
    return llama(
        model_type="gemma4_text",
        head_dim=8,
        global_head_dim=16,
        sliding_window=7,
        tie_word_embeddings=True,
        **{"layer_types": ["sliding_attention", "full_attention", "full_attention"], **more},
    )


def _old(model_type: str) -> dict[str, Any]:
    return {"model_type": model_type, "vocab_size": 131, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


TINY: dict[str, Tiny] = {
    "minimax_m3": Tiny(_minimax_m3(), 40),
    # Four index heads over two key heads, two local blocks, under the keys of releases
    "minimax_m3-older-keys": Tiny(
        _minimax_m3(num_hidden_layers=2, mlp_layer_types=None, layer_types=["minimax_m3_sparse"] * 2, index_n_heads=4),
        40,
        fields={
            "mlp_layer_types": None,
            "layer_types": None,
            "moe_layer_freq": [1, 1],
            "hidden_act": "swigluoai",
            "sparse_attention_config": {
                "use_sparse_attention": True,
                "sparse_attention_freq": [1, 1],
                "sparse_disable_index_value": [1, 1],
                "sparse_num_index_heads": 4,
                "sparse_index_dim": 10,
                "sparse_block_size": 4,
                "sparse_topk_blocks": 4,
                "sparse_init_block": 0,
                "sparse_local_block": 2,
                "sparse_score_type": "max",
            },
        },
    ),
    # heads that are no power of two
    "bloom": Tiny(
        {
            **_old("bloom"),
            "hidden_size": 48,
            "n_head": 6,
            "n_layer": 2,
        }
    ),
    "bloom-onto-norms": Tiny(
        {
            **_old("bloom"),
            "hidden_size": 32,
            "n_head": 4,
            "n_layer": 2,
            "apply_residual_connection_post_layernorm": True,
        }
    ),
    "falcon-alibi": Tiny(
        llama(
            model_type="falcon",
            alibi=True,
            bias=True,
            multi_query=False,
            parallel_attn=False,
            num_hidden_layers=2,
            ffn_hidden_size=48,
        ),
        40,
    ),
    "gemma4-own-inputs": Tiny(_gemma4(hidden_size_per_layer_input=6, vocab_size_per_layer_input=VOCAB)),
    "gemma4-experts": Tiny(
        _gemma4(
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=8,
            top_k_experts=3,
            moe_intermediate_size=20,
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
        )
    ),
    "gemma4-shared-keys": Tiny(
        _gemma4(
            num_hidden_layers=5,
            num_kv_shared_layers=2,
            use_double_wide_mlp=True,
            attention_k_eq_v=True,
            hidden_size_per_layer_input=6,
            vocab_size_per_layer_input=VOCAB,
            layer_types=["full_attention", "sliding_attention"] * 2 + ["full_attention"],
        ),
        40,
    ),
    "stablelm-norms": Tiny(llama(model_type="stablelm", qk_layernorm=True, num_hidden_layers=2, **_QUARTER)),
    "mpt": Tiny(
        {
            **_old("mpt"),
            "d_model": 48,
            "n_heads": 6,
            "n_layers": 2,
            "max_seq_len": 64,
            "attn_config": {"clip_qkv": 1.1, "softmax_scale": 0.3},
        }
    ),
}
MESHES: dict[str, tuple[str, ...]] = {
    "bloom": ("tp2 pp2", "tp3"),
    "falcon-alibi": ("tp2 pp2",),
    "gemma4-experts": ("tp2 ep2", "pp2"),
    "gemma4-own-inputs": ("tp2 pp2",),
    "gemma4-shared-keys": ("tp2", "pp2"),
    "minimax_m3": ("tp2 ep2", "pp2", "tp4"),
    "mpt": ("tp3",),
    "stablelm-norms": ("tp2 pp2", "tp4"),  # two key heads: at tp 4 two ranks each have the same
}
STEPPED = ("bloom", "falcon-alibi", "gemma4-own-inputs", "gemma4-shared-keys", "minimax_m3", "mpt")
