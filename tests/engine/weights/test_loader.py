"""From a checkpoint to every rank's tensors: the values that were written, and bytes that were planned, no more."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from firstlight.engine.errors import Refused
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.model.rules import Matcher, rule
from firstlight.engine.model.spec import ModelSpec
from firstlight.engine.parallel.constraints import violations
from firstlight.engine.parallel.hardware import Cluster, Device
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.parallel.pieces import on_stage, rank_pieces
from firstlight.engine.parallel.placement import localize
from firstlight.engine.parallel.plan import make_plan
from firstlight.engine.weights import loader
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.files.safetensors_file import write
from firstlight.engine.weights.formats.plain import Plain
from firstlight.engine.weights.ledger import Ledger, account
from firstlight.engine.weights.loader import LoadProgress, Weights, load
from firstlight.engine.weights.loading import placing
from firstlight.engine.weights.synthesize import Stored, Values, outlines_of, synthesize, value_of
from tests.checkpoints import TINY
from tests.engine.weights.files import LLAMA

MESHES = [Mesh(), Mesh(tp=2), Mesh(tp=4), Mesh(pp=3), Mesh(ep=2), Mesh(tp=2, pp=2, ep=2), Mesh(tp=2, ep=4)]
FAMILIES_TRIED = {
    "llama": False,
    "llama-tied": False,
    "llama-vocab257": False,
    "mistral": False,
    "qwen2": False,
    "qwen3-bias": False,
    "gemma2": False,
    "qwen3_moe": True,
    "mixtral": False,
    "deepseek_v3": False,
    "llava-clip": False,
}


class Written:
    """A synthetic checkpoint, its description and account, and the values that went into it."""

    def __init__(self, config: dict[str, Any], home: Path, **options: Any) -> None:
        self.values: Values = synthesize(config, home, **options)
        self.checkpoint = Checkpoint.open(home)
        self.spec, matcher = FAMILIES.describe(config)
        self.ledger = account(self.checkpoint, self.spec, matcher)
        self.ledger.refuse_if_incomplete()

    def load(self, mesh: Mesh, rank: int, dtype: str = "F32", **options: Any) -> Weights:
        return load(self.checkpoint, rank_pieces(self.spec, mesh, rank, dtype, self.ledger), **options)


def expected(spec: ModelSpec, values: Values, mesh: Mesh, rank: int) -> dict[str, np.ndarray]:
    """What a rank must hold, cut from whole values by placements alone."""
    at = mesh.coordinates(rank)
    cut = rank_pieces(spec, mesh, rank, "F32").layers
    found = {}
    for param in spec.parameters():
        local = localize(param.shape, param.placements, mesh, at)
        if local is None or not on_stage(param, cut, spec.num_layers):
            continue
        if param.name == "head.weight" and spec.tied_head and mesh.pp == 1:
            continue
        value = values.get(param.name, values["embed.weight"])
        found[param.name] = value[tuple(slice(*bounds) for bounds in local.bounds)]
    return found


def same(weights: Weights, wanted: dict[str, np.ndarray]) -> None:
    assert set(weights.params) == set(wanted)
    for name, value in wanted.items():
        found = weights.params[name].float().numpy()
        np.testing.assert_array_equal(found, value, err_msg=name)


@pytest.mark.parametrize("name", FAMILIES_TRIED)
def test_every_rank_of_every_mesh_holds_what_was_written(name: str, tmp_path: Path) -> None:
    """Predicted bytes == planned bytes == bytes resident, and every value in its place."""
    written = Written(dict(TINY[name].config), tmp_path, shards=3, fused=FAMILIES_TRIED[name])
    tried = 0
    for mesh in MESHES:
        if violations(written.spec, mesh):
            continue
        tried += 1
        on = Cluster(nodes=1, per_node=mesh.world_size, device=Device(name="X", memory_bytes=1 << 30))
        planned = make_plan(written.spec, Plain("F32"), on, mesh).ranks
        for rank in range(mesh.world_size):
            weights = written.load(mesh, rank, threads=2)
            same(weights, expected(written.spec, written.values, mesh, rank))
            assert weights.nbytes == weights.pieces.nbytes == planned[rank].weight_bytes
            assert weights.pool.taken_bytes >= weights.nbytes
            assert weights.bytes_read >= weights.bytes_needed
    assert tried >= 4


def test_bytes_read_are_the_bytes_needed_where_rows_are_whole(tmp_path: Path) -> None:
    written = Written(dict(TINY["llama"].config), tmp_path)
    weights = written.load(Mesh(), 0)
    assert weights.bytes_read == weights.bytes_needed == written.checkpoint.payload_bytes == weights.nbytes
    halves = [written.load(Mesh(pp=2), rank) for rank in range(2)]
    assert sum(half.bytes_read for half in halves) == written.checkpoint.payload_bytes


@pytest.mark.parametrize("stored", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("run", ["F32", "BF16", "F16"])
def test_stored_and_run_dtypes(stored: Stored, run: str, tmp_path: Path) -> None:
    """Read straight where they agree, converted to nearest where they do not; float32 pins stay float32."""
    written = Written(dict(TINY["deepseek_v3"].config), tmp_path, dtype=stored)
    weights = written.load(Mesh(tp=2), 1, dtype=run)
    wanted = expected(written.spec, written.values, Mesh(tp=2), 1)
    for name, value in wanted.items():
        pinned = name.endswith("correction_bias")
        dtype = torch.float32 if pinned else loader.TORCH_DTYPES[run]
        assert weights.params[name].dtype == dtype
        torch.testing.assert_close(weights.params[name], torch.from_numpy(value).to(dtype), rtol=0, atol=0)


def _forms(*forms: tuple[str, tuple[str, ...], dict[str, Any]]) -> list[Any]:
    return [
        rule(tensor, *(f"layers.{{i}}.ffn.experts.{{e}}.{part}.weight" for part in parts), **options)
        for tensor, parts, options in forms
    ]


STACKED = {
    "gate and up behind one another": _forms(
        ("L.{i}.gu", ("gate", "up"), {"stacked": True}), ("L.{i}.d", ("down",), {"stacked": True})
    ),
    "in turns, down transposed": _forms(
        ("L.{i}.gu", ("gate", "up"), {"stacked": True, "interleaved": True}),
        ("L.{i}.d", ("down",), {"stacked": True, "transpose": True}),
    ),
    "transposed side by side": _forms(
        ("L.{i}.gu", ("gate", "up"), {"stacked": True, "transpose": True, "split_dim": 1}),
        ("L.{i}.d", ("down",), {"stacked": True, "transpose": True}),
    ),
    "transposed in turns": _forms(
        ("L.{i}.gu", ("gate", "up"), {"stacked": True, "transpose": True, "split_dim": 1, "interleaved": True}),
        ("L.{i}.d", ("down",), {"stacked": True}),
    ),
    "one an expert, in turns": _forms(
        ("L.{i}.{e}.gu", ("gate", "up"), {"interleaved": True}), ("L.{i}.{e}.d", ("down",), {"transpose": True})
    ),
}


@pytest.fixture(scope="module", params=STACKED)
def odd(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A mixture of experts stored in an unusual way."""
    home = tmp_path_factory.mktemp("odd")
    config = {**dict(TINY["qwen3_moe"].config), "mlp_only_layers": [], "num_hidden_layers": 2}
    written = Written(config, home)
    _, matcher = FAMILIES.describe(config)
    rules = [r for r in matcher.rules if not any("experts" in param for param in r.params)] + STACKED[request.param]
    stored = {item.tensor: value_of(item, written.values) for item in outlines_of(written.spec, rules)}
    write(home / "model.safetensors", stored)
    written.checkpoint = Checkpoint.open(home)
    written.ledger = account(written.checkpoint, written.spec, Matcher(rules))
    written.ledger.refuse_if_incomplete()
    return written


@pytest.mark.parametrize(
    "mesh", [Mesh(), Mesh(tp=2), Mesh(ep=4), Mesh(tp=4, ep=2), Mesh(pp=2, tp=2)], ids=Mesh.describe
)
@pytest.mark.parametrize("staging_bytes", [16 << 20, 700])
def test_unusual_storage(odd: Written, mesh: Mesh, staging_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacked, split, in turns, transposed, in any mesh; with a staging buffer that holds all, or a few rows."""
    monkeypatch.setattr(placing, "STAGING_BYTES", staging_bytes)
    for rank in range(mesh.world_size):
        same(odd.load(mesh, rank), expected(odd.spec, odd.values, mesh, rank))


def wide(tmp_path: Path, **more: Any) -> Written:
    """Rows so wide that a share of a row is worth a read of its own."""
    sizes = {"hidden_size": 64, "intermediate_size": 16384, "num_hidden_layers": 1, "num_attention_heads": 8}
    return Written({**LLAMA, **sizes, "num_key_value_heads": 2, **more}, tmp_path)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_of_a_wide_row_only_the_share_of_the_rank_is_read(dtype: str, tmp_path: Path) -> None:
    """`down` is cut along its rows: 16,384 numbers in four shares of 16 KiB, read one by one."""
    written, mesh = wide(tmp_path), Mesh(tp=4)
    total = 0
    for rank in range(4):
        weights = written.load(mesh, rank, dtype=dtype, threads=2)
        wanted = expected(written.spec, written.values, mesh, rank)
        for name, value in wanted.items():
            torch.testing.assert_close(
                weights.params[name], torch.from_numpy(value).to(loader.TORCH_DTYPES[dtype]), rtol=0, atol=0
            )
        over = weights.bytes_read - weights.bytes_needed
        assert over == 3 * 64 * 16 * 4, "only `o`, with rows of 256 bytes, is read whole"
        total += weights.bytes_needed
    assert total < 1.1 * written.checkpoint.payload_bytes


def test_progress_counts_what_is_read_layer_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "JOB_BYTES", 1)  # every step is read by itself
    written = Written(dict(TINY["llama"].config), tmp_path)
    told: list[LoadProgress] = []
    weights = written.load(Mesh(tp=2), 1, progress=told.append)
    assert [step.bytes_done for step in told] == sorted(step.bytes_done for step in told)
    assert told[-1].bytes_done == told[-1].bytes_total == weights.bytes_read
    assert {step.bytes_total for step in told} == {weights.bytes_read}
    assert [step.layer for step in told] == sorted(step.layer for step in told)
    assert {0, 1, 2} < {step.layer for step in told}


def test_padding_of_the_vocabulary_is_zero(tmp_path: Path) -> None:
    written = Written(dict(TINY["llama-vocab257"].config), tmp_path)
    last = written.load(Mesh(tp=4), 3)
    assert last.storages["head.weight"].shape == (65, 32)
    assert last.params["head.weight"].shape == (62, 32)
    assert (last.storages["head.weight"][62:] == 0).all()
    assert (last.storages["embed.weight"][62:] == 0).all()


def test_more_ranks_than_rows_of_the_vocabulary(tmp_path: Path) -> None:
    config = {**LLAMA, "vocab_size": 5, "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 16}
    written = Written(config, tmp_path)
    for rank in range(4):
        weights = written.load(Mesh(tp=4), rank)
        assert weights.storages["embed.weight"].shape == (2, 16)
        same(weights, expected(written.spec, written.values, Mesh(tp=4), rank))


def test_a_tied_head_is_one_tensor_on_one_stage(tmp_path: Path) -> None:
    written = Written(dict(TINY["llama-tied"].config), tmp_path)
    alone = written.load(Mesh(), 0)
    assert alone.tied_head
    assert alone.storages["head.weight"].data_ptr() == alone.storages["embed.weight"].data_ptr()
    first, last = (written.load(Mesh(pp=2), rank) for rank in range(2))
    assert not first.tied_head
    assert "head.weight" not in first.storages
    torch.testing.assert_close(last.storages["head.weight"], first.storages["embed.weight"], rtol=0, atol=0)


@pytest.mark.parametrize("how", ["cut", "gone"])
def test_a_file_that_changes_under_the_load_is_refused(how: str, tmp_path: Path) -> None:
    written = Written(dict(TINY["llama"].config), tmp_path, shards=2)
    path = tmp_path / "model-00002-of-00002.safetensors"
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        path.unlink()
    with pytest.raises(Refused) as caught:
        written.load(Mesh(), 0)
    assert caught.value.findings[0].code == ("truncated-shard" if how == "cut" else "missing-shard")
    assert str(path) in str(caught.value)


def test_memory_stays_within_weights_and_staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Converted pieces pass through the staging buffer, never more of them at a time than it holds."""
    sizes: list[int] = []
    monkeypatch.setattr(placing, "STAGING_BYTES", 64 << 10)
    empty = torch.empty

    def watch(*args: Any, **options: Any) -> torch.Tensor:
        sizes.append(int(args[0]))
        return empty(*args, **options)

    monkeypatch.setattr(loader.torch, "empty", watch)
    written = wide(tmp_path, intermediate_size=4096)
    weights = written.load(Mesh(tp=2), 0, dtype="BF16")
    monkeypatch.undo()
    assert sum(sizes) >= weights.bytes_needed
    assert max(sizes) <= 1.2 * (64 << 10)
    assert not any(torch.isnan(value).any() for value in weights.params.values())


def test_a_ledger_and_a_mesh_give_the_reads_of_a_rank_without_reading(tmp_path: Path) -> None:
    """A read plan is data: regions of stored tensors, from the account alone."""
    written = Written(dict(TINY["llama"].config), tmp_path)
    ledger: Ledger = written.ledger
    (o,) = [
        p
        for p in rank_pieces(written.spec, Mesh(tp=2), 1, "F32", ledger).pieces
        if p.param == "layers.0.mixer.o.weight"
    ]
    assert o.tensor == "model.layers.0.self_attn.o_proj.weight"
    assert o.region == ((0, 32, 1), (16, 32, 1))
    assert o.shape == (32, 16)
    assert math.prod(o.shape) * 4 == 2048
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"
