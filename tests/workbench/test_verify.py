"""`verify` passes what is right under any mesh, and says of what is wrong where it is wrong."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.serving.options import EngineOptions
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.files.safetensors_file import Tensor, read, write
from firstlight.kernels import operators
from firstlight.kernels.registry_types import Implementation
from firstlight.workbench.bisect import blame
from firstlight.workbench.cases import Case
from firstlight.workbench.compare import deviation, limit_of, ranking
from firstlight.workbench.engines import open_engine
from firstlight.workbench.golden import Golden
from firstlight.workbench.judge import judge
from firstlight.workbench.reference import Reference
from firstlight.workbench.report import Draft, Report
from firstlight.workbench.verify import verify
from tests.checkpoints import TINY, edit_config, inputs

Get = Callable[[str], Path]


def check(home: Path, golden: Path, mesh: Mesh | None = None, **more: object) -> Report:
    return verify(EngineOptions(checkpoint=str(home), mesh=mesh or Mesh(), threads=1), golden, **more)  # type: ignore[arg-type]


def changed(home: Path, into: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of a checkpoint of one file with its tensors changed."""
    shutil.copytree(home, into)
    tensors = read(into / "model.safetensors")
    change(tensors)
    write(into / "model.safetensors", tensors, {"format": "pt"})
    return into


def scale(name: str, factor: float) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name] * np.float32(factor)  # type: ignore[operator]

    return change


def failed(report: Report) -> list[str]:
    return [one.name for one in report.checks if one.status == "failed"]


def one_of_each() -> list[str]:
    """A tiny model of each architecture; tests/engine/model/test_equality.py has those that differ within one."""
    found: dict[tuple[str, ...], str] = {}
    for name, tiny in TINY.items():
        if tiny.tokens < 1000:
            parts = (tiny.config, tiny.config.get("text_config", {}), tiny.config.get("vision_config", {}))
            found.setdefault(tuple(part.get("model_type", "") for part in parts), name)
    return list(found.values())


@pytest.mark.parametrize("name", one_of_each())
def test_a_golden_file_of_the_reference_passes(name: str, checkpoint: Get, golden_file: Get) -> None:
    report = check(checkpoint(name), golden_file(name))
    assert report.status == "passed", failed(report)
    names = {one.name for one in report.checks}
    layers = len(report.tables["layers"]) - 1
    assert {f"hidden.{i}" for i in range(layers + 1)} | {f"teacher.{i}" for i in range(1, layers + 1)} <= names
    assert {"logits", "teacher.logits", "kl", "top1", "top10", "generated"} <= names
    assert ("image_features" in names) == ("vision_config" in TINY[name].config)
    assert json.loads(report.to_json())["status"] == "passed"


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("llama-tied", Mesh(pp=2)),
        ("llama-vocab257", Mesh(tp=4, attention="whole")),
        ("qwen3_moe", Mesh(ep=2, dp=2)),
        ("deepseek_v3", Mesh(tp=2, ep=2)),
        ("glm_moe_dsa", Mesh(tp=2, pp=2)),
        ("llava-clip", Mesh(tp=2, pp=2)),
    ],
)
def test_a_golden_file_passes_under_a_mesh(name: str, mesh: Mesh, checkpoint: Get, golden_file: Get) -> None:
    report = check(checkpoint(name), golden_file(name), mesh)
    assert report.status == "passed", failed(report)
    assert mesh.describe() in report.title


def test_left_padding_and_a_file_without_hidden_states(checkpoint: Get, golden_file: Get, tmp_path: Path) -> None:
    tensors = read(golden_file("mistral"))
    order = np.argsort(tensors["attention_mask"], axis=1, kind="stable")
    moved = {n: np.take_along_axis(tensors[n], order, axis=1) for n in ("input_ids", "attention_mask")}
    moved["logits"] = np.take_along_axis(tensors["logits"], order[:, :, None], axis=1)
    write(tmp_path / "left.safetensors", moved)
    report = check(checkpoint("mistral"), tmp_path / "left.safetensors")
    assert report.status == "passed", failed(report)
    assert any("located" in finding.message for finding in report.findings)


@pytest.mark.parametrize(("kept", "is_said"), [("hidden", True), ("logits", False)])
def test_a_file_without_logits_says_that_no_head_is_compared(
    kept: str, is_said: bool, checkpoint: Get, golden_file: Get, tmp_path: Path
) -> None:
    inputs = ("input_ids", "attention_mask")
    tensors = {n: value for n, value in read(golden_file("mistral")).items() if n in inputs or n.startswith(kept)}
    write(tmp_path / "golden.safetensors", tensors)
    report = check(checkpoint("mistral"), tmp_path / "golden.safetensors")
    assert report.status == "passed", failed(report)
    assert any("head is not compared" in finding.message for finding in report.findings) is is_said


@pytest.mark.parametrize(
    ("tensor", "layer", "part"),
    [
        ("model.layers.1.self_attn.k_proj.weight", 1, "mixer (Attention)"),
        ("model.layers.2.mlp.down_proj.weight", 2, "feed-forward (MLP)"),
        ("model.layers.0.input_layernorm.weight", 0, "mixer (Attention)"),
    ],
)
def test_a_wrong_weight_is_traced_to_its_block(
    tensor: str, layer: int, part: str, checkpoint: Get, golden_file: Get, tmp_path: Path
) -> None:
    home = changed(checkpoint("llama-tied"), tmp_path / "wrong", scale(tensor, 1.05))
    report = check(home, golden_file("llama-tied"))
    assert report.status == "failed"
    names = failed(report)
    assert f"teacher.{layer + 1}" in names
    own = {f"teacher.{layer + 1}", "teacher.unnormed"} if layer == 2 else {f"teacher.{layer + 1}"}
    assert {one for one in names if one.startswith("teacher.")} == own, (
        "teacher forcing fails at the faulty block alone"
    )
    (finding,) = [one for one in report.findings if one.code == "wrong-numbers"]
    assert f"layer {layer}" in finding.message
    assert [row["verdict"] for row in report.tables["layers"]].count("fault here") == 1
    # With the reference at hand, the half of the block is named too.
    spec_case = case_of(checkpoint("llama-tied"), golden_file("llama-tied"))
    draft = Draft("verify", "half")
    options = EngineOptions(checkpoint=str(home), dtype="F32", device="cpu", max_context=64)
    with open_engine(options) as engine:
        verdict = judge(draft, engine, spec_case)
        blame(draft, spec_case, verdict, engine, options, Reference.open(checkpoint("llama-tied")))
    assert any(part in finding.message for finding in draft.findings), draft.findings


def case_of(home: Path, golden: Path) -> Case:
    from firstlight.engine.model.families import FAMILIES

    spec, _ = FAMILIES.describe(Checkpoint.open(home).config)
    return Case(golden=Golden.read(golden), spec=spec, limit=1e-3)


def test_a_wrong_operator_is_named(checkpoint: Get, golden_file: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Implementation(
        "gated_activation", "broken", "tests.workbench.broken", "gated_activation", operators.anywhere
    )
    monkeypatch.setattr(operators, "IMPLEMENTATIONS", (broken, *operators.IMPLEMENTATIONS))
    report = check(checkpoint("llama-tied"), golden_file("llama-tied"))
    assert report.status == "failed"
    (finding,) = [one for one in report.findings if one.code == "wrong-numbers"]
    assert "operator gated_activation is at fault" in finding.message
    assert "layer 0" in finding.message


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        ("lm_head.weight", "the output head"),
        ("model.embed_tokens.weight", "the token embedding"),
        ("model.norm.weight", "the final norm"),
    ],
)
def test_faults_outside_the_layers(tensor: str, words: str, checkpoint: Get, golden_file: Get, tmp_path: Path) -> None:
    home = changed(checkpoint("llama-vocab257"), tmp_path / "wrong", scale(tensor, 1.02))
    report = check(home, golden_file("llama-vocab257"))
    assert report.status == "failed"
    (finding,) = [one for one in report.findings if one.code == "wrong-numbers"]
    assert words in finding.message


def test_a_fault_of_the_vision_tower(checkpoint: Get, golden_file: Get, tmp_path: Path) -> None:
    tensor = "multi_modal_projector.linear_2.bias"

    def change(tensors: dict[str, Tensor]) -> None:
        (name,) = [one for one in tensors if one.endswith(tensor)]
        scale(name, 1.5)(tensors)

    report = check(changed(checkpoint("llava-siglip"), tmp_path / "w", change), golden_file("llava-siglip"))
    assert "image_features" in failed(report)
    (finding,) = [one for one in report.findings if one.code == "wrong-numbers"]
    assert "vision tower or the projector" in finding.message


def test_nan_in_a_weight_is_placed(checkpoint: Get, golden_file: Get, tmp_path: Path) -> None:
    def poison(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = np.nan  # type: ignore[index]

    report = check(changed(checkpoint("llama-tied"), tmp_path / "nan", poison), golden_file("llama-tied"))
    (first,) = [one for one in report.checks if one.name == "hidden.2"]
    assert first.status == "failed"
    assert "nan at token" in first.detail
    assert b"NaN" not in report.to_json().replace(b"NaN ", b"")
    assert any("layer 1" in one.message for one in report.findings if one.code == "wrong-numbers")


@pytest.mark.parametrize(
    ("kept", "layers", "steps"),
    [("logits", (0, 1), 1), ("hidden.0", (1, 2), 1), ("generated", None, 0), ("generated", None, 9999)],
)
def test_nothing_compared_is_nothing_passed(
    kept: str, layers: tuple[int, int] | None, steps: int, checkpoint: Get, golden_file: Get, tmp_path: Path
) -> None:
    whole = read(golden_file("llama"))
    value = np.tile(np.asarray(whole[kept]), (1, steps)) if kept == "generated" else whole[kept]
    write(tmp_path / "golden", {"input_ids": whole["input_ids"], kept: value})
    with pytest.raises(Refused, match="nothing was compared"):
        check(checkpoint("llama"), tmp_path / "golden", layers=layers)


def test_some_layers_only(checkpoint: Get, golden_file: Get, tmp_path: Path) -> None:
    home = changed(checkpoint("llama-tied"), tmp_path / "w", scale("model.layers.2.mlp.down_proj.weight", 1.5))
    report = check(home, golden_file("llama-tied"), layers=(0, 2))
    assert report.status == "passed"
    assert {one.name for one in report.checks} == {"hidden.0", "hidden.1", "hidden.2", "teacher.1", "teacher.2"}
    assert check(home, golden_file("llama-tied"), layers=(2, 3)).status == "failed"
    with pytest.raises(Refused, match="no such range"):
        check(home, golden_file("llama-tied"), layers=(2, 9))


def test_transformers_as_the_reference(checkpoint: Get) -> None:
    report = verify(EngineOptions(checkpoint=str(checkpoint("llava-layers"))), reference="transformers")
    assert report.status == "passed", failed(report)
    floor = report.value("random_noise_floor")
    assert isinstance(floor, float)
    assert 0 < floor < 1e-4
    worst = max(float(report.value(f"{case}_logits_max_abs") or 0.0) for case in ("random", "far"))
    assert report.value("logits_max_abs") == worst
    for row in report.tables["random layers"][1:]:
        assert row["forced_floor"] > 0
        assert row["limit"] <= 1e-3


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_bfloat16_is_held_against_the_rounding_of_the_reference(name: str, checkpoint: Get) -> None:
    """Routers at a near-tie take another expert after rounding, in the reference as in the engine: that is noise."""
    options = EngineOptions(checkpoint=str(checkpoint(name)), dtype="BF16", threads=1)
    report = verify(options, reference="transformers")
    assert report.status == "passed", failed(report)
    assert 1e-3 < report.value("random_noise_floor") < 0.2  # type: ignore[operator]


def test_a_fault_is_more_than_the_rounding_of_bfloat16(checkpoint: Get, golden_file: Get, tmp_path: Path) -> None:
    home, golden = checkpoint("llama-tied"), golden_file("llama-tied")
    wrong = changed(home, tmp_path / "wrong", scale("model.layers.1.mlp.down_proj.weight", 1.5))
    for directory, status in ((home, "passed"), (wrong, "failed")):
        report = verify(EngineOptions(checkpoint=str(directory), dtype="BF16", threads=1), golden)
        assert report.status == status, failed(report)
    assert any("layer 1" in one.message for one in report.findings if one.code == "wrong-numbers")


def test_company_in_a_batch_is_noise_and_its_flips_are_ties(checkpoint: Get) -> None:
    """A row alone and among eight in bfloat16: within the rounding, and no flip that is not a near-tie."""
    given = inputs("llama", batch=1)["input_ids"]
    with open_engine(EngineOptions(checkpoint=str(checkpoint("llama")), dtype="BF16", device="cpu")) as engine:
        alone = engine.trace(given)["logits"][0]
        among = engine.trace(np.concatenate([given, *(inputs("llama", 1, seed)["input_ids"] for seed in range(1, 8))]))
    limit = limit_of("BF16")
    assert deviation(among["logits"][0], alone).passes(limit)
    assert not ranking(among["logits"][0], alone, limit).faults
    with open_engine(EngineOptions(checkpoint=str(checkpoint("llama")), dtype="F32", device="cpu")) as engine:
        exact = engine.trace(given)["logits"][0]
    found = ranking(alone, exact, limit)
    assert not found.faults
    assert ranking(np.roll(exact, 1, axis=1), exact, limit).faults, "a real shift is a fault"


def test_transformers_may_not_fill_gaps_with_random_numbers(checkpoint: Get, tmp_path: Path) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]

    home = changed(checkpoint("llama-vocab257"), tmp_path / "gap", drop)
    with pytest.raises(Refused) as refused:
        Reference.open(home)
    assert refused.value.findings[0].tensors == ("model.layers.1.mlp.up_proj.weight",)


@pytest.mark.parametrize(("stated", "status"), [({"rope_theta": 123.0}, "passed"), ({}, "failed")])
def test_a_wrong_rope_base_shows_at_long_positions_only(
    stated: dict[str, float], status: str, checkpoint: Get, golden_file: Get, tmp_path: Path
) -> None:
    """Both keys and different values: the newer wins and the conflict is shown. The old default in place: it fails."""
    home = tmp_path / "rope"
    shutil.copytree(checkpoint("llama-theta"), home)
    parameters = {"rope_type": "default", "rope_theta": 500000.0 if stated else 10000.0}
    edit_config(home, rope_parameters=parameters, **stated)
    report = check(home, golden_file("llama-theta"))
    assert report.status == status
    assert any(one.code == "conflicting-flag" for one in report.findings) == bool(stated)
    if not stated:
        assert [one.name for one in report.checks if one.name == "hidden.0" and one.status == "passed"]


def test_the_command_line_is_fast_and_needs_no_tokenizer(checkpoint: Get, golden_file: Get, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    command = [sys.executable, "-X", "importtime", "-m", "firstlight.workbench", "verify", str(checkpoint("llama"))]
    found = subprocess.run(
        [*command, "--golden", str(golden_file("llama")), "--json", str(out)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert json.loads(out.read_text())["status"] == "passed"
    assert "transformers" not in {
        line.rpartition("|")[2].strip().partition(".")[0] for line in found.stderr.splitlines()
    }


@pytest.mark.parametrize(("generated", "said"), [([[1003, 5], [5, 5]], "instead of 1003"), ([[5] * 50] * 2, "24 + 50")])
def test_a_continuation_that_nobody_could_give_does_not_pass(
    generated: list[list[int]], said: str, checkpoint: Get, golden_file: Get, tmp_path: Path
) -> None:
    """Ids that the vocabulary lacks, and more steps than the model has positions for."""
    golden = Golden.read(golden_file("llama"))
    odd = replace(golden, outputs={"logits": golden.outputs["logits"], "generated": np.array(generated)})
    odd.write(tmp_path / "odd.safetensors")
    report = check(checkpoint("llama"), tmp_path / "odd.safetensors")
    assert failed(report) == ["generated"]
    assert said in next(one.detail for one in report.checks if one.name == "generated")


def test_an_engine_that_runs_is_used_as_it_is(checkpoint: Get, golden_file: Get) -> None:
    """Its mesh, dtype and context count; generated tokens beyond its context are passed over, and it says so."""
    home = checkpoint("llama")
    options = EngineOptions(checkpoint=str(home), dtype="BF16", device="cpu", max_context=26, threads=1)
    with open_engine(options) as engine:
        report = verify(EngineOptions(checkpoint=str(home), mesh=Mesh(tp=2)), golden_file("llama"), engine=engine)
        assert report.status == "passed", failed(report)
        assert report.title.endswith("1 rank, BF16")
        (generated,) = [one for one in report.checks if one.name == "generated"]
        assert generated.status == "skipped"
        assert "24 + 6 tokens" in generated.detail
        assert engine.health().is_ready


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe", "deepseek_v3", "llava-clip"])
def test_golden_files_pass_on_an_accelerator(name: str, dtype: str, checkpoint: Get, golden_file: Get) -> None:
    options = EngineOptions(checkpoint=str(checkpoint(name)), device="cuda", dtype=dtype)
    report = verify(options, golden_file(name))
    assert report.status == "passed", failed(report)
