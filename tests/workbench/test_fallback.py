"""What no family knows runs in the reference's own modules: said everywhere, accounted for on both sides, one rank."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.parallel.hardware import parse_cluster
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.serving.openai import model_body
from firstlight.engine.serving.options import EngineOptions
from firstlight.engine.serving.request import SamplingParams
from firstlight.engine.serving.runtime import Engine
from firstlight.engine.serving.stream import completion_of
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.files.safetensors_file import Tensor, read, write
from firstlight.workbench import fallback
from firstlight.workbench.cli import main
from firstlight.workbench.fallback import NAMES, remote_code
from firstlight.workbench.load import load
from firstlight.workbench.plan import plan
from firstlight.workbench.scan import scan
from firstlight.workbench.verify import verify
from tests.checkpoints import TINY, build, edit_config, write_golden
from tests.families.tiny import Tiny, llama

MENAGERIE = Path(__file__).parents[2] / "data/samples/menagerie"
CAT = Path(__file__).parents[2] / "data/samples/pictures/cat.png"
FOREIGN = {  # experts in attention, positions by slope, experts stored one by one, pictures
    "jetmoe": llama(
        model_type="jetmoe", kv_channels=8, num_local_experts=4, num_experts_per_tok=2, num_key_value_heads=2
    ),
    "bloom": {"model_type": "bloom", "vocab_size": 131, "hidden_size": 32, "n_head": 4, "n_layer": 2},
    "mellum": llama(
        model_type="mellum",
        head_dim=8,
        moe_intermediate_size=20,
        num_experts_per_tok=3,
        num_experts=8,
    ),
    "paligemma": {
        "model_type": "paligemma",
        "text_config": llama(model_type="gemma", head_dim=8, num_hidden_layers=2),
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 12,
            "patch_size": 4,
            "projection_dim": 32,
        },
        "image_token_index": 130,
        "projection_dim": 32,
    },
}
PICTURES = {"paligemma": 9}

Get = Callable[[str], Path]


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Get]:
    """Tiny checkpoints of architectures that no family here knows."""
    home = tmp_path_factory.mktemp("foreign")
    with pytest.MonkeyPatch.context() as patch:  # a name may be that of a family by now
        for name, config in FOREIGN.items():
            patch.setitem(TINY, name, Tiny(config, 20, picture_tokens=PICTURES.get(name, 0)))
        yield lambda name: build(name, home)


@pytest.fixture(autouse=True)
def nothing_is_left_registered() -> Iterator[None]:
    yield
    FAMILIES.fall_back(None)


def use(home: Path) -> str:
    """The fallback for a checkpoint, also where a family has become native to it since."""
    model_type = json.loads((home / "config.json").read_text())["model_type"]
    return fallback.use("always" if model_type in FAMILIES else "auto", str(home))


def options(home: Path, **more: Any) -> EngineOptions:
    return EngineOptions(checkpoint=str(home), threads=1, fallback=use(home), **more)


def codes(findings: Any) -> set[str]:
    return {finding.code for finding in findings}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_golden_file_of_the_reference_passes(name: str, foreign: Get) -> None:
    home = foreign(name)
    report = verify(options(home), write_golden(name, home))
    assert report.status == "passed", [check for check in report.checks if check.status == "failed"]
    assert "fallback" in codes(report.findings)
    names = {check.name for check in report.checks}
    assert {"hidden.0", "hidden.1", "teacher.1", "logits", "generated"} <= names
    assert ("image_features" in names) == (name in PICTURES)


def test_a_golden_file_of_another_model_does_not_pass(foreign: Get, tmp_path: Path) -> None:
    """The engine's own path is compared, not the golden file with itself."""
    home, golden = foreign("jetmoe"), write_golden("jetmoe", foreign("jetmoe"))
    tensors = read(home / "model.safetensors")
    other = _with(
        home, tmp_path / "other", lambda t: t | {"model.norm.weight": t["model.norm.weight"] * np.float32(1.1)}
    )
    assert set(tensors) == set(read(other / "model.safetensors"))
    report = verify(options(other), golden)
    assert {"hidden.3", "logits"} <= {check.name for check in report.checks if check.status == "failed"}


def test_scan_says_so_and_never_means_never(foreign: Get) -> None:
    home = foreign("jetmoe")
    use(home)
    report = scan(home)
    assert report.status == "passed"
    assert "fallback" in codes(report.findings)
    assert report.tables["operators"][0]["chosen"].startswith("transformers ")
    assert report.value("parameters") == sum(np.prod(t.shape) for t in Checkpoint.open(home).tensors.values())
    fallback.use("never", str(home))
    assert "unknown-architecture" in codes(scan(home).findings)


def test_what_nobody_knows_stays_unknown(foreign: Get, tmp_path: Path) -> None:
    home = tmp_path / "unknown"
    shutil.copytree(foreign("jetmoe"), home)
    edit_config(home, model_type="made_up_for_this_test")
    use(home)
    assert "unknown-architecture" in codes(scan(home).findings)


@pytest.mark.parametrize(
    "fields",
    [{"num_hidden_layers": "many"}, {"num_hidden_layers": 1 << 31}, {"vocab_size": 1 << 63}, {"text_config": 7}],
)
def test_a_value_that_the_reference_cannot_use_is_refused(
    fields: dict[str, object], foreign: Get, tmp_path: Path
) -> None:
    home = tmp_path / "odd"
    shutil.copytree(foreign("jetmoe"), home)
    edit_config(home, **fields)
    use(home)
    assert "config-invalid" in codes(scan(home).findings)


def test_plan_knows_the_checkpoint_and_one_rank(foreign: Get, tmp_path: Path) -> None:
    home = foreign("jetmoe")
    use(home)
    report = plan(home, parse_cluster("1xH200"))
    held = sum(t.nbytes for t in Checkpoint.open(home).tensors.values())
    assert report.value("checkpoint_bytes") == report.value("weight_bytes_per_device") == held
    assert report.value("kv_bytes_per_token") is None
    with pytest.raises(Refused, match="unsupported-axis"):
        plan(home, parse_cluster("2xH200"), Mesh(tp=2))
    facts = tmp_path / "facts.json"
    facts.write_text((home / "config.json").read_text())
    with pytest.raises(Refused, match="come from a checkpoint alone"):
        plan(facts, parse_cluster("1xH200"))


def test_a_mesh_is_refused_before_anything_is_loaded(foreign: Get) -> None:
    home = foreign("jetmoe")
    with pytest.raises(Refused, match="unsupported-axis"):
        verify(options(home, mesh=Mesh(pp=2)), write_golden("jetmoe", home))


def test_load_accounts_for_both_sides(foreign: Get) -> None:
    home = foreign("mellum")
    use(home)
    report = load(home)
    assert report.status == "passed"
    checks = {check.name: check for check in report.checks}
    assert checks["every tensor is accounted for"].value == len(Checkpoint.open(home).tensors)
    assert checks["every parameter is filled"].value == checks["every parameter is filled"].limit


@pytest.mark.parametrize(
    ("name", "change", "code"),
    [
        ("jetmoe", lambda t: {n: v for n, v in t.items() if n != "model.layers.1.mlp.bias"}, "missing-tensor"),
        ("jetmoe", lambda t: t | {"model.layers.1.mlp.extra.weight": np.ones((4, 4), np.float32)}, "unconsumed-tensor"),
        ("mellum", lambda t: {n: v for n, v in t.items() if ".experts.3.up_proj" not in n}, "missing-tensor"),
    ],
)
def test_an_account_that_is_not_complete_is_refused(
    name: str, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], code: str, foreign: Get, tmp_path: Path
) -> None:
    """One expert of many is part of a stacked parameter: the reference itself would report success."""
    home = _with(foreign(name), tmp_path / "broken", change)
    use(home)
    with pytest.raises(Refused, match=code):
        load(home)


def test_requests_side_by_side_get_what_each_gets_alone(foreign: Get) -> None:
    home = foreign("bloom")
    engine = Engine.start(str(home), threads=1, max_context=64, fallback=use(home))
    try:
        info = engine.info()
        assert info.family == "fallback: bloom"
        assert {operator for operator, *_ in info.operators} == {"sample"}, "no other operator of ours is called"
        params = SamplingParams(max_new_tokens=6, ignore_eos=True)
        prompts = [[5, 9, 77, 3], [8], [40, 41, 42, 43, 44, 45]]
        alone = [engine.complete(prompt, params=params).tokens for prompt in prompts]
        streams = [engine.submit(prompt, params=params) for prompt in prompts]
        together = [completion_of(engine._read(stream)).tokens for stream in streams]
        assert together == alone
        assert sum(memory.bytes_by_role["mlp"] for memory in engine.memory()) > 0
    finally:
        engine.close()


def test_an_answer_from_the_command_line_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    """On standard error, where it does not become part of the answer."""
    words = ["generate", str(MENAGERIE), "--prompt", "What", "--max-new-tokens", "2", "--threads", "1"]
    assert main([*words, "--fallback", "always"]) == 0
    said = capfd.readouterr()
    assert "FALLBACK: llava runs in the modules of transformers" in said.err
    assert "FALLBACK" not in said.out
    assert FAMILIES.foreign is None, "the fallback of one command line is not that of the next"


def test_the_list_of_models_says_so() -> None:
    model = model_body("m", 1, 64, "transformers 5")
    assert model["fallback"] == "transformers 5"
    assert "fallback" not in model_body("m", 1, 64)


def test_always_gives_the_native_answers_with_pictures_too() -> None:
    """The trained sample, natively and through the vendor's processor and modules: the same words."""
    params = SamplingParams(max_new_tokens=8)
    said = []
    for mode in ("never", "always"):
        name = fallback.use(mode, str(MENAGERIE))  # type: ignore[arg-type]
        engine = Engine.start(str(MENAGERIE), threads=1, dtype="F32", max_context=256, fallback=name)
        try:
            asked = [
                engine.complete("What animal is this?", [CAT], params),
                engine.complete("Who says meow?", (), params),
            ]
            said.append([(answer.text, answer.usage.prompt_tokens) for answer in asked])
            assert engine.info().family.startswith("fallback") == (mode == "always")
        finally:
            engine.close()
    assert said[0] == said[1]
    assert "cat" in said[0][0][0].lower()


def test_a_tokenizer_of_another_model_is_refused_by_request(foreign: Get, tmp_path: Path) -> None:
    """Its ids are beyond the vocabulary: the reference would read past its table, and the engine would end."""
    home = tmp_path / "mixed"
    shutil.copytree(foreign("jetmoe"), home)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MENAGERIE / name, home / name)
    engine = Engine.start(str(home), threads=1, max_context=64, fallback=use(home))
    try:
        with pytest.raises(Refused, match="bad-request"):
            engine.complete("What animal is this?", chat=False)
        assert engine.complete([5, 9], params=SamplingParams(max_new_tokens=2, ignore_eos=True)).tokens
    finally:
        engine.close()


def test_code_that_comes_along_is_listed_and_not_run(foreign: Get, tmp_path: Path) -> None:
    home = tmp_path / "code"
    shutil.copytree(foreign("jetmoe"), home)
    mark = tmp_path / "was-run"
    (home / "modeling_new.py").write_text(f"import os, socket\nfrom torch import nn\nopen({str(mark)!r}, 'w')\n")
    (home / "broken.py").write_text("def (:\n")
    auto_map = {"AutoConfig": "configuration_new.NewConfig", "AutoModelForCausalLM": "modeling_new.NewModel"}
    edit_config(home, model_type="new_architecture", auto_map=auto_map)
    rows = {row["file"]: row for row in remote_code(Checkpoint.open(home))}
    assert rows["modeling_new.py"]["imports"] == "os, socket, torch"
    assert rows["modeling_new.py"]["named_by"] == "AutoModelForCausalLM: NewModel"
    assert not rows["configuration_new.py"]["there"]
    assert rows["broken.py"]["imports"].startswith("not Python")
    use(home)
    report = scan(home)
    assert {row["file"] for row in report.tables["remote_code"]} == set(rows)
    assert "unknown-architecture" in codes(report.findings)
    with pytest.raises(Refused):
        Engine.start(str(home), fallback=NAMES["auto"])
    assert not mark.exists(), "code of the checkpoint was run"


def test_trusted_code_that_does_not_run_is_refused(foreign: Get, tmp_path: Path) -> None:
    home = tmp_path / "trusted"
    shutil.copytree(foreign("bloom"), home)
    (home / "configuration_own.py").write_text("import a_package_that_is_not_there\n")
    edit_config(home, model_type="own", auto_map={"AutoConfig": "configuration_own.OwnConfig"})
    fallback.use("auto", str(home), True)
    report = scan(home)
    (refused,) = [finding for finding in report.findings if finding.severity == "fatal"]
    assert refused.code == "not-available"
    assert "a_package_that_is_not_there" in refused.message


def test_trust_lets_the_reference_run_it(foreign: Get, tmp_path: Path) -> None:
    """The checkpoint's own configuration and model classes, here thin ones over a known architecture."""
    home = tmp_path / "trusted"
    shutil.copytree(foreign("bloom"), home)
    (home / "configuration_own.py").write_text(
        "from transformers import BloomConfig\n\n\nclass OwnConfig(BloomConfig):\n    model_type = 'own'\n"
    )
    (home / "modeling_own.py").write_text(
        "from transformers import BloomForCausalLM\n\nfrom .configuration_own import OwnConfig\n\n\n"
        "class OwnModel(BloomForCausalLM):\n    config_class = OwnConfig\n"
    )
    auto_map = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    edit_config(home, model_type="own", auto_map=auto_map)
    golden = write_golden("bloom", foreign("bloom"))
    use(home)
    assert "unknown-architecture" in codes(scan(home).findings)
    trusting = EngineOptions(
        checkpoint=str(home), threads=1, fallback=fallback.use("auto", str(home), True), trust_remote_code=True
    )
    report = verify(trusting, golden)
    assert report.status == "passed"
    assert any("the checkpoint's own code" in finding.message for finding in report.findings)


def _with(home: Path, into: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    shutil.copytree(home, into)
    tensors = change(read(into / "model.safetensors"))
    write(into / "model.safetensors", tensors, {"format": "pt"})
    index = into / "model.safetensors.index.json"
    assert not index.exists(), json.loads(index.read_text())
    return into
