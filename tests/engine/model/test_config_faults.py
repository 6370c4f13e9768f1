"""Faults that public bring-ups met in configurations: each is refused, or shown and right, and never guessed around."""

import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from firstlight.engine.errors import Refused
from firstlight.engine.model.config import Config
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.model.families.registry import HOMES, Families
from firstlight.engine.model.rules import rule
from firstlight.engine.model.spec import Attention, ModelSpec
from firstlight.engine.parallel.constraints import refuse_impossible, violations
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.ledger import account
from firstlight.workbench.reference import Reference
from tests.checkpoints import TINY, edit_config, inputs
from tests.engine.direct import Direct, flatten

Get = Callable[[str], Path]


def codes(found: Any) -> list[str]:
    return [finding.code for finding in found]


def copy_of(home: Path, into: Path, **fields: Any) -> Path:
    shutil.copytree(home, into)
    edit_config(into, **fields)
    return into


# A tied head that is not in the file


def test_a_tied_head_is_in_the_ledger_and_one_tensor_in_memory(checkpoint: Get) -> None:
    model = Direct(checkpoint("llama-tied"))
    source = model.ledger.sources["head.weight"]
    assert (source.tensor, source.tied) == ("model.embed_tokens.weight", True)
    assert any("head.weight <- model.embed_tokens.weight" in finding.message for finding in model.ledger.findings)
    assert model.weights.storages["head.weight"].data_ptr() == model.weights.storages["embed.weight"].data_ptr()


def test_an_absent_head_without_the_flag_is_refused(checkpoint: Get, tmp_path: Path) -> None:
    home = copy_of(checkpoint("llama-tied"), tmp_path / "c", tie_word_embeddings=False)
    with pytest.raises(Refused) as refused:
        Direct(home)
    (finding,) = refused.value.findings
    assert (finding.code, finding.tensors) == ("missing-tensor", ("head.weight",))


# The flag at the wrong level, with a head of its own in the file


@pytest.mark.parametrize(
    ("outer", "inner", "conflict"), [(None, False, False), (True, False, True), (True, True, True), (None, True, True)]
)
def test_a_head_in_the_file_is_used_whatever_the_flags_say(
    outer: bool | None, inner: bool, conflict: bool, checkpoint: Get, tmp_path: Path
) -> None:
    given = inputs("llava-clip")
    expected = Reference.open(checkpoint("llava-clip")).run(given)["logits"]
    home = tmp_path / "c"
    shutil.copytree(checkpoint("llava-clip"), home)
    text = msgspec.json.decode((home / "config.json").read_bytes())["text_config"]
    edit_config(home, tie_word_embeddings=outer, text_config={**text, "tie_word_embeddings": inner})
    model = Direct(home)
    _, mask = flatten(given)
    found = model.run(given)["logits"]
    assert np.abs(found - expected[mask]).max() <= 2e-5 * np.abs(expected).max()
    assert ("conflicting-flag" in codes((*model.spec.findings, *model.ledger.findings))) == conflict
    assert not model.ledger.sources["head.weight"].tied


# A rule with one name misspelt


def test_a_misspelt_rule_fills_nothing_and_is_refused_by_pattern(checkpoint: Get) -> None:
    families = Families()
    right = families["qwen3_moe"]
    rules = tuple(
        rule(item.tensor.replace("up_proj", "upp_proj"), *item.params)
        if ".experts.{e}.up_proj" in item.tensor
        else item
        for item in right.rules
    )
    families.register(msgspec.structs.replace(right, rules=rules))
    opened = Checkpoint.open(checkpoint("qwen3_moe"))
    ledger = account(opened, *families.describe(opened.config))
    assert not ledger.complete
    with pytest.raises(Refused) as refused:
        ledger.refuse_if_incomplete()
    missing = [one for one in refused.value.findings if one.code == "missing-tensor"]
    unconsumed = [one for one in refused.value.findings if one.code == "unconsumed-tensor"]
    assert len(missing) == 1, "one finding for all of them"
    assert missing[0].message == "layers.{0,2..3}.ffn.experts.{0..7}.up.weight: 0 of 24 parameters filled"
    assert len(missing[0].tensors) == 24
    assert len(unconsumed) == 1
    assert "experts.{0..7}.up_proj.weight: 24 tensors" in unconsumed[0].message
    assert FAMILIES["qwen3_moe"] is not families["qwen3_moe"]


# The rope base


def described(**fields: Any) -> ModelSpec:
    config = {key: value for key, value in {**TINY["llama"].config, **fields}.items() if value is not None}
    return FAMILIES.describe(config)[0]


def theta(spec: ModelSpec) -> float:
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, Attention)
    assert mixer.rope is not None
    return mixer.rope.theta


def test_the_base_comes_from_where_it_is_written() -> None:
    new = described(rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    assert (theta(new), codes(new.findings)) == (500000.0, [])
    old = described(rope_theta=70000.0)
    assert (theta(old), codes(old.findings)) == (70000.0, [])
    both = described(rope_theta=10000.0, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    assert (theta(both), codes(both.findings)) == (500000.0, ["conflicting-flag"])
    assert both.findings[0].expected == "rope_parameters.rope_theta = 500000.0"
    assert both.findings[0].found == "rope_theta = 10000.0"


def test_rope_parameters_by_kind_of_layer_are_not_passed_over() -> None:
    """One kind, or several that agree, is what all layers have; others need a family that tells them apart."""
    far, near = {"rope_type": "default", "rope_theta": 500000.0}, {"rope_type": "default", "rope_theta": 10000.0}
    for kinds in ({"full_attention": far}, {"full_attention": far, "sliding_attention": far}):
        assert theta(described(rope_parameters=kinds)) == 500000.0
    with pytest.raises(Refused, match="full_attention, sliding_attention"):
        described(rope_parameters={"full_attention": far, "sliding_attention": near})


@pytest.mark.parametrize("where", ["rope_parameters", "beside"])
def test_a_rotated_share_that_an_architecture_never_asks_for_is_said(where: str) -> None:
    """The reference rotates whole heads of Llama whatever the key says; of GLM it rotates the share."""
    inner, outer = {"rope_type": "default", "rope_theta": 500000.0}, dict[str, Any]()
    (inner if where == "rope_parameters" else outer)["partial_rotary_factor"] = 0.5
    whole = described(rope_parameters=inner, **outer)
    mixer = whole.layers[0].mixer
    assert isinstance(mixer, Attention)
    assert mixer.rope is not None
    assert mixer.rope.dim == mixer.head_dim
    (finding,) = whole.findings
    assert finding.code == "unread-config-key"
    assert "partial_rotary_factor = 0.5" in finding.message
    scaled = {**inner, "rope_type": "linear", "factor": 2.0}
    with pytest.raises(Refused, match="partial_rotary_factor"):
        described(rope_parameters=scaled, **outer)
    glm = FAMILIES.describe({**TINY["glm"].config, "rope_parameters": inner, **outer})[0].layers[0].mixer
    assert isinstance(glm, Attention)
    assert glm.rope is not None
    assert glm.rope.dim == glm.head_dim // 2


def test_a_base_that_nobody_states_is_not_silent() -> None:
    silent = described()
    assert theta(silent) == 10000.0
    assert codes(silent.findings) == ["config-invalid"]


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"rope_theta": 0.0}, "rope_theta"),
        ({"rope_theta": -5}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling.factor"),
        ({"rms_norm_eps": "nan"}, "rms_norm_eps"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        ({"max_position_embeddings": -1}, "max_position_embeddings"),
    ],
)
def test_values_that_no_formula_takes_are_refused(fields: dict[str, Any], key: str) -> None:
    raw = {k: v for k, v in TINY["llama"].config.items() if k not in ("rope_parameters", "rope_scaling")}
    with pytest.raises(Refused, match=key) as refused:
        FAMILIES.describe({**raw, "rope_theta": 10000.0, **fields})
    assert codes(refused.value.findings) == ["config-invalid"]


def test_a_stretching_that_is_not_known_is_refused() -> None:
    with pytest.raises(Refused, match="unsupported-block"):
        described(rope_parameters={"rope_type": "spiral", "rope_theta": 10000.0})
    with pytest.raises(Refused, match="unsupported-block"):
        described(rope_parameters={"rope_type": "linear", "factor": 2.0, "twist": 3.0, "rope_theta": 10000.0})


def test_sums_of_slices_that_leave_biases_out_are_refused() -> None:
    """BLOOM's reference adds no bias where it multiplies slice by slice; with one slice it does not slice."""
    raw = {**TINY["bloom"].config, "slow_but_exact": True}
    assert FAMILIES.describe({**raw, "pretraining_tp": 1})[0].layers
    with pytest.raises(Refused, match="slow_but_exact"):
        FAMILIES.describe({**raw, "pretraining_tp": 2})


# Heads and vocabulary that do not divide


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "allowed"), [(25, 25, 4, "1, 5, 25"), (64, 8, 3, "1, 2, 4, 8"), (8, 2, 3, "1, 2, 4, 8")]
)
def test_heads_that_do_not_divide_are_refused_with_what_does(heads: int, kv_heads: int, tp: int, allowed: str) -> None:
    spec = described(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=8, intermediate_size=1600 * 3)
    with pytest.raises(Refused) as refused:
        refuse_impossible(spec, Mesh(tp=tp))
    (finding,) = refused.value.findings
    assert finding.code == "indivisible"
    assert f"{heads} query heads do not divide by tp {tp}" in finding.message
    assert finding.expected is not None
    assert finding.expected.startswith(f"tp in {allowed}")
    assert finding.next is not None
    assert f"--pp {tp} instead" in finding.next or tp > spec.num_layers


@pytest.mark.parametrize(("kv_heads", "tp"), [(2, 4), (2, 8), (1, 8), (4, 8)])
def test_fewer_key_value_heads_than_ranks_are_no_obstacle(kv_heads: int, tp: int) -> None:
    spec = described(num_attention_heads=8, num_key_value_heads=kv_heads, head_dim=8)
    assert violations(spec, Mesh(tp=tp)) == ()


@pytest.mark.parametrize("vocab", [50257, 151552, 257])
def test_any_vocabulary_is_cut(vocab: int) -> None:
    for tp in (2, 3, 6):
        spec = described(vocab_size=vocab, num_attention_heads=12, num_key_value_heads=12, head_dim=4)
        assert violations(spec, Mesh(tp=tp)) == ()


def test_a_key_that_nothing_reads_is_shown() -> None:
    spec = described(mystery_factor=3.5)
    assert "unread-config-key" in codes(spec.findings)
    assert "mystery_factor" in str([finding.message for finding in spec.findings])


def test_every_family_answers_to_the_model_types_it_is_listed_under() -> None:
    for module, model_types in HOMES.items():
        family = importlib.import_module(f"firstlight.engine.model.families.{module}").FAMILY
        assert " ".join(family.model_types) == model_types, module


# A class that is another architecture's


def test_a_class_that_transformers_writes_itself_is_no_conflict_and_any_other_family_s_is_one() -> None:
    """Of composite models it writes the text model's type along with that class, which is none either."""
    written = {
        kind: name if isinstance(name, str) else name[0]
        for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
        if kind in FAMILIES and f"{kind}_text" not in FAMILIES
    }
    assert len(written) > 80
    assert {kind: class_ for kind, class_ in written.items() if class_conflicts(kind, class_)} == {}
    for kind, class_ in (("sarvam_moe", "DeepseekV3ForCausalLM"), ("granite", "LlamaForCausalLM")):
        (finding,) = class_conflicts(kind, class_)
        assert f"its class {class_}" in finding.message
    assert not [
        class_ for kind in written for class_ in FAMILIES[kind].classes.values() if class_ not in written.values()
    ]


def class_conflicts(kind: str, class_: str) -> list[Any]:
    config = Config({"model_type": kind, "architectures": [class_]})
    FAMILIES._hold_class(FAMILIES[kind], config)
    return [finding for finding in config.all_findings() if finding.code == "conflicting-flag"]
