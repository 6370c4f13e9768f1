"""What an architecture's own code takes where its config.json is silent, and most of its kin take another value.

A null is no silence: it is the file's own word. Shared experts, which go by several names, stand in `mixtures.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from firstlight.engine.model.config import Config

KEY_HEADS: Mapping[int, str] = MappingProxyType(
    {  # num_key_value_heads; of all others as many as query heads
        2: """ernie4_5 glm glm4 glm4v glm4v_text internlm3 qwen3_5_moe_text qwen3_next starcoder2""",
        4: """ernie4_5_moe flint gemma2 gemma3_text gemma4_text granite_swa kolibri1 lara_mini lfm3 mellum
        mimo_v2_flash minimax_m3_vl minimax_m3 minimax_m3_vl_text qwen3_5_text qwen3_moe sarvam_moe smollm3
        vaultgemma""",
        8: """bamba cwm exaone falcon_h1 glm4_moe glm4v_moe_text gpt_oss hy_v3 iquestcoder jamba laguna lfm2 lfm2_moe
        llama4_text minimax minimax_m2 ministral ministral3 mistral mixtral nemotron_h phimoe qwen2_vl qwen2_vl_text
        qwen2_5_vl qwen2_5_vl_text seed_oss solar_open""",
    }
)
_GROUPS = {"n_group": 8, "topk_group": 4}
OTHERS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "axk1": _GROUPS,
        "cwm": {"sliding_window": 8192},
        "deepseek_v3": _GROUPS,
        "deepseek_v32": _GROUPS,
        "flint": {"shared_expert_intermediate_size": 1024},
        "glm4_moe_lite": {"q_lora_rank": 768},
        "glm_moe_dsa": {"q_lora_rank": 2048},
        "granitemoehybrid": {"num_local_experts": 8},
        "kimi_k2": _GROUPS,
        "kolibri1": {"shared_expert_intermediate_size": 512},
        "lara_mini": {"linear_num_key_heads": 8, "linear_num_value_heads": 16},
        "lfm2_moe": {"intermediate_size": 7168},
        "minicpm3": {"q_lora_rank": 768},
        "ministral": {"sliding_window": 4096},
        "mistral4": {"q_lora_rank": 1024},
    }
)


def assumed(config: Config) -> None:
    """Make `config` say what its architecture takes where it says nothing; to be called before anything is read."""
    model_type = str(config.raw.get("model_type"))
    heads = next((count for count, types in KEY_HEADS.items() if model_type in types.split()), None)
    config.assume(**({} if heads is None else {"num_key_value_heads": heads}), **OTHERS.get(model_type, {}))
