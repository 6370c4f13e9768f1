"""Layers that run while those behind them are read: the same numbers, every byte once, and honest counts."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from firstlight.engine.errors import Refused
from firstlight.engine.serving.host import Host
from firstlight.engine.weights.loading import arriving, overlap, residency
from firstlight.engine.weights.loading.overlap import Overlap
from firstlight.engine.weights.sources.base import unread
from firstlight.kernels.native import library
from tests.engine.direct import Direct
from tests.engine.weights.holding import Get, Held, inputs, same
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.usefixtures("small_staging")


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


def test_closing_while_layers_come_frees_everything(checkpoint: Get) -> None:
    streamed = Held(checkpoint("llama"), "streamed", None)
    gone = weakref.ref(streamed.weights.stream)
    slots = weakref.ref(streamed.weights.stream.pool)
    streamed.weights.close()
    del streamed
    gc.collect()
    assert gone() is None
    assert slots() is None


def test_weights_are_read_while_operators_are_compiled(
    checkpoint: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that has not compiled them before: here the compiler waits until the weights are there."""
    found = library.find_compiler()
    assert found is not None
    go, bin_dir = tmp_path / "go", tmp_path / "bin"
    bin_dir.mkdir()
    slow = bin_dir / Path(found).name
    slow.write_text(
        f'#!/bin/sh\ncase "$*" in *.cpp*) while [ ! -e {go} ]; do sleep 0.02; done ;; esac\nexec {found} "$@"\n'
    )
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_dir}:{os.environ['PATH']}")
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path / "cache"))
    with Host.start(checkpoint("llama"), run_dir=tmp_path / "run", dtype="BF16", threads=1) as host:
        until(lambda: host.health().stage == "build", "it waits for the compiler before it reads")
        assert not list((tmp_path / "cache").glob("native-*.so"))
        go.touch()
        host.wait_ready(PATIENCE_S)
        assert list((tmp_path / "cache").glob("native-*.so"))
