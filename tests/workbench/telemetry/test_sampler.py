"""The sampler and its sources on this machine and on a real engine: values with units, reasons, and who failed."""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from firstlight.engine.serving.board import BOARD
from firstlight.engine.serving.host import Host
from firstlight.engine.serving.request import SamplingParams
from firstlight.workbench.courtesy import NICER
from firstlight.workbench.events import EventReader, EventWriter, RequestEvent
from firstlight.workbench.readings import Reading
from firstlight.workbench.telemetry.engine import EngineSource, MemorySource
from firstlight.workbench.telemetry.sampler import Sampler
from firstlight.workbench.telemetry.system import SystemSource
from tests.waiting import PATIENCE_S, until

MENAGERIE = Path(__file__).parents[3] / "data" / "samples" / "menagerie"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with Host.start(
        MENAGERIE, run_dir=tmp_path_factory.mktemp("host"), max_batch=2, max_context=256, threads=1
    ) as host:
        host.wait_ready(240)
        yield host


def by_name(readings: list[Reading]) -> dict[tuple[str, str], Reading]:
    return {(one.device, one.metric): one for one in readings}


def settled(host: Host) -> None:
    """Waits until the engine has laid out what it counted; the answer to a request may be there before."""
    client = host.client()
    until(lambda: (seen := client.glance()) is not None and seen.requests == client.stats().requests)


def test_the_machine_reads_itself() -> None:
    source = SystemSource()
    first = by_name(list(source.read(100.0, None)))
    assert 0 < (first["host", "memory_used"].value or 0) < (first["host", "memory_total"].value or 0)
    second = by_name(list(source.read(101.0, 5)))
    moved = [one for (device, metric), one in second.items() if metric == "received"]
    assert moved
    assert all(one.value is not None and one.value >= 0 and one.unit == "B/s" for one in moved)
    rates = [one for (device, metric), one in first.items() if metric == "received"]
    assert all(one.value is None and one.reason == "a rate needs two samples" for one in rates)
    assert second["host", "cpu_utilisation"].step == 5


def test_the_engine_is_read_while_it_works_and_readings_carry_its_step(host: Host, tmp_path: Path) -> None:
    with EventWriter(tmp_path / "e.sqlite") as writer, Sampler(writer.put, host.client, 0.1) as sampler:
        client, reader = host.client(), EventReader(tmp_path / "e.sqlite")
        until(lambda: "engine" in {one.device for _, one in reader.readings()})  # a rate needs two samples
        for _ in range(3):
            client.complete("what does a cow say?", params=SamplingParams(max_new_tokens=60, ignore_eos=True))
        step = client.stats().step
        until(lambda: step in {one.step for _, one in reader.readings() if one.source == "psutil"})
        assert sampler.cost < 1.0
    seen = [one for _, one in reader.readings()]
    tokens = [one.value for one in seen if (one.device, one.metric) == ("engine", "tokens") and one.value is not None]
    assert max(tokens) > 1
    steps = [one.step for one in seen if one.source == "psutil" and one.step is not None]
    assert steps == sorted(steps)
    assert steps[-1] == step
    sampled = [one for one in seen if one.device.startswith("block layers.")]
    assert sampled, "the engine has passed a step that it times inside"
    assert all(one.step is not None and one.step % 64 == 0 and one.unit == "ms" for one in sampled)
    held = by_name([one for one in seen if one.source == "memory"])
    assert held["rank 0", "attention"].value == client.memory()[0].bytes_by_role["attention"]
    assert "cpu" in held["rank 0", "allocated"].reason


def test_every_request_that_was_served_is_told_once_whoever_sent_it(host: Host) -> None:
    client = host.client()
    source = EngineSource(host.client)
    settled(host)
    earlier = {event.record for event in source.read(1.0, None) if isinstance(event, RequestEvent)}
    body = {"model": "menagerie", "prompt": "what", "max_tokens": 3, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {client.token}"} if client.token else {}
    assert httpx.post(f"{host.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S).status_code == 200
    answer = client.complete("what does a cow say?", params=SamplingParams(max_new_tokens=60))
    settled(host)
    told = [event for event in source.read(2.0, None) if isinstance(event, RequestEvent)]
    assert [event.status for event in told] == ["length", "stop"]
    assert not earlier & {event.record for event in told}
    assert (told[0].completion_tokens, told[1].completion_tokens) == (3, answer.usage.completion_tokens)
    assert json.loads(told[1].record)["number"] == answer.usage.number
    assert told[1].total_s == pytest.approx(answer.usage.total_s)
    assert not [event for event in source.read(3.0, None) if isinstance(event, RequestEvent)]
    late = EngineSource(host.client, known={answer.usage.number})
    again = [event for event in late.read(4.0, None) if isinstance(event, RequestEvent)]
    assert told[0].record in {event.record for event in again}
    assert told[1].record not in {event.record for event in again}
    assert 1 not in {json.loads(event.record)["number"] for event in again}, "the warm-up is nobody's"


def test_an_engine_that_is_gone_is_an_alarm_with_rank_and_phase(tmp_path: Path) -> None:
    host = Host.start(MENAGERIE, run_dir=tmp_path / "host", max_batch=2, max_context=64, threads=1)
    host.wait_ready(240)
    source, memory = EngineSource(host.client), MemorySource(host.client)
    assert by_name(list(source.read(1.0, None)))["engine", "running"].value == 0
    host.stop()
    (said,) = source.read(2.0, 7)
    assert said.value is None
    assert said.alarm
    assert "rank 0" in said.reason
    assert [one.value for one in memory.read(2.0, 7)] == [None]


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads")
def test_readings_are_taken_and_written_behind_the_engines_work(tmp_path: Path) -> None:
    class Asked:
        name = "asked"
        every_s = 0.0

        def __init__(self) -> None:
            self.seen: list[int] = []

        def read(self, time_s: float, step: int | None) -> Iterator[Reading]:
            self.seen.append(os.getpriority(os.PRIO_PROCESS, 0))
            yield from ()

    own, source = os.getpriority(os.PRIO_PROCESS, 0), Asked()
    with EventWriter(tmp_path / "e.sqlite") as writer, Sampler(writer.put, sources=(source,), period_s=0.01):
        until(lambda: source.seen)
        assert os.getpriority(os.PRIO_PROCESS, writer._thread.native_id or 0) == min(19, own + NICER)
    assert set(source.seen) == {min(19, own + NICER)}
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


def test_a_source_that_falls_over_is_named_and_the_others_go_on() -> None:
    class Broken:
        name = "broken"
        every_s = 0.0

        def read(self, time_s: float, step: int | None) -> Iterator[Reading]:
            raise OSError("no such sensor")

    got: list[Reading] = []
    sampler = Sampler(got.append, sources=(Broken(), SystemSource()), period_s=0.0)
    sampler.sample()
    assert by_name(got)["broken", "source"].reason == "the source failed: OSError: no such sensor"
    assert by_name(got)["host", "memory_total"].value


def test_what_an_engine_lays_out_is_read_without_asking_it(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("firstlight.workbench.telemetry.engine.FRESH_S", PATIENCE_S)  # however late the engine is
    client = host.client()
    client.complete("what does a cow say?", params=SamplingParams(max_new_tokens=8))
    settled(host)
    source, asked = EngineSource(host.client), []
    plain = client.stats
    client.stats = lambda: asked.append(1) or plain()  # type: ignore[method-assign, func-returns-value, assignment]
    try:
        for tick in range(5):
            found = by_name([one for one in source.read(1.0 + tick / 10, None) if isinstance(one, Reading)])
            time.sleep(0.1)
    finally:
        client.stats = plain  # type: ignore[method-assign]
    assert not asked
    assert found["engine", "running"].value == 0
    assert found["engine", "tokens"].value == 0, "an engine without work makes no tokens now"
    (host.run_dir / BOARD).rename(host.run_dir / "elsewhere")
    assert client.glance() is None
    late = by_name([one for one in EngineSource(host.client).read(9.0, None) if isinstance(one, Reading)])
    assert late["engine", "running"].value == 0, "without it the engine is asked"
    (host.run_dir / "elsewhere").rename(host.run_dir / BOARD)
