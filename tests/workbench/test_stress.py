"""Many requests at once: a sound engine passes, and an engine that mixes answers up, or stalls, does not."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from firstlight.engine.errors import RankFailure
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.serving.api import RankMemory
from firstlight.engine.serving.client import EngineClient
from firstlight.engine.serving.host import Host
from firstlight.engine.serving.options import EngineOptions
from firstlight.engine.serving.request import Delta
from firstlight.workbench.progress import Progress
from firstlight.workbench.start import started
from firstlight.workbench.stress import stress

MENAGERIE = Path(__file__).parents[2] / "data" / "samples" / "menagerie"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with Host.start(
        MENAGERIE, run_dir=tmp_path_factory.mktemp("host"), dtype="F32", max_batch=4, max_context=160, threads=1
    ) as host:
        host.wait_ready(240)
        yield host


def test_a_sound_engine_passes_with_its_batch_full_and_its_queue_used(host: Host) -> None:
    for _ in range(10):  # it looks 20 times a second: what one short burst does not show, another does
        report = stress(host.client(), requests=16, concurrency=8, tokens=16)
        assert report.passed, [check for check in report.checks if check.status == "failed"]
        assert report.value("requests") == 14, "two of sixteen clients leave"
        assert not any(check.status == "skipped" for check in report.checks)
        if report.value("running_most") == 4:
            return
    pytest.fail("the batch was never seen full")


class Leaky(EngineClient):
    """A client whose answers hold a word of the request before: what a mixed-up batch looks like from outside."""

    said = ""

    def generate(self, prompt: Any, *arguments: Any, **keywords: Any) -> Iterator[Delta]:  # type: ignore[override]
        before, self.said = self.said, str(prompt)
        for delta in super().generate(prompt, *arguments, **keywords):
            yield msgspec.structs.replace(delta, text=delta.text + before) if delta.finish else delta


class Drifting(EngineClient):
    """A client whose greedy answers depend on how often it was asked."""

    asked = 0

    def generate(self, *arguments: Any, **keywords: Any) -> Iterator[Delta]:  # type: ignore[override]
        self.asked += 1
        changed = self.asked
        for delta in super().generate(*arguments, **keywords):
            yield msgspec.structs.replace(delta, tokens=tuple(token + changed for token in delta.tokens))


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (Leaky, "no answer holds another's code word"),
        (Drifting, "greedy answers under load are those given alone"),
    ],
)
def test_a_mixed_up_engine_is_found_out(host: Host, kind: type[EngineClient], check: str) -> None:
    with kind(host.url, host.token) as client:
        report = stress(client, requests=8, concurrency=4, tokens=4)
    assert report.status == "failed"
    assert check in {one.name for one in report.checks if one.status == "failed"}


class Growing(EngineClient):
    """A client that sees a rank's memory grow until its look number `until`."""

    looks = 0
    until = 1

    def memory(self, pools: bool = False) -> tuple[RankMemory, ...]:
        self.looks += 1
        grown = min(self.looks, self.until) << 30
        return tuple(msgspec.structs.replace(rank, resident_bytes=grown) for rank in super().memory(pools))


@pytest.mark.parametrize(("until", "looks", "status"), [(1, 2, "passed"), (2, 3, "passed"), (9, 4, "failed")])
def test_growth_that_stops_is_no_leak(host: Host, until: int, looks: int, status: str) -> None:
    """After growth the burst is put on again, three times in all, and the last one is judged."""
    with Growing(host.url, host.token) as client:
        client.until = until
        report = stress(client, requests=4, concurrency=4, tokens=2)
    assert [check.status for check in report.checks if "does not grow" in check.name] == [status]
    assert client.looks == looks


def test_a_rank_that_is_lost_under_load_is_named() -> None:
    """Not the connection that it took along: which rank, and what it was doing."""
    options = EngineOptions(checkpoint=str(MENAGERIE), mesh=Mesh(tp=2), dtype="F32", max_batch=4, max_context=160)

    def lose() -> None:
        with started(options, Progress("stress")) as host:
            os.kill(host.pids[1], signal.SIGKILL)
            stress(host.client(), requests=16, concurrency=4, tokens=8)

    with pytest.raises(RankFailure, match="SIGKILL") as caught:
        lose()
    assert caught.value.rank == 1
