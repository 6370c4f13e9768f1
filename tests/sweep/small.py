"""Configurations: any architecture made tiny, and one key at a time set to another value that is valid."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

Raw = dict[str, Any]
VOCAB = 257
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "intermediate_size": 48,
    "ffn_hidden_size": 48,
    "intermediate_size_mlp": 48,
    "dense_intermediate_size": 48,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "n_layers": 4,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "sliding_window": 7,
    "attention_chunk_size": 9,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 24,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_k": 3,
    "moe_topk": 3,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "index_n_heads": 8,
    "index_head_dim": 12,
    "index_topk": 6,
    "rotary_dim": 4,
    "expert_ffn_hidden_size": 20,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 8,
    "mamba_head_dim": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
    "ssm_state_size": 8,
    "state_size": 8,
    "time_step_rank": 4,
    "mamba_dt_rank": 4,
    "chunk_size": 8,
    "num_heads": 8,
    "n_groups": 2,
    "lru_width": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "word_embed_proj_dim": 32,
    "ffn_dim": 48,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "image_size": 16,
    "patch_size": 4,
    "depth": 2,
    "embed_dim": 24,
    "out_hidden_size": 32,
    "projection_dim": 16,
}
ROPES: Mapping[str, Raw] = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "yarn-mscale": {
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 0.6,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn-factor": {"factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.4},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "partial": {"partial_rotary_factor": 0.5},
    "theta": {"rope_theta": 77.0},
}
NOT_MATHEMATICS = frozenset(
    """model_type architectures dtype torch_dtype transformers_version vocab_size bos_token_id eos_token_id pad_token_id
    use_cache output_hidden_states output_attentions return_dict chunk_size_feed_forward is_encoder_decoder id2label
    label2id problem_type initializer_range num_hidden_layers image_token_id image_token_index video_token_id
    hidden_size intermediate_size n_embd d_model moe_intermediate_size
    vision_start_token_id vision_end_token_id num_labels output_router_logits _name_or_path""".split()
)


def tiny(model_type: str, **more: Any) -> Raw:
    """The class's own defaults, with the sizes that it has made small."""
    import transformers

    config = transformers.CONFIG_MAPPING[model_type]
    known = config().to_dict()
    raw = _small(known)
    for part in ("text_config", "vision_config"):
        if isinstance(known.get(part), dict):
            raw[part] = {
                **({"model_type": known[part]["model_type"]} if "model_type" in known[part] else {}),
                **_small(known[part]),
            }
    return {**raw, **more, "model_type": model_type}


def _small(known: Mapping[str, Any]) -> Raw:
    raw = {key: value for key, value in SIZES.items() if key in known}
    if "kv_lora_rank" in raw and "num_key_value_heads" in raw:
        raw["num_key_value_heads"] = raw["num_attention_heads"]
    if "num_hidden_layers" in raw and isinstance(known.get("layer_types"), list):
        kinds = list(dict.fromkeys(known["layer_types"]))
        raw["layer_types"] = [kinds[i % len(kinds)] for i in range(raw["num_hidden_layers"])]
    if isinstance(known.get("mlp_layer_types"), list):
        kinds = list(dict.fromkeys(known["mlp_layer_types"]))
        raw["mlp_layer_types"] = [kinds[i % len(kinds)] for i in range(raw["num_hidden_layers"])]
    return raw


def flips(full: Mapping[str, Any], level: tuple[str, ...] = ()) -> Iterator[tuple[str, Raw]]:
    """(what was changed, nested changes) for every key of a full configuration that has another valid value."""
    for key, value in full.items():
        if key in NOT_MATHEMATICS or key.startswith("_"):
            continue
        if isinstance(value, Mapping):
            if "rope_type" in value or "rope_theta" in value:
                yield from _ropes(level, key, value)
            elif key in ("text_config", "vision_config"):
                yield from flips(value, (*level, key))
            elif key == "rope_parameters":
                for kind, inner in value.items():
                    if isinstance(inner, Mapping):
                        for name, fields in ROPES.items():
                            changed = {**value, kind: _rope(inner, name, fields)}
                            yield f"{'.'.join((*level, key, kind))} = {name}", _nest(level, key, changed)
            continue
        for other in _others(key, value):
            yield f"{'.'.join((*level, key))} = {other!r:.60}", _nest(level, key, other)


def _rope(old: Mapping[str, Any], name: str, fields: Raw) -> Raw:
    kind = {"partial": old.get("rope_type", "default"), "theta": old.get("rope_type", "default")}.get(
        name, name.partition("-")[0]
    )
    kept = {k: v for k, v in old.items() if k in ("rope_theta", "partial_rotary_factor", "mrope_section")}
    return {**(old if name in ("partial", "theta") else kept), "rope_type": kind, **fields}


def _ropes(level: tuple[str, ...], key: str, value: Mapping[str, Any]) -> Iterator[tuple[str, Raw]]:
    for name, fields in ROPES.items():
        yield f"{'.'.join((*level, key))} = {name}", _nest(level, key, _rope(value, name, fields))


def _nest(level: tuple[str, ...], key: str, value: Any) -> Raw:
    change: Raw = {key: value}
    for part in reversed(level):
        change = {part: change}
    return change


def merged(raw: Mapping[str, Any], change: Mapping[str, Any]) -> Raw:
    """`raw` with `change` over it, level by level (rope parameters are replaced whole)."""
    result = copy.deepcopy(dict(raw))
    for key, value in change.items():
        nested = key in ("text_config", "vision_config") and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if nested else copy.deepcopy(value)
    return result


def _others(key: str, value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if key.endswith(("_act", "activation", "activation_function", "hidden_activation")) or value in ("silu", "gelu"):
        return [name for name in ("gelu", "relu2", "gelu_new", "quick_gelu", "mish") if name != value]
    if isinstance(value, float):
        if "eps" in key:
            return [0.02]
        return [value * 0.6 + 0.17] if value <= 1 else [value * 1.7]
    if isinstance(value, int):
        return [value + 1] if value < 2 else [value // 2]
    if isinstance(value, list) and len(set(map(str, value))) > 1:
        return [value[::-1], value[1:] + value[:1]]
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return []
    if value is None:
        return {"sliding_window": [6], "head_dim": [12], "q_lora_rank": [20], "clip_qkv": [0.8]}.get(
            key, [0.7] if key.endswith(("scale", "softcapping", "multiplier", "_factor", "clip", "limit")) else []
        )
    return {"topk_method": ["greedy", "group_limited_greedy"], "scoring_func": ["softmax", "sigmoid"]}.get(key, [])
