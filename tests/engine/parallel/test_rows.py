"""Steps divided by tokens, over sp and over ep: the results of one rank, by the collectives that were meant."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.parallel.constraints import allowed, refuse_impossible, violations
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.parallel.rows import EXCHANGE_ROWS, LEAST_ROWS, row_axes, undivided
from firstlight.engine.weights.checkpoint import Checkpoint
from tests.checkpoints import inputs
from tests.engine.direct import Direct
from tests.engine.parallel.test_meshes import mesh_of
from tests.engine.ranks import Job, run_everything

LIMIT = 1e-4
EXPERTS = 1e-5

# checkpoint -> (mesh, exchange)
CASES: dict[str, tuple[tuple[str, str], ...]] = {
    "llama": (("sp2", "auto"), ("sp3", "auto"), ("tp2 sp2", "auto"), ("tp2 sp2 whole", "auto"), ("pp2 sp2", "auto")),
    "llama-rope-dynamic": (("sp2", "auto"),),  # stretched by the length of the whole sequence
    "mistral": (("sp3", "auto"),),  # a window
    "deepseek_v3": (("sp2", "auto"), ("tp2 sp2", "auto"), ("ep4", "all-to-all"), ("sp2 ep2", "all-to-all")),
    "qwen3_moe": (
        ("ep2", "reduce"),
        ("ep2", "all-to-all"),
        ("ep4", "all-to-all"),
        ("tp2 ep2", "all-to-all"),
        ("pp2 ep2", "all-to-all"),
        ("sp2 ep2", "reduce"),
    ),
    "llava-clip": (("sp2", "auto"), ("pp2 sp2", "auto")),  # picture features on rows of either rank
    "llava-moe": (("ep2", "all-to-all"),),
}
EVERY = [(name, mesh, exchange) for name, cases in CASES.items() for mesh, exchange in cases]

Get = Callable[[str], Path]
Jobs = dict[tuple[str, str, str], Job]


@pytest.fixture(scope="module")
def jobs(checkpoint: Get, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    home = tmp_path_factory.mktemp("rows")
    for name in CASES:
        np.savez(home / f"{name}.npz", **inputs(name))
    made = {
        (name, mesh, how): Job(
            checkpoint(name), mesh_of(mesh), home / f"{name}.npz", home / f"{name} {mesh} {how}", how
        )
        for name, mesh, how in EVERY
    }
    run_everything(list(made.values()), home / "store")
    return made


@pytest.mark.parametrize(("name", "mesh", "exchange"), EVERY)
def test_divided_rows_give_the_results_of_one_rank(
    name: str, mesh: str, exchange: str, jobs: Jobs, checkpoint: Get
) -> None:
    job = jobs[name, mesh, exchange]
    found, expected = job.results(), Direct(checkpoint(name)).run(inputs(name))
    assert set(found) == set(expected)
    limit = EXPERTS * np.abs(expected["logits"]).max() if job.mesh.tp == job.mesh.sp == 1 else LIMIT
    for key, value in expected.items():
        assert found[key].shape == value.shape, key
        assert np.abs(found[key] - value).max() <= limit, key


@pytest.mark.parametrize(("name", "mesh", "exchange"), EVERY)
def test_the_rows_were_divided_as_was_meant(name: str, mesh: str, exchange: str, jobs: Jobs) -> None:
    """Not computed whole on every rank, which would give the same numbers."""
    job = jobs[name, mesh, exchange]
    for calls in job.operations():
        travels = exchange == "all-to-all"
        assert ("all_to_all ep" in calls) == travels
        assert ("all_reduce ep" in calls) == (job.mesh.ep > 1 and not travels)
        axis = "rows" if travels and job.mesh.sp > 1 else "ep" if travels else "sp"
        if travels or job.mesh.sp > 1:
            assert calls[f"all_gather {axis}"] >= 2, "keys and values of every layer"


def test_small_steps_and_decodes_stay_whole(checkpoint: Get) -> None:
    spec, _ = FAMILIES.describe(Checkpoint.open(checkpoint("qwen3_moe")).config)
    mesh, both = Mesh(sp=2, ep=2), ("ep", "sp")
    assert row_axes(spec, mesh, "auto", 2 * LEAST_ROWS - 1, prefills=True) == ()
    assert row_axes(spec, mesh, "auto", 2 * LEAST_ROWS, prefills=True) == ("sp",)
    assert row_axes(spec, mesh, "auto", 4 * EXCHANGE_ROWS, prefills=True) == both
    assert row_axes(spec, mesh, "reduce", 4 * EXCHANGE_ROWS, prefills=True) == ("sp",)
    assert row_axes(spec, mesh, "auto", 4 * EXCHANGE_ROWS, prefills=False) == ()
    assert row_axes(spec, mesh, "all-to-all", 4, prefills=False) == both
    assert row_axes(spec, mesh, "all-to-all", 3, prefills=False) == ()


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next", "deepseek_v32"])
def test_layers_that_need_all_rows_are_refused_by_name_with_a_way_out(name: str, checkpoint: Get) -> None:
    spec, _ = FAMILIES.describe(Checkpoint.open(checkpoint(name)).config)
    (finding,) = violations(spec, Mesh(sp=2))
    assert finding.code == "unsupported-axis"
    assert undivided(spec) in finding.message
    assert "layer" in finding.message
    assert allowed(spec, "sp") == (1,)
    way = {part.split()[0]: int(part.split()[1]) for part in str(finding.next).split("--")[1:]}
    assert not violations(spec, Mesh(**way))  # type: ignore[arg-type]
    with pytest.raises(Refused, match="cannot be sent to experts"):
        refuse_impossible(spec, Mesh(ep=2), "all-to-all")
