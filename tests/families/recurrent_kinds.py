"""Tiny models of layers that keep a state: linear attention, state spaces, short convolutions."""

from typing import Any

from tests.families.tiny import Tiny, llama


def _kimi_linear(**more: Any) -> dict[str, Any]:
    return llama(
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


TINY: dict[str, Tiny] = {
    "kimi_linear": Tiny(_kimi_linear(), 70, shards=2),
}
MESHES: dict[str, tuple[str, ...]] = {"kimi_linear": ("tp2", "pp2 ep2")}
STEPPED: tuple[str, ...] = ("kimi_linear",)
