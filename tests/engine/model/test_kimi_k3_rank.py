"""Rank r of N on this machine: any rank's share of Kimi K3, its layers at their true shapes, one forward of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.weights.synthesize import outline
from firstlight.workbench.cli import main
from firstlight.workbench.one_rank import one_rank
from firstlight.workbench.report import Report
from tests.kimi_k3 import FACTS, write_checkpoint

EIGHT = Mesh(tp=2, pp=2, ep=2)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("toy") / "k3")


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first four layers of the release at their true sizes, as holes of sparse files."""
    home = tmp_path_factory.mktemp("release") / "k3"
    config = {key: value for key, value in json.loads(FACTS.read_text()).items() if not key.startswith("_")}
    config["text_config"]["num_hidden_layers"] = 4
    config["text_config"]["linear_attn_config"] |= {"full_attn_layers": [4], "kda_layers": [1, 2, 3]}
    assert outline(config, home, shards=4) == 58_480_464_384
    return home


def values(report: Report) -> dict[str, Any]:
    return {name: metric.value for name, metric in report.metrics.items()}


@pytest.mark.parametrize("rank", range(8))
def test_every_rank_of_eight_reads_its_own_bytes_and_runs(rank: int, toy: Path) -> None:
    stage = (0, 3) if rank < 4 else (3, 6)
    report = one_rank(toy, EIGHT, rank, stage, forward=True, dtype="F32")
    assert report.passed, [check for check in report.checks if check.status == "failed"]
    memory = {row["role"]: row for row in report.tables["memory"]}
    layers = sum(row["layers_resident_bytes"] for row in memory.values())
    ends = sum(memory[role]["rank_bytes"] for role in memory.keys() & {"vision", "projector", "embedding", "head"})
    rest = values(report)["rank_bytes"] - layers - ends
    assert rest == (0 if rank < 4 else (3 * 64) * 4)  # the last stage reads its planes once more, and has a last norm
    assert [row["layer"] for row in report.tables["layers"]] == list(range(*stage))


@pytest.mark.parametrize("mesh", [Mesh(tp=48, ep=28), Mesh(tp=24, pp=2, ep=56)], ids=lambda mesh: mesh.describe())
def test_a_layer_at_its_true_shapes(mesh: Mesh, release: Path) -> None:
    report = one_rank(release, mesh, mesh.world_size - 5, (3, 4), forward=True)
    assert report.passed, [check for check in report.checks if check.status == "failed"]
    (row,) = report.tables["layers"]
    assert row["mixer"].startswith("MLA, 96 heads")
    rows = 8 * 16 // mesh.ep  # of 8 tokens that choose 16 experts each, spread evenly
    assert f"{rows} of 128 rows went to this rank's experts" in report.checks[-1].detail
    memory = {row["role"]: row["layers_resident_bytes"] for row in report.tables["memory"]}
    experts = 896 // mesh.ep * 3 * 3584 * 3072 // mesh.tp * 17 // 32
    assert memory["expert"] == experts
    assert values(report)["checkpoint_bytes"] > 20 * values(report)["rank_bytes"]


def test_layers_and_ranks_that_are_not_there_are_refused(toy: Path) -> None:
    for rank, layers in ((8, None), (-1, None), (0, (3, 4)), (5, (0, 1)), (0, (0, 6))):
        with pytest.raises(Refused) as caught:
            one_rank(toy, EIGHT, rank, layers)
        assert caught.value.findings[0].code == "usage"


def test_on_the_command_line(toy: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    mesh = ["--tp", "2", "--ep", "4"]
    assert main(["load", str(toy), *mesh, "--rank", "6", "--layers", "1:3", "--forward", "-q", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["title"] == "k3, rank 6 of 8, tp 2 x ep 4" or "rank 6 of 8" in report["title"]
    assert {check["status"] for check in report["checks"]} == {"passed"}
    assert main(["load", str(toy), *mesh, "--forward", "-q"]) == 2
