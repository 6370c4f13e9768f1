"""What a config.json leaves out is read as the reference reads it: the spec is that of the file with all keys in it."""

import json
from typing import Any

import msgspec
import pytest

from firstlight.engine.model.families import FAMILIES
from tests.checkpoints import TINY
from tests.sweep.small import tiny

MORE: dict[str, dict[str, Any]] = {  # where the tiny sizes do not go with the rest
    "bailing_hybrid": {"num_experts_per_tok": 2},
    "deepseek_v4": {"num_key_value_heads": 1, "o_groups": 2},
    "minimax_m3_vl_text": {"index_n_heads": 2},
    "nemotron_h": {"sliding_window": None},
    "phimoe": {"num_experts_per_tok": 2},
}
NEEDED = {  # sizes that a family does not guess; heads whose being tied a release says on top
    "deepseek_v4": ("o_lora_rank", "hc_mult", "hc_sinkhorn_iters", "compress_rates"),
    "granitemoehybrid": ("shared_intermediate_size",),
    "nemotron_h": ("moe_shared_expert_intermediate_size",),
    "qwen3_vl_moe_text": ("tie_word_embeddings",),
    "kimi_linear": ("num_experts_per_token", "num_experts_per_tok"),
}
NOT_READ = ("mtp", "mtp_ends", "findings")  # layers that nobody computes; what was found
# Of these the reference has no such tiny sizes, names layers in another way, or keeps all sizes in parts.
NOT_HERE = ("falcon_h1", "longcat_flash", "dbrx")
TEXTS = [name for name in FAMILIES if name not in NOT_HERE]


def described(raw: dict[str, Any]) -> dict[str, Any]:
    spec = FAMILIES.describe(raw)[0]
    return {key: value for key, value in msgspec.json.decode(msgspec.json.encode(spec)).items() if key not in NOT_READ}


def unlike(full: Any, bare: Any, where: str = "") -> dict[str, Any]:
    """Where two descriptions differ, apart from how far positions are said to reach."""
    if isinstance(full, dict) and isinstance(bare, dict):
        pairs = [(f"{where}.{key}", full.get(key), bare.get(key)) for key in {*full, *bare} - {"max_positions"}]
    elif isinstance(full, list) and isinstance(bare, list) and len(full) == len(bare):
        pairs = [(f"{where}[]", *pair) for pair in zip(full, bare, strict=True)]
    else:
        return {} if full == bare else {where: (full, bare)}
    return {name: value for pair in pairs for name, value in unlike(pair[1], pair[2], pair[0]).items()}


@pytest.mark.parametrize("model_type", TEXTS)
def test_a_silent_file_is_read_as_the_reference_reads_it(model_type: str) -> None:
    import transformers

    known = transformers.CONFIG_MAPPING
    if model_type not in known or hasattr(known[model_type](), "vision_config"):
        pytest.skip("the reference has no configuration of that name for text alone")
    bare = tiny(model_type, **MORE.get(model_type, {}))
    full = json.loads(transformers.AutoConfig.for_model(**bare).to_json_string(use_diff=False))
    full["model_type"], bare["dtype"] = model_type, full.get("dtype")
    bare |= {key: full[key] for key in NEEDED.get(model_type, ()) if key in full}
    assert unlike(described(full), described(bare)) == {}


def test_a_base_without_the_scaling_of_its_architecture_is_said() -> None:
    """Versions of the reference differ in whether they stretch by their default then."""
    given = {key: value for key, value in TINY["gpt_oss"].config.items() if not key.startswith("rope_")}
    for fields, is_said in (
        ({"rope_theta": 150000.0}, True),
        ({"rope_theta": 150000.0, "rope_scaling": {"rope_type": "default"}}, False),
        ({}, False),
    ):
        spec, _ = FAMILIES.describe(given | fields)
        said = [found for found in spec.findings if "has a rope base and no scaling" in found.message]
        assert bool(said) is is_said, fields


def own_value(reference: Any, key: str) -> Any:
    """What the reference takes; rotary bases stand among parameters, in some architectures by kinds of layers."""
    if key == "rope_theta":
        return reference.rope_parameters.get("full_attention", reference.rope_parameters)["rope_theta"]
    return getattr(reference, key)


def test_values_that_are_assumed_are_those_of_the_references_own_code() -> None:
    """As many key heads as query heads is not what most architectures take where the file is silent."""
    import transformers

    stated = ("deepseek_v4", "dbrx", "gpt_bigcode")  # by other keys
    for model_type in FAMILIES:
        if model_type not in transformers.CONFIG_MAPPING or model_type in stated:
            continue
        own = transformers.CONFIG_MAPPING[model_type]().get_text_config()
        if own.model_type != model_type:
            continue
        silent, heads = FAMILIES[model_type].silent.get(model_type, {}), getattr(own, "num_attention_heads", None)
        expected = getattr(own, "num_key_value_heads", None) or heads
        assert silent.get("num_key_value_heads", heads) == expected, model_type
        for key, value in silent.items():
            assert own_value(own, key) == value, (model_type, key)


def test_what_a_file_says_is_never_replaced_by_what_is_assumed() -> None:
    raw = {**tiny("mistral"), "num_attention_heads": 16, "hidden_size": 128}
    heads = {}
    for said in ("absent", None, 4):
        given = {key: value for key, value in raw.items() if key != "num_key_value_heads"}
        if said != "absent":
            given["num_key_value_heads"] = said
        heads[said] = FAMILIES.describe(given)[0].layers[0].mixer.num_kv_heads  # type: ignore[union-attr]
    assert heads == {"absent": 8, None: 16, 4: 4}


def test_a_nested_model_that_does_not_name_its_type_is_that_of_its_part() -> None:
    """Types of nested models are left out by releases; what their own code takes is read all the same."""
    raw = tiny("mistral3")
    text = {key: value for key, value in raw["text_config"].items() if key != "num_key_value_heads"}
    named = {**raw, "text_config": {**text, "num_attention_heads": 16, "hidden_size": 128}}
    silent = {
        **named,
        "text_config": {key: value for key, value in named["text_config"].items() if key != "model_type"},
    }
    assert named["text_config"]["model_type"] == "mistral"
    assert FAMILIES.describe(silent)[0].layers[0].mixer.num_kv_heads == 8  # type: ignore[union-attr]
    assert described(silent) == described(named)
