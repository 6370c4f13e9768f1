"""Ling 2 has GLM-4.5's mathematics under the vendor's own names and keys, which no release of the reference reads."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.model.families import FAMILIES
from firstlight.workbench.golden import Golden
from tests.engine.direct import Direct
from tests.engine.model.test_equality import LIMIT, rewrite
from tests.families.verified import tell

NAMES = (  # GLM's -> Ling's
    (r"embed_tokens", "word_embeddings"),
    (r"self_attn\.o_proj", "attention.dense"),
    (r"self_attn\.q_norm", "attention.query_layernorm"),
    (r"self_attn\.k_norm", "attention.key_layernorm"),
    (r"gate\.e_score_correction_bias", "gate.expert_bias"),
)


def as_ling(tensors: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if ".q_proj." in name:
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            found[name.replace("self_attn.q_proj", "attention.query_key_value")] = np.concatenate(parts)
        elif not re.search(r"\.[kv]_proj\.", name):
            for theirs, ours in NAMES:
                name = re.sub(theirs, ours, name)
            found[name] = tensor
    return found


def keys(home: Path) -> dict[str, Any]:
    own = json.loads((home / "config.json").read_text())
    same = """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
    head_dim moe_intermediate_size num_experts_per_tok n_group topk_group routed_scaling_factor rms_norm_eps
    max_position_embeddings first_k_dense_replace""".split()
    return {
        **{key: own[key] for key in same if key in own},
        "model_type": "bailing_moe",
        "num_experts": own["n_routed_experts"],
        "num_shared_experts": own["n_shared_experts"],
        "score_function": "sigmoid",
        "rope_theta": own["rope_parameters"]["rope_theta"],
        "partial_rotary_factor": 0.5,
        "use_qkv_bias": True,
        "use_qk_norm": True,
        "tie_word_embeddings": False,
    }


def test_ling_is_glm_under_other_names(
    checkpoint: Callable[[str], Path],
    golden_file: Callable[[str], Path],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    home = rewrite(checkpoint("glm4_moe"), tmp_path / "ling", as_ling)
    golden = Golden.read(golden_file("glm4_moe"))
    given, theirs = golden.inputs(), golden.outputs["logits"][golden.mask]
    config = {"first_k_dense_replace": 1, **keys(home)}
    expected = Direct(checkpoint("glm4_moe")).run(given)["logits"]
    for spelling in ({}, {"partial_rotary_factor": None, "rotary_dim": config["head_dim"] // 2}):
        (home / "config.json").write_text(json.dumps({**config, **spelling}))
        found = Direct(home).run(given)["logits"]
        np.testing.assert_array_equal(found, expected)
    error = float(np.abs(found - theirs).max() / np.abs(theirs).max())
    assert error <= LIMIT
    tell(request, home, "text", error)


@pytest.mark.parametrize(
    ("key", "value"),
    [("score_function", "softmax"), ("norm_head", True), ("rotary_dim", 3), ("use_sliding_window", True)],
)
def test_what_ling_does_not_compute_is_refused(key: str, value: Any, checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(Refused, match=key):
        FAMILIES.describe({**keys(checkpoint("glm4_moe")), key: value})


def test_the_first_generation_is_not_taken_for_the_second(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(Refused, match="score_function"):
        FAMILIES.describe({**keys(checkpoint("glm4_moe")), "score_function": None})
