"""Any mesh gives the logits of one rank: float32, largest difference 1e-4; four processes work through all."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from firstlight.engine.model.families import FAMILIES
from firstlight.engine.parallel.comm import Comm, Comms, Recorder
from firstlight.engine.parallel.estimate import Roofline
from firstlight.engine.parallel.hardware import parse_cluster
from firstlight.engine.parallel.mesh import HEADS, Mesh
from firstlight.engine.weights.checkpoint import Checkpoint
from tests import families
from tests.checkpoints import inputs
from tests.engine.direct import Direct
from tests.engine.ranks import Job, run_everything
from tests.families.verified import tell

LIMIT = 1e-4

# name of the checkpoint -> the meshes it is tried on.
MESHES: dict[str, tuple[str, ...]] = {
    "llama": ("tp2", "tp4", "pp2", "pp3", "tp2 pp2"),  # two key/value heads: tp 4 replicates them
    "llama-biases": ("tp2", "tp4", "pp2"),
    "llama-bf16": ("tp2", "tp4"),
    "llama-tied": ("tp2", "pp2", "tp2 pp2"),
    "llama-vocab257": ("tp2", "tp4"),
    "llama-thirds": ("tp3", "tp2 whole", "tp4 whole"),  # six query and three key heads: whole, any tp will do
    "llama-rope-dynamic": ("tp2 pp2",),
    "mistral": ("tp2", "pp2"),
    "qwen2": ("tp2", "tp2 pp2"),
    "qwen3": ("tp4", "pp2"),
    "qwen3_moe": ("tp2", "ep2", "ep4", "tp2 ep2", "pp2 ep2", "tp2 pp2"),
    "qwen3_moe-bf16": ("tp2 ep2",),
    "mixtral": ("tp2", "ep2 pp2", "tp2 ep2"),
    "deepseek_v3": ("tp2", "tp4", "ep2", "pp2 ep2", "tp2 ep2"),
    "deepseek_v3-full-q": ("tp2 pp2",),
    "gemma2": ("tp2", "tp2 pp2"),
    "llava-clip": ("tp2", "pp2", "tp2 pp2"),
    "llava-moe": ("ep2", "tp2 ep2"),
    "cohere2_vision": ("tp2", "pp2"),
    "llava-siglip": ("tp2", "pp2"),
    **families.MESHES,
}
WHOLE: dict[str, tuple[str, ...]] = {  # attention whole on every rank of tp
    "deepseek_v3": ("tp2 ep2 whole",),
    "gemma2": ("tp2 pp2 whole",),
    "qwen3_next": ("tp2 whole",),
    "falcon_h1": ("tp2 whole",),
    "llava-clip": ("tp2 whole",),
}
MESHES |= {name: (*MESHES[name], *meshes) for name, meshes in WHOLE.items()}
CASES = [(name, mesh) for name, meshes in MESHES.items() for mesh in meshes]


def mesh_of(text: str) -> Mesh:
    sizes = {part[:2]: int(part[2:]) for part in text.split() if part != "whole"}
    return Mesh(**sizes, attention="whole" if "whole" in text else "divided")


@pytest.fixture(scope="module")
def jobs(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Job]:
    home = tmp_path_factory.mktemp("meshes")
    for name in MESHES:
        np.savez(home / f"{name}.npz", **inputs(name))
    made = {
        (name, mesh): Job(checkpoint(name), mesh_of(mesh), home / f"{name}.npz", home / f"{name} {mesh}")
        for name, mesh in CASES
    }
    run_everything(list(made.values()), home / "store")
    return made


@pytest.fixture(scope="module")
def alone(checkpoint: Callable[[str], Path]) -> Callable[[str], dict[str, np.ndarray]]:
    kept: dict[str, dict[str, np.ndarray]] = {}

    def get(name: str) -> dict[str, np.ndarray]:
        if name not in kept:
            kept[name] = Direct(checkpoint(name)).run(inputs(name))
        return kept[name]

    return get


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_a_mesh_equals_one_rank(
    name: str,
    mesh: str,
    jobs: dict[tuple[str, str], Job],
    alone: Callable[[str], dict[str, np.ndarray]],
    request: pytest.FixtureRequest,
) -> None:
    found, expected = jobs[name, mesh].results(), alone(name)
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert found[key].shape == value.shape, key
        assert np.abs(found[key] - value).max() <= LIMIT, key
    tell(request, jobs[name, mesh].checkpoint, mesh)


def test_padding_rows_of_the_vocabulary_do_not_show(jobs: dict[tuple[str, str], Job]) -> None:
    for name, mesh, rows in (
        ("llama-vocab257", "tp2", 129),
        ("llama-vocab257", "tp4", 65),
        ("llama-thirds", "tp3", 86),
    ):
        job = jobs[name, mesh]
        assert {shapes["head.weight"][0] for shapes in job.storages()} == {rows}
        assert job.results()["logits"].shape[-1] == 257


def test_a_tied_head_is_on_the_last_stage_too(jobs: dict[tuple[str, str], Job]) -> None:
    first, last = jobs["llama-tied", "pp2"].storages()
    assert "embed.weight" in first
    assert "head.weight" not in first
    assert "head.weight" in last
    assert "embed.weight" not in last


def test_key_value_heads_are_replicated_when_ranks_are_more(jobs: dict[tuple[str, str], Job]) -> None:
    for shapes in jobs["llama", "tp4"].storages():
        assert shapes["layers.0.mixer.qkv.weight"] == [3 * 8, 32]  # one query head, one key head, one value head


def test_experts_are_divided(jobs: dict[tuple[str, str], Job]) -> None:
    for shapes in jobs["qwen3_moe", "tp2 ep2"].storages():
        assert shapes["layers.0.ffn.experts.gate_up"] == [4, 20, 32]
        assert shapes["layers.0.ffn.experts.down"] == [4, 32, 10]


@pytest.mark.parametrize(("name", "mesh"), [case for case in CASES if "whole" in case[1]])
def test_whole_mixers_are_alike_on_all_ranks_and_sum_nothing(
    name: str, mesh: str, jobs: dict[tuple[str, str], Job], checkpoint: Callable[[str], Path]
) -> None:
    """To the last bit, so that no rank routes a token elsewhere; and tp sums as often as was planned."""
    job = jobs[name, mesh]
    seen = [dict(np.load(job.out / f"{rank}.npz")) for rank in range(job.mesh.world_size)]
    for rank in range(0, job.mesh.world_size, job.mesh.tp):
        for other in seen[rank + 1 : rank + job.mesh.tp]:
            for key, value in seen[rank].items():
                np.testing.assert_array_equal(other[key], value, err_msg=key)
    spec, _ = FAMILIES.describe(Checkpoint.open(checkpoint(name)).config)
    traffic = Roofline(spec, parse_cluster("8xH200")).traffic(job.mesh)
    planned = sum(row.calls_per_step for row in traffic if row.axis == "tp" and row.operation == "all_reduce")
    if job.mesh.pp == 1:
        assert {calls["all_reduce tp"] for calls in job.operations()} == {planned}


KINDS = (  # of mixers, one of each, and of norms over heads
    "llama-thirds",
    "falcon",
    "cohere",
    "olmo2",
    "stablelm-norms",
    "bloom",
    "gpt_oss",
    "minimax_m3",
    "deepseek_v32",
    "deepseek_v4",
    "kimi_linear",
    "bamba",
    "jamba",
    "falcon_h1",
    "lfm2",
    "recurrent_gemma",
    "minimax",
)


class Watched(Comm):
    """One rank alone that says when it was asked to sum."""

    events: list[str]

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.events.append(self.axis)
        return tensor


@pytest.mark.parametrize("name", KINDS)
def test_mixers_sum_over_their_own_axis_and_nothing_else_does(name: str, checkpoint: Callable[[str], Path]) -> None:
    events: list[str] = []
    watched = {axis: Watched(axis, (0,), 0, None, Recorder()) for axis in ("tp", HEADS)}
    for comm in watched.values():
        comm.events = events
    model = Direct(checkpoint(name), comms=replace(Comms.alone(), **watched))
    ids = inputs(name)["input_ids"][0]
    model.model.forward(replace(model.batch([len(ids)], ids), tap=lambda block, _: events.append(block)))
    for index, layer in enumerate(model.spec.layers):
        start = events.index("embed" if index == 0 else f"layers.{index - 1}")
        mixed = events.index(f"layers.{index}.mixer") if layer.mixer is not None else start
        end = events.index(f"layers.{index}") if index < model.spec.num_layers - 1 else len(events)
        assert set(events[start + 1 : mixed]) == ({HEADS} if layer.mixer is not None else set())
        assert HEADS not in events[mixed + 1 : end]
    for param in model.spec.parameters():
        axes = {place.axis for place in param.placements}
        assert axes <= ({HEADS} if ".mixer." in param.name else {"tp", "ep"}), param.name
