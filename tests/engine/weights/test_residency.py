"""Weights that come and go: the same numbers as with all of them in memory, within the budget, and honest counts."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from firstlight.engine.errors import Refused
from firstlight.engine.model.build import Model
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.parallel.comm import Comms
from firstlight.engine.parallel.kept import Residency
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.parallel.pieces import rank_pieces
from firstlight.engine.serving.runtime import Engine
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.ledger import account
from firstlight.engine.weights.loading import arriving, expert_cache, overlap, residency
from firstlight.engine.weights.loading.hold import hold
from firstlight.engine.weights.loading.overlap import Overlap
from firstlight.engine.weights.loading.readers import Job, read_jobs
from firstlight.engine.weights.sources.base import unread
from firstlight.engine.weights.sources.local import LocalFiles
from firstlight.kernels.registry import choose
from tests.engine.direct import Arrays, Direct
from tests.engine.weights.quantized import CONFIGS
from tests.engine.weights.test_formats_load import written
from tests.waiting import PATIENCE_S, until

Get = Callable[[str], Path]
STAGING = 16 << 10


@pytest.fixture(autouse=True)
def small_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models are tiny; staging memory as large as a real one's would be larger than they are."""
    monkeypatch.setattr(residency, "STAGING_BYTES", STAGING)
    monkeypatch.setattr(expert_cache, "STAGING_BYTES", STAGING)


class Held(Direct):
    """One rank's part of a checkpoint under a policy, in float32."""

    def __init__(self, path: Path, kind: Residency, budget_bytes: int | None, mesh: Mesh | None = None) -> None:
        checkpoint = Checkpoint.open(str(path))
        self.spec, matcher = FAMILIES.describe(checkpoint.config)
        self.ledger = account(checkpoint, self.spec, matcher)
        self.comms = Comms.alone()
        pieces = rank_pieces(self.spec, mesh or Mesh(), 0, "F32", self.ledger, keep_packed=("expert",))
        self.weights = hold(checkpoint, pieces, torch.device("cpu"), kind, budget_bytes)
        self.ops = choose("cpu", torch.float32, {})
        self.model = Model(self.spec, self.weights, self.ops)


@pytest.fixture
def held() -> Iterator[Callable[..., Held]]:
    made: list[Held] = []

    def make(*arguments: object) -> Held:
        made.append(Held(*arguments))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.weights.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "layers"]


def inputs(count: int = 1) -> list[Arrays]:
    generator = torch.Generator().manual_seed(5)
    return [{"input_ids": torch.randint(3, 31, (2, 9), generator=generator).numpy()} for _ in range(count)]


def least(path: Path, kind: Residency, held: Callable[..., Held]) -> int:
    """The smallest budget that is not refused, as any refusal says."""

    def said(budget_bytes: int) -> int:
        with pytest.raises(Refused) as caught:
            held(path, kind, budget_bytes)
        return int(str(caught.value.findings[0].expected).split()[2].replace(",", ""))

    low = said(1000)
    assert said(low - 1) == low
    return low


def same(got: Arrays, wanted: Arrays) -> None:
    assert set(got) == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(torch.from_numpy(got[name]), torch.from_numpy(value), rtol=1e-5, atol=1e-5)


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
    for module in (residency, expert_cache):
        monkeypatch.setattr(module, "STAGING_BYTES", 32 << 20)
    path = checkpoint("qwen3_moe-bf16" if kind == "experts" else "qwen3_moe")
    coming = held(path, kind, least(path, kind, lambda *those: held(*those, mesh)), mesh)
    report = coming.weights.residency()
    assert report.held_bytes <= report.budget_bytes
    assert report.budget_bytes < report.whole_bytes


@pytest.fixture
def runs_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a source is slow."""
    monkeypatch.setattr(Overlap, "judge", lambda *_: (True, "slow"))


@pytest.mark.usefixtures("runs_meanwhile")
def test_without_a_budget_layers_run_while_others_are_read(checkpoint: Get, held: Callable[..., Held]) -> None:
    path = checkpoint("llama")
    streamed = held(path, "streamed", None)
    whole = Direct(path)
    for one in inputs(2):
        same(streamed.run(one), whole.run(one))
    report = streamed.weights.residency()
    assert (report.units, report.pinned) == (whole.spec.num_layers, whole.spec.num_layers)
    before = report.fetched_bytes
    streamed.run(inputs()[0])
    again = streamed.weights.residency()
    assert again.fetched_bytes == before, "every layer is read once"
    assert again.hits >= 2 * whole.spec.num_layers


@pytest.mark.usefixtures("runs_meanwhile")
def test_a_layer_that_is_not_there_is_a_miss_and_its_wait_is_counted(
    checkpoint: Get, held: Callable[..., Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, arrived = threading.Event(), residency.LayerStream._arrived

    def late(stream: residency.LayerStream, *what: Any) -> None:
        gate.wait(PATIENCE_S)
        arrived(stream, *what)

    monkeypatch.setattr(residency.LayerStream, "_arrived", late)
    streamed = held(checkpoint("llama"), "streamed", None)
    stream = streamed.weights.stream

    def open_late() -> None:
        until(lambda: stream.report().misses)  # somebody stands before it
        time.sleep(0.05)
        gate.set()

    opening = threading.Thread(target=open_late)
    opening.start()
    streamed.run(inputs()[0])
    opening.join()
    report = streamed.weights.residency()
    assert report.misses >= 1
    assert report.hits + report.misses == streamed.spec.num_layers
    assert report.waited_s > 0.02


@pytest.mark.usefixtures("runs_meanwhile")
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_the_first_token_needs_no_expert_that_it_did_not_choose(
    name: str, checkpoint: Get, held: Callable[..., Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads the rest comes after it; then all is there, and the numbers are those of resident weights."""
    over, fill = threading.Event(), arriving.Arriving.fill

    def late(experts: arriving.Arriving, *how: Any) -> None:
        over.wait(PATIENCE_S)
        fill(experts, *how)

    monkeypatch.setattr(arriving.Arriving, "fill", late)
    path = checkpoint(name)
    streamed, whole = held(path, "streamed", None), Direct(path)
    stream = streamed.weights.stream
    token = {"input_ids": inputs()[0]["input_ids"][:1, :1]}
    same(streamed.run(token), whole.run(token))
    assert 0 < stream.arriving.chosen < len(stream.arriving._states)
    assert stream.there_bytes() < stream.whole_bytes
    over.set()
    until(lambda: stream.arriving.is_whole)
    stream.check()
    assert stream.there_bytes() == stream.whole_bytes
    read_bytes = stream.report().fetched_bytes
    for one in inputs(2):
        same(streamed.run(one), whole.run(one))
    assert stream.report().fetched_bytes == read_bytes, "nothing is read twice"


@pytest.mark.usefixtures("runs_meanwhile")
def test_an_expert_that_cannot_be_read_is_said_to_whoever_chose_it(
    checkpoint: Get, held: Callable[..., Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: arriving.Arriving, *_: Any) -> None:
        raise unread("model.safetensors", 0, 1, "the disk is gone")

    monkeypatch.setattr(arriving.Arriving, "_read", broken)
    with pytest.raises(Refused, match="the disk is gone"):
        held(checkpoint("qwen3_moe"), "streamed", None).run(inputs()[0])


@pytest.mark.parametrize(
    ("busy", "idle", "runs"), [(0.6, 0.4, True), (0.9, 0.1, False), (0.5, 0.1, False), (0.1, 0, True)]
)
def test_layers_run_while_others_are_read_where_reading_leaves_time_to(
    busy: float, idle: float, runs: bool, checkpoint: Get, held: Callable[..., Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    watching, cores = Overlap(torch.device("cpu")), torch.get_num_threads()
    clocks = SimpleNamespace(perf_counter=lambda: 7.0, process_time=lambda: 5.0 + 2.0 * busy * cores)
    watching._started_s, watching._computed_s, watching._idle_s = 5.0, 5.0, 5.0  # two seconds ago
    idle_s = 5.0 + 2.0 * idle * psutil.cpu_count()
    with monkeypatch.context() as patched:
        patched.setattr(overlap, "time", clocks)
        patched.setattr(overlap, "_idle_s", lambda: idle_s)
        found, why = watching.judge(1 << 30)
    assert found is runs
    assert ("ran while" in why) is runs
    monkeypatch.setattr(Overlap, "judge", lambda *_: (found, why))
    streamed = held(checkpoint("qwen3_moe"), "streamed", None)
    report = streamed.weights.residency()
    assert report.start == why
    if not runs:
        assert streamed.weights.stream.is_all_there
        assert streamed.weights.stream.arriving.is_whole


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


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "mixtral"])
@pytest.mark.parametrize("room", ["least", "half"])
def test_experts_on_demand_give_the_same_numbers(
    name: str, room: str, checkpoint: Get, held: Callable[..., Held]
) -> None:
    """With room for one expert each goes by itself; with room for half of them the ones in use stay."""
    path = checkpoint(name)
    whole = Direct(path)
    smallest = least(path, "experts", held)
    role_bytes = whole.weights.pieces.bytes_by_role()["expert"]
    budget = smallest if room == "least" else smallest + role_bytes // 2
    cached = held(path, "experts", budget)
    for one in inputs(3):
        same(cached.run(one), whole.run(one))
        cached.weights.experts.check()
    report = cached.weights.residency()
    assert report.held_bytes <= budget
    assert report.misses > 0
    if room == "least":
        assert report.units == 1
        return
    token = {"input_ids": inputs()[0]["input_ids"][:1, :1]}
    cached.run(token)
    before = cached.weights.residency()
    cached.run(token)
    again = cached.weights.residency()
    assert again.hits > before.hits, "the same token finds its experts"
    assert (again.misses, again.fetched_bytes) == (before.misses, before.fetched_bytes)
    assert again.waited_s == before.waited_s > 0


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_no_bit_depends_on_how_many_experts_have_room(name: str, share: float, checkpoint: Get) -> None:
    """In bfloat16, where sums of what was rounded on the way would show."""

    def logits(**options: Any) -> np.ndarray:
        engine = Engine.start(str(checkpoint(name)), dtype="BF16", max_context=32, threads=1, **options)
        try:
            return engine.trace(inputs()[0]["input_ids"])["logits"]
        finally:
            engine.close()

    with pytest.raises(Refused) as caught:
        logits(residency="experts", weights_budget=1)
    low = int(str(caught.value.findings[0].expected).split()[2].replace(",", ""))
    wanted = logits()
    np.testing.assert_array_equal(logits(residency="experts", weights_budget=int(low * (1 + share))), wanted)


@pytest.mark.parametrize(
    ("name", "kind"), [("mxfp4", "experts"), ("nvfp4", "streamed"), ("fp8-blocks", "experts"), ("gptq", "experts")]
)
def test_quantized_weights_come_and_go_as_they_are_kept(
    name: str, kind: Residency, held: Callable[..., Held], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes of experts, and all that stands beside them; numbers where they are unpacked while they are read."""
    for module in (residency, expert_cache):
        monkeypatch.setattr(module, "STAGING_BYTES", 256 << 10)
    written("qwen3_moe", CONFIGS[name], tmp_path)
    whole = Direct(tmp_path)
    coming = held(tmp_path, kind, least(tmp_path, kind, held))
    for one in inputs(2):
        same(coming.run(one), whole.run(one))
    report = coming.weights.residency()
    assert report.fetched_bytes > 0
    assert report.misses > 0 or kind == "streamed", "layers are read ahead, experts when tokens choose them"


def test_one_rank_of_several_holds_its_own_experts(checkpoint: Get, held: Callable[..., Held]) -> None:
    path = checkpoint("qwen3_moe")
    cached = held(path, "experts", None, Mesh(ep=2)).weights
    whole = rank_pieces(FAMILIES.describe(Checkpoint.open(path).config)[0], Mesh(ep=2), 0, "F32")
    site = next(storage.name.rpartition("experts.")[0] for storage in whole.storages if arriving.is_expert(storage))
    assert cached.experts.experts(site) == next(s.shape[0] for s in whole.storages if arriving.is_expert(s))
    ids = torch.tensor([[0, 99], [-1, 1]])
    seen: list[torch.Tensor] = []

    def call(
        places_M: torch.Tensor, slots_M1: torch.Tensor, tensors: dict[str, torch.Tensor], experts_C: torch.Tensor
    ) -> torch.Tensor:
        seen.append(places_M)
        assert experts_C[slots_M1[:, 0]].tolist() == [0, 1]
        return torch.tensor([[1.0], [2.0]])

    assert cached.experts.routed(site, ids, 0, call).tolist() == [[1.0], [2.0]]
    (places,) = seen
    assert places.tolist() == [0, 3], "another rank's expert is not asked for"

    def none_of(places_M: torch.Tensor, slots_M1: torch.Tensor, *_: object) -> torch.Tensor:
        assert (places_M.numel(), slots_M1.shape, slots_M1.dtype) == (0, (0, 1), ids.dtype)
        return torch.zeros(0, 1)

    before = cached.experts.report()
    assert cached.experts.routed(site, torch.tensor([[99, -1]]), 0, none_of).tolist() == [[0.0]]
    assert cached.experts.report() == before, "a token whose experts are all of other ranks reads nothing"


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


def test_a_dense_model_has_no_experts_to_fetch(checkpoint: Get, held: Callable[..., Held]) -> None:
    with pytest.raises(Refused, match="no experts"):
        held(checkpoint("llama"), "experts", None)


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


def test_closing_while_layers_come_frees_everything(checkpoint: Get) -> None:
    streamed = Held(checkpoint("llama"), "streamed", None)
    gone = weakref.ref(streamed.weights.stream)
    slots = weakref.ref(streamed.weights.stream.pool)
    streamed.weights.close()
    del streamed
    gc.collect()
    assert gone() is None
    assert slots() is None


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
