"""Layers that come and go: the same numbers as with all of them in memory, within the budget, and honest counts."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from firstlight.engine.errors import Refused
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.parallel.kept import Residency
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.parallel.pieces import rank_pieces
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.ledger import account
from firstlight.engine.weights.loading import room
from firstlight.engine.weights.loading.hold import hold
from firstlight.engine.weights.loading.readers import Job, read_jobs
from firstlight.engine.weights.sources.local import LocalFiles
from tests.engine.direct import Direct
from tests.engine.weights.holding import STAGING, Get, Held, inputs, least, same
from tests.engine.weights.quantized import CONFIGS
from tests.engine.weights.test_formats_load import written
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("small_staging")


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek_v3", "qwen3_moe", "llama-tied"])
def test_layers_through_a_budget_give_the_same_numbers(name: str, checkpoint: Get, held: Callable[..., Held]) -> None:
    """Two layers have room at a time; passes follow one another, so every layer comes more than once."""
    path = checkpoint(name)
    whole = Direct(path)
    streamed = held(path, "streamed", least(path, "streamed", held))
    for one in inputs(3):
        same(streamed.run(one), whole.run(one))
        streamed.weights.stream.check()
    report = streamed.weights.residency()
    layers = whole.spec.num_layers
    assert report.units == 2
    assert report.hits + report.misses == 3 * layers
    assert (report.misses > 0) == (report.waited_s > 0), "what is there in time is not waited for"
    assert report.held_bytes <= report.budget_bytes < report.whole_bytes + STAGING
    if layers > 2:
        assert report.fetched_bytes > whole.weights.bytes_needed * 0.5


@pytest.mark.parametrize(("kind", "mesh"), [("streamed", Mesh()), ("streamed", Mesh(tp=2)), ("experts", Mesh())])
def test_no_more_staging_is_counted_than_the_pieces_can_take(
    kind: Residency, mesh: Mesh, checkpoint: Get, held: Callable[..., Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the staging memory of large models: a tiny one still goes through a budget smaller than itself."""
    monkeypatch.setattr(room, "STAGING_BYTES", 32 << 20)
    path = checkpoint("qwen3_moe-bf16" if kind == "experts" else "qwen3_moe")
    coming = held(path, kind, least(path, kind, lambda *those: held(*those, mesh)), mesh)
    report = coming.weights.residency()
    assert report.held_bytes <= report.budget_bytes
    assert report.budget_bytes < report.whole_bytes


def test_layers_that_stay_are_read_once_and_are_spread(checkpoint: Get, held: Callable[..., Held]) -> None:
    path = checkpoint("qwen3_moe")
    smallest = least(path, "streamed", held)
    two = held(path, "streamed", smallest).weights.stream
    slot = two.pool.reserved_bytes // 2
    three = held(path, "streamed", smallest + slot)
    layers = three.spec.num_layers
    assert three.weights.residency().units == min(3, layers)
    for one in inputs(4):
        three.run(one)
    counts = three.weights.stream._fetch_counts
    stays = three.weights.stream._pinned
    assert all(counts[layer] == 1 for layer in stays)
    if layers > 3:
        assert any(counts[layer] > 1 for layer in range(layers) if layer not in stays)


def test_any_order_of_turns_is_served(checkpoint: Get, held: Callable[..., Held]) -> None:
    """Teacher forcing and bisection ask for layers as they like."""
    path = checkpoint("deepseek_v3")
    stream = held(path, "streamed", least(path, "streamed", held)).weights.stream
    whole = Direct(path).weights.storages
    for layer in (2, 0, 0, 2, 1, 2, 1, 0):
        layer = min(layer, len(stream.layers(lambda storages, index: index)) - 1)
        _, storages = stream.turn_to(layer)
        for name, value in storages.items():
            torch.testing.assert_close(value, whole[name], rtol=0, atol=0)
        stream.check()


@pytest.mark.parametrize(
    ("name", "kind"), [("mxfp4", "experts"), ("nvfp4", "streamed"), ("fp8-blocks", "experts"), ("gptq", "experts")]
)
def test_quantized_weights_come_and_go_as_they_are_kept(
    name: str, kind: Residency, held: Callable[..., Held], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes of experts, and all that stands beside them; numbers where they are unpacked while they are read."""
    monkeypatch.setattr(room, "STAGING_BYTES", 256 << 10)
    written("qwen3_moe", CONFIGS[name], tmp_path)
    whole = Direct(tmp_path)
    coming = held(tmp_path, kind, least(tmp_path, kind, held))
    for one in inputs(2):
        same(coming.run(one), whole.run(one))
    report = coming.weights.residency()
    assert report.fetched_bytes > 0
    assert report.misses > 0 or kind == "streamed", "layers are read ahead, experts when tokens choose them"


@pytest.mark.parametrize("kind", ["streamed", "experts", "resident"])
def test_the_least_budget_that_is_named_is_that_of_the_rank_that_needs_most(kind: Residency, checkpoint: Get) -> None:
    """Whichever rank says it, a stage without experts too. With that budget every rank comes up."""
    checkpoint_ = Checkpoint.open(str(checkpoint("deepseek_v3")))
    spec, matcher = FAMILIES.describe(checkpoint_.config)
    ledger = account(checkpoint_, spec, matcher)
    said: list[list[int]] = [[], []]  # what each rank asks the others about

    def budget_of(rank: int, budget_bytes: int, others: list[int]) -> int | None:
        """The least budget that a rank names; None if it came up."""
        others = list(others)

        def largest(number: int) -> int:
            said[rank].append(number)
            return max(number, others.pop(0)) if others else number

        pieces = rank_pieces(spec, Mesh(pp=3), rank, "F32", ledger)
        try:
            hold(checkpoint_, pieces, torch.device("cpu"), kind, budget_bytes, largest=largest).close()
        except Refused as refused:
            return int(str(refused.findings[0].expected).split()[2].replace(",", ""))
        return None

    needs = [budget_of(rank, 1000, [1] if kind == "experts" else []) for rank in range(2)]
    assert needs[0] != needs[1]
    assert None not in needs
    most = max(needs)
    alike = [list(numbers) for numbers in said]
    assert len(alike[0]) == len(alike[1]), "all ranks ask at once, or one would wait for ever"
    assert [budget_of(rank, most - 1, alike[1 - rank]) for rank in range(2)] == [most, most]
    assert [budget_of(rank, most, alike[1 - rank]) for rank in range(2)] == [None, None]


def test_a_budget_below_the_whole_is_refused_where_all_is_to_be_resident(
    checkpoint: Get, held: Callable[..., Held]
) -> None:
    with pytest.raises(Refused, match="does-not-fit"):
        held(checkpoint("llama"), "resident", 1000)


def test_a_file_that_vanishes_while_layers_come_is_said_and_not_waited_for(
    checkpoint: Get, held: Callable[..., Held], tmp_path: Path
) -> None:
    import shutil

    home = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    streamed = held(home, "streamed", least(home, "streamed", held))
    streamed.run(inputs()[0])
    for file in home.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(Refused, match="is not there"):
        [streamed.run(one) for one in inputs(2)]


@pytest.mark.parametrize(("name", "kind"), [("llama", "streamed"), ("qwen3_moe", "experts")])
def test_a_file_that_was_rewritten_and_given_its_old_time_is_said(
    name: str, kind: Residency, checkpoint: Get, held: Callable[..., Held], tmp_path: Path
) -> None:
    """Of the same size and under the same inode, as a copy that keeps times leaves it."""
    import shutil

    home = Path(shutil.copytree(checkpoint(name), tmp_path / "model"))
    coming = held(home, kind, least(home, kind, held))
    coming.run(inputs()[0])
    for file in home.glob("*.safetensors"):
        found = file.stat()
        with file.open("r+b") as stream:
            stream.seek(-64, os.SEEK_END)
            stream.write(bytes(64))
        os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
        assert file.stat().st_mtime_ns == found.st_mtime_ns
    with pytest.raises(Refused, match="changed-file"):
        [coming.run(one) for one in inputs(2)]


@pytest.mark.parametrize("threads", [1, 3])
def test_what_was_read_is_held_by_nobody_once_it_was_worked_on(tmp_path: Path, threads: int) -> None:
    """Also where it was all read before anybody asked: else a load that converts takes as much again as the files."""
    (tmp_path / "file").write_bytes(bytes(range(64)))
    seen: list[weakref.ref[Buffer]] = []
    made: list[Job] = []

    def jobs() -> Iterator[Job]:
        for at in range(8):
            buffer = Buffer(8)
            seen.append(weakref.ref(buffer))
            made.append(Job([(tmp_path / "file", 8 * at, memoryview(buffer))], at))
            del buffer
            yield made[-1]

    for count, job in enumerate(read_jobs(jobs(), LocalFiles(), threads)):
        assert job.payload == count
        until(lambda: not any(one.left for one in made))
        made.clear()
        del job
        until(lambda count=count: not any(one() for one in seen[:count]), "memory of earlier jobs is held")  # type: ignore[misc]
    assert len(seen) == 8


class Buffer(bytearray):
    """Bytes that can be watched going."""
