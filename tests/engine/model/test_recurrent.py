"""Blocks with a state per sequence: what the reference's own decoding leaves out, totals of releases, refusals."""

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.parallel.census import census
from firstlight.engine.parallel.constraints import violations
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.parallel.plan import totals
from firstlight.engine.weights.formats.registry import stored_format
from firstlight.workbench.reference import Reference
from tests.checkpoints import TINY, edit_config, inputs
from tests.engine.direct import Direct, flatten

Get = Callable[[str], Path]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mamba2", {"time_step_limit": [0.3, 0.9]}),  # the reference's single steps do not know of limits
        ("nemotron_h", {"time_step_min": 0.7}),
        ("granitemoehybrid", {"time_step_limit": [0.1, 0.6]}),
        ("minimax", {"sliding_window": 9}),  # nor do they of MiniMax's window
    ],
)
def test_prompts_equal_the_reference_where_its_single_steps_differ(
    name: str, change: dict[str, Any], checkpoint: Get, tmp_path: Path
) -> None:
    home = tmp_path / name
    home.mkdir()
    for file in checkpoint(name).iterdir():
        (home / file.name).write_bytes(file.read_bytes())
    plain = Direct(home).run(inputs(name))["logits"]
    edit_config(home, **change)
    given = inputs(name)
    _, mask = flatten(given)
    theirs = Reference.open(home).run(given)["logits"][mask]
    ours = Direct(home).run(given)["logits"]
    assert np.abs(ours - theirs).max() <= 2e-5 * np.abs(theirs).max()
    assert np.abs(ours - plain).max() > 1e-2, "the key changes nothing here"


def test_the_totals_of_qwen3_5() -> None:
    """Qwen3.5-397B-A17B: 396.8 billion text and vision, as its reference counts; 403.4 with the extra layer."""
    raw = json.loads(resources.files("firstlight.data").joinpath("models", "qwen3.5-397b-a17b.json").read_bytes())
    spec, matcher = FAMILIES.describe(raw)
    found = totals(spec, stored_format(raw, spec.dtype, matcher.rules))
    assert found.parameters == 396_802_360_816
    experts = 512 * 3 * 4096 * 1024 + 512 * 4096 + 3 * 4096 * 1024 + 4096
    attention = 4096 * (2 * 32 + 2 + 2) * 256 + 32 * 256 * 4096 + 2 * 256
    assert found.mtp_parameters == experts + attention + 2 * 4096 + 3 * 4096 + 2 * 4096 * 4096
    assert found.kv_bytes_per_token == 15 * 2 * 2 * 256 * 2, "15 layers of attention, K and V, 2 heads of 256, bf16"
    assert found.state_bytes_per_sequence == 45 * 64 * 128 * 128 * 4, "45 layers, 64 heads of 128 x 128, float32"


KIMI_LINEAR = {
    "model_type": "kimi_linear",
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [index for index in range(1, 27) if index % 4],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
NEMOTRON_3_NANO = {
    "model_type": "nemotron_h",
    "chunk_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 128,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "mamba_head_dim": 64,
    "mamba_num_heads": 64,
    "mamba_ssm_cache_dtype": "float32",
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_groups": 8,
    "n_routed_experts": 128,
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 1.0,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "ssm_state_size": 128,
    "time_step_limit": [0.0, float("inf")],
    "use_conv_bias": True,
    "vocab_size": 131072,
}
LFM2_1B2 = {
    "model_type": "lfm2",
    "block_auto_adjust_ff_dim": True,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "block_use_swiglu": True,
    "conv_L_cache": 3,
    "conv_dim": 2048,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "use_pos_enc": True,
    "vocab_size": 65536,
}


@pytest.mark.parametrize(
    ("raw", "parameters"),
    [
        (KIMI_LINEAR, 49_122_681_728),  # Kimi-Linear-48B-A3B
        (NEMOTRON_3_NANO, 31_577_940_288),  # Nemotron-3-Nano-30B-A3B
        (LFM2_1B2, 1_170_340_608),
    ],
)
def test_the_totals_of_other_releases(raw: dict[str, Any], parameters: int) -> None:
    """49.1, 31.6 and 1.17 billion as published, from the keys that those releases have, none of them unread."""
    spec, _ = FAMILIES.describe(raw)
    tied = spec.vocab_size * spec.hidden if spec.tied_head else 0
    assert sum(kind.elements for kind in census(spec)) - tied == parameters
    assert not [finding for finding in spec.findings if finding.code == "unread-config-key"]


def test_ranks_that_would_cut_a_group_are_refused_and_one_group_is_not() -> None:
    two, _ = FAMILIES.describe({**TINY["mamba2"].config, "n_groups": 2})
    assert not violations(two, Mesh(tp=2))
    (found,) = violations(two, Mesh(tp=4))
    assert "2 norm groups do not divide by tp 4" in found.message
    one, _ = FAMILIES.describe({**TINY["mamba2"].config, "n_groups": 1})
    assert not violations(one, Mesh(tp=4))
    delta, _ = FAMILIES.describe(TINY["qwen3_next"].config)
    assert any("2 linear key heads do not divide by tp 4" in found.message for found in violations(delta, Mesh(tp=4)))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("kimi_linear", "mla_use_nope", False),
        ("kimi_linear", "moe_router_activation_func", "softmax"),
        ("kimi_linear", "layer_types", ["linear_attention", "linear_attention", "sliding_attention"]),
        ("qwen3_next", "attn_output_gate", False),
        ("qwen3_next", "hidden_act", "gelu"),
        ("mamba2", "hidden_act", "relu"),
        ("nemotron_h", "attention_bias", True),
        ("nemotron_h", "mamba_hidden_act", "gelu"),
        ("granitemoehybrid", "position_embedding_type", "alibi"),
        ("lfm2", "layer_types", ["conv", "full_attention", "mamba"]),
    ],
)
def test_what_no_block_computes_is_refused_by_key_and_value(name: str, key: str, value: Any) -> None:
    with pytest.raises(Refused) as caught:
        FAMILIES.describe({**TINY[name].config, key: value})
    (finding,) = caught.value.findings
    assert finding.code == "unsupported-block"
    assert key in finding.message
    assert finding.found == repr(value[-1] if isinstance(value, list) else value)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mamba2", {"n_groups": 3}),
        ("mamba2", {"head_dim": 9}),
        ("qwen3_next", {"linear_num_value_heads": 3}),
        ("kimi_linear", {"layer_types": ["linear_attention"]}),
        ("jamba", {"attn_layer_offset": 3}),
        ("falcon_h1", {"ssm_multipliers": [1.0]}),
        ("bamba", {"attn_layer_indices": [7]}),
        ("nemotron_h", {"num_hidden_layers": 5}),
        ("bailing_hybrid", {"kda_lower_bound": 1.0}),
    ],
)
def test_sizes_that_do_not_fit_are_refused(name: str, change: dict[str, Any]) -> None:
    with pytest.raises(Refused) as caught:
        FAMILIES.describe({**TINY[name].config, **change})
    assert caught.value.findings[0].code == "config-invalid"
