"""Kimi K3 on the rungs: text and pictures are answered, golden files pass, a wrong weight is found by its layer."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.serving.options import EngineOptions
from firstlight.workbench.cli import main
from firstlight.workbench.report import Report
from firstlight.workbench.scan import scan
from firstlight.workbench.verify import verify
from tests.kimi_k3 import write_checkpoint, write_golden

PICTURES = Path(__file__).parents[3] / "data" / "samples" / "pictures"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("k3") / "tiny", shards=1)


@pytest.fixture(scope="module")
def golden(home: Path) -> Path:
    return write_golden(home, home.with_suffix(".golden.safetensors"), tokens=48)


def check(home: Path, golden: Path, mesh: Mesh | None = None) -> Report:
    return verify(EngineOptions(checkpoint=str(home), mesh=mesh or Mesh(), threads=1), golden)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(tp=2, pp=2)], ids=lambda mesh: mesh.describe())
def test_a_golden_file_passes(mesh: Mesh, home: Path, golden: Path) -> None:
    """Free running and each layer on the reference's planes, with pictures, padding and a greedy continuation."""
    report = check(home, golden, mesh)
    assert report.status == "passed", [one for one in report.checks if one.status == "failed"]
    names = {one.name for one in report.checks}
    assert {f"teacher.{i}" for i in range(1, 7)} | {"image_features", "logits", "generated"} <= names


MODEL = "language_model.model."
FAULTS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "a reader of planes": (MODEL + "layers.3.mlp_res_proj.weight", lambda value: -value),
    "a decay": (MODEL + "layers.2.self_attn.dt_bias", lambda value: value + 1.0),
    "an output gate": (MODEL + "layers.5.self_attn.g_proj.weight", lambda value: 0.5 * value),
    "the scales of a chosen expert": (
        MODEL + "layers.4.block_sparse_moe.experts.2.w2.weight_scale",
        lambda value: value + 1,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_weight_is_found_by_its_layer(fault: str, home: Path, golden: Path, tmp_path: Path) -> None:
    """Planes are rebuilt from the hidden states of the golden file, so that each layer is judged for itself."""
    name, change = FAULTS[fault]
    tensors = load_file(home / "model-00001-of-000001.safetensors")
    into = tmp_path / "wrong"
    into.mkdir()
    save_file({**tensors, name: change(tensors[name])}, into / "model.safetensors")
    for file in home.glob("*.json"):
        if "index" not in file.name:
            (into / file.name).write_text(file.read_text())
    report = check(into, golden)
    wrong = int(name.split(".")[3]) + 1
    assert report.status == "failed"
    failed = {one.name for one in report.checks if one.status == "failed"}
    assert f"teacher.{wrong}" in failed
    assert not failed & {f"teacher.{i}" for i in range(1, 7) if i != wrong}


def test_scan_says_what_the_layers_are_and_how_they_meet(home: Path) -> None:
    report = scan(home)
    rows = [(row["tower"], row["layers"], row["count"]) for row in report.tables["layers"]]
    assert rows == [("vision", "0 to 1", 2), ("text", "0", 1), ("text", "1 to 2, 4", 3), ("text", "3, 5", 2)]
    assert report.value("residual_streams") == 3  # two finished spans and the running sum
    assert "spans of 3 layers" in report.metrics["residual_streams"].detail


def test_text_and_pictures_are_answered(home: Path, tmp_path: Path) -> None:
    """The prompt holds a pad for each feature, and the picture changes what the same seed says."""
    said = []
    for pictures in ((), ("--image", str(PICTURES / "cat.png"))):
        out = tmp_path / "report.json"
        ask = ["generate", str(home), "--prompt", "What is it?", "--max-new-tokens", "8", "--threads", "1", *pictures]
        assert main([*ask, "-q", "--json", str(out)]) == 0
        report = json.loads(out.read_text())
        said.append(report["tables"]["answer"][0]["token_ids"])
        assert len(said[-1]) == 8
    assert said[0] != said[1]
    assert report["tables"]["pictures"][0]["tokens"] > 4
