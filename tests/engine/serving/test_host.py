"""Hosts with real processes: killed, stopped, abandoned, attached to, drained, refused, and on other meshes."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from firstlight.engine.errors import RankFailure, Refused
from firstlight.engine.parallel.mesh import Groups, Mesh
from firstlight.engine.serving import host as hosts
from firstlight.engine.serving.client import EngineClient
from firstlight.engine.serving.host import Host, _let_go
from firstlight.engine.serving.options import HostOptions
from firstlight.engine.serving.request import SamplingParams
from firstlight.engine.serving.runtime import Engine
from firstlight.engine.serving.stream import EngineFailed
from tests.checkpoints import inputs
from tests.ports import free_port
from tests.waiting import PATIENCE_S, gone, until

DEADLINE_S = 4.0  # of silence: a machine that does much else may keep a rank from speaking for a while
READY_S = 240.0
QUICK = HostOptions(deadline_s=DEADLINE_S, beat_period_s=0.1, linger_s=1.0)
CALM = HostOptions(deadline_s=2 * READY_S, beat_period_s=0.1, linger_s=1.0)  # whatever is found is not found by silence
LONG = SamplingParams(max_new_tokens=48, ignore_eos=True)

Get = Callable[[str], Path]


@pytest.fixture
def pair(request: pytest.FixtureRequest, checkpoint: Get, tmp_path: Path) -> Iterator[Host]:
    """A host on two ranks; its `HostOptions` are the fixture's parameter."""
    http = getattr(request, "param", CALM)
    with Host.start(checkpoint("llama"), Mesh(tp=2), run_dir=tmp_path / "run", http=http, threads=2) as host:
        host.wait_ready(READY_S)
        yield host
    gone((*host.pids, host.handle.pid))


@pytest.mark.parametrize(
    ("pair", "number", "busy"),
    [(CALM, signal.SIGKILL, False), (CALM, signal.SIGKILL, True), (QUICK, signal.SIGSTOP, True)],
    indirect=["pair"],
    ids=["killed", "killed at work", "stopped at work"],
)
def test_a_lost_rank_turns_health_bad(pair: Host, number: int, busy: bool) -> None:
    """By its exit, however much silence is allowed; or by its silence."""
    client = pair.client()
    running = client.generate([5, 6, 7], params=LONG) if busy else None
    if running is not None:
        next(running)
    os.kill(pair.pids[1], number)
    answer = last_word(pair)
    if answer is not None:  # else it had left before it was asked
        assert (answer["status"], answer["rank"]) == ("failed", 1)
        assert answer["phase"]
        assert answer["failure"]["reason"]
    if running is not None:
        deltas = list(running)
        assert deltas[-1].finish in ("error", "length")  # it may have been done before
        assert deltas[-1].error is None or "rank 1" in deltas[-1].error
    gone((pair.handle.pid, *pair.pids), "something outlives the failure")
    failure = pair.health().failure
    assert failure is not None
    assert failure.rank == 1
    assert ("killed by signal 9" if number == signal.SIGKILL else f"deadline {DEADLINE_S:g} s") in failure.reason
    with pytest.raises(EngineFailed):
        client.complete([1])


def last_word(host: Host) -> dict[str, Any] | None:
    """What the engine's own `/health` says once it is bad; None where nobody is there any more to say it."""
    with httpx.Client(base_url=host.url, timeout=PATIENCE_S) as client:
        try:
            bad = until(
                lambda: found if (found := client.get("/health")).status_code != 200 else None, "health is good"
            )
        except httpx.TransportError:
            return None
    assert bad.status_code == 503
    return dict(bad.json())


@pytest.mark.parametrize("pair", [QUICK], indirect=True)
def test_rank_0_stopped_is_found_by_the_supervisor(pair: Host) -> None:
    os.kill(pair.pids[0], signal.SIGSTOP)
    gone((*pair.pids, pair.handle.pid))
    failure = pair.health().failure
    assert failure is not None
    assert failure.rank == 0


OWNER = """
import os, signal, sys
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.serving.host import Host
host = Host.start(sys.argv[1], Mesh(tp=2), run_dir=sys.argv[2], detached=sys.argv[3] == "detached", threads=2)
host.wait_ready(240)
print(*host.pids, host.handle.pid, flush=True)
sys.stdin.read()
os.kill(os.getpid(), signal.SIGKILL)
"""


def owned(path: Path, run_dir: Path, kind: str) -> tuple[subprocess.Popen[str], tuple[int, ...]]:
    """A host whose owner is a process that dies by SIGKILL as soon as its standard input ends; and all pids."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(path), str(run_dir), kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    return owner, tuple(int(pid) for pid in owner.stdout.readline().split())


def die(owner: subprocess.Popen[str]) -> None:
    owner.communicate(timeout=PATIENCE_S)
    assert owner.returncode == -signal.SIGKILL


def test_no_orphan_is_left_when_the_owner_dies(checkpoint: Get, tmp_path: Path) -> None:
    owner, pids = owned(checkpoint("llama"), tmp_path / "run", "owned")
    assert len(pids) == 3
    die(owner)
    gone(pids, "a process outlives its owner")
    with pytest.raises(Refused, match="has ended"):
        Host.attach(tmp_path / "run")


def test_what_an_owner_forks_is_no_owner() -> None:
    """Else it would keep the pipe open when the owner becomes another program."""
    held, kept = os.pipe()
    was = os.fstat(kept)
    _let_go(kept, was)
    assert os.read(held, 1) == b""
    os.close(held)
    other = os.open(os.devnull, os.O_RDONLY)  # it has the number of one of them
    for number in (held, kept, other):
        _let_go(number, was)
    os.close(other)


def test_no_rank_is_left_when_the_supervisor_is_killed(pair: Host) -> None:
    os.kill(pair.handle.pid, signal.SIGKILL)
    gone(pair.pids, "a rank outlives its supervisor")
    failure = pair.health().failure
    assert failure is not None
    assert (failure.rank, failure.phase) == (None, "watch"), "no rank is to blame"
    assert "supervisor ended" in failure.reason


def test_a_detached_host_outlives_its_owner_and_is_found_again(checkpoint: Get, tmp_path: Path) -> None:
    owner, pids = owned(checkpoint("llama"), tmp_path / "run", "detached")
    die(owner)
    time.sleep(0.5)
    host = Host.attach(tmp_path / "run" / "host.json")
    try:
        assert host.pids == pids[:2]
        assert (tmp_path / "run" / "host.json").stat().st_mode & 0o077 == 0, "the token is readable by others"
        assert len(host.client().complete([3, 4], params=SamplingParams(max_new_tokens=4, ignore_eos=True)).tokens) == 4
        with pytest.raises(Refused, match=r"an engine host runs in \S+ already"):
            Host.start(checkpoint("llama"), run_dir=tmp_path / "run")
    finally:
        host.stop()
    gone(pids)
    assert host.health().status == "stopped"


def test_a_detached_host_is_found_as_long_as_its_directory_is_somewhere_and_ends_with_it(
    checkpoint: Get, tmp_path: Path
) -> None:
    """Nobody could reach or stop it otherwise: url and token stand in its handle alone."""
    host = Host.start(checkpoint("llama"), run_dir=tmp_path / "run", detached=True, http=CALM, threads=1)
    moved = tmp_path / "moved"
    try:
        host.wait_ready(READY_S)
        pids = (*host.pids, host.handle.pid)
        (tmp_path / "run" / "host.json").unlink()
        (tmp_path / "run").rename(moved)
        again = until(lambda: Host.attach(moved) if (moved / "host.json").exists() else None, "the handle is lost")
        assert again.client().health().is_ready
        again.release()
        until(lambda: shutil.rmtree(moved, ignore_errors=True) or not moved.exists())  # it may write while this removes
        gone(pids, "a host that nobody can find goes on")
    finally:
        host.stop()


def test_nothing_listens_beyond_loopback(host: Host) -> None:
    processes = [psutil.Process(pid) for pid in (host.handle.pid, *host.pids)]
    listening = [one for process in processes for one in process.net_connections() if one.status == "LISTEN"]
    assert len(listening) >= 3  # the store, HTTP, gloo
    assert {one.laddr.ip for one in listening} == {"127.0.0.1"}


def test_draining_ends_what_runs_and_refuses_what_comes(pair: Host) -> None:
    client = pair.client()
    running = client.generate([5, 6, 7], params=LONG)
    next(running)
    client.drain()
    assert client.health().status == "draining"
    assert client.health().running == 0
    rest = list(running)
    assert rest[-1].finish == "length"
    with pytest.raises(Refused, match="draining"):
        client.complete([1, 2])
    answer = httpx.post(
        f"{pair.url}/v1/completions",
        json={"model": "llama", "prompt": [1, 2]},
        headers={"Authorization": f"Bearer {pair.token}"},
        timeout=PATIENCE_S,
    )
    assert answer.status_code == 503


def test_what_a_rank_refuses_reaches_the_owner(checkpoint: Get, tmp_path: Path) -> None:
    path = checkpoint("llama")
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in path.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    shard = sorted(broken.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-4096])
    stages: list[str] = []
    with Host.start(broken, run_dir=tmp_path / "run") as host:
        with pytest.raises(Refused) as caught:
            host.wait_ready(READY_S, lambda health: stages.append(health.stage))
        assert caught.value.findings[0].code == "truncated-shard"
        assert host.health().status == "failed"


@pytest.mark.parametrize(
    ("mesh", "code"), [(Mesh(tp=3), "indivisible"), (Mesh(pp=50), "indivisible"), (Mesh(dp=1_000_000), "usage")]
)
def test_an_impossible_layout_starts_no_process(checkpoint: Get, tmp_path: Path, mesh: Mesh, code: str) -> None:
    with pytest.raises(Refused) as caught:
        Host.start(checkpoint("llama"), mesh, run_dir=tmp_path / "run")
    assert caught.value.findings[0].code == code
    assert not (tmp_path / "run").exists()


def test_the_start_is_shown_by_stages(checkpoint: Get, tmp_path: Path) -> None:
    seen: list[Any] = []
    with Host.start(checkpoint("llava-clip"), run_dir=tmp_path / "run", threads=2) as host:
        health = host.wait_ready(READY_S, seen.append).health()
    passed = {stage.name: stage for stage in health.stages if stage.status == "passed"}
    assert {"mesh", "ping", "ledger", "load", "warm-up text", "warm-up image", "ready"} <= set(passed)
    assert all(stage.deadline_s for name, stage in passed.items() if name != "ready")
    assert all(not one.is_ready for one in seen[:-1])
    assert json.loads((tmp_path / "run" / "host.json").read_text())["status"] == "stopped"


def test_only_loopback_is_open_without_a_token() -> None:
    for host in ("0.0.0.0", "192.168.1.7", "::"):
        with pytest.raises(Refused, match="token"):
            HostOptions(host=host)
        HostOptions(host=host, token="secret")
    for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8"):
        HostOptions(host=host)


def test_without_a_token_only_this_machine_may_be_named(
    checkpoint: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRSTLIGHT_RUNTIME", str(tmp_path))
    with Host.start(checkpoint("llama"), make_token=False, threads=1) as host:
        host.wait_ready(READY_S)
        assert httpx.get(f"{host.url}/v1/models", timeout=PATIENCE_S).status_code == 200
        assert httpx.get(f"{host.url}/v1/models", headers={"Host": "LocalHost"}, timeout=PATIENCE_S).status_code == 200
        rebound = httpx.get(f"{host.url}/v1/models", headers={"Host": "evil.example"}, timeout=PATIENCE_S)
        assert rebound.status_code == 403
        forged = httpx.post(f"{host.url}/admin/stop", headers={"Origin": "https://evil.example"}, timeout=PATIENCE_S)
        assert forged.status_code == 403
        assert httpx.get(f"{host.url}/v1/models", headers={"Origin": host.url}, timeout=PATIENCE_S).status_code == 200
        taken = int(host.url.rpartition(":")[2])
        second = Host.start(checkpoint("llama"), http=HostOptions(port=taken))
        with second, pytest.raises(Refused, match="cannot listen"):
            second.wait_ready(READY_S)
    assert host.health().status == "stopped"
    assert not list(tmp_path.iterdir()), "a folder that was made for a host outlives it"


CROSSED = Groups(name="crossed", parts=((0, 3), (1, 2)))  # neighbours on no axis


@pytest.mark.parametrize(
    "mesh", [Mesh(dp=2, pp=2), Mesh(ep=2, tp=2, named=(CROSSED,))], ids=lambda mesh: mesh.describe()
)
def test_every_mesh_gives_the_tokens_and_traces_of_one_rank(checkpoint: Get, tmp_path: Path, mesh: Mesh) -> None:
    path = checkpoint("llava-moe")
    given = inputs("llava-moe", batch=3)
    ids, mask = given.pop("input_ids"), given.pop("attention_mask")
    params = SamplingParams(max_new_tokens=6, ignore_eos=True, temperature=0.8, seed=5, logprobs=True, top_logprobs=2)
    single = Engine.start(str(path), dtype="F32", threads=1)
    wanted = single.trace(ids, mask, given, steps=4)
    answer = single.complete([5, 6, 7], params=params)
    with Host.start(path, mesh, run_dir=tmp_path / "run", dtype="F32", threads=4) as host:
        client = host.wait_ready(READY_S)
        found = client.trace(ids, mask, given, steps=4)
        streams = [client.generate([5, 6, 7], params=params) for _ in range(5)]  # over all replicas
        tokens = {tuple(token for delta in stream for token in delta.tokens) for stream in streams}
        forced = client.trace(ids, mask, given, inputs={"hidden.1": wanted["hidden.1"]})
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, atol=1e-4 * np.abs(value).max(), err_msg=name)
    assert tokens == {answer.tokens}
    np.testing.assert_allclose(forced["hidden.2"], wanted["hidden.2"], atol=1e-4 * np.abs(wanted["hidden.2"]).max())


LAUNCHED = """
import sys
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.serving.options import EngineOptions, HostOptions
from firstlight.engine.serving.launched import serve_launched
options = EngineOptions(checkpoint=sys.argv[1], mesh=Mesh(tp=2), threads=2)
raise SystemExit(serve_launched(options, HostOptions(deadline_s=4.0, beat_period_s=0.1, linger_s=1.0)))
"""


def launched(port: int, *paths: Path, script: str = LAUNCHED) -> list[subprocess.Popen[str]]:
    """Two ranks with the environment that a launcher gives them, and no supervisor; of two hosts, if paths differ."""
    return [
        subprocess.Popen(
            [sys.executable, "-c", script, str(paths[rank])],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2" if paths[0] == paths[1] else "1",
                "LOCAL_RANK": str(rank) if paths[0] == paths[1] else "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stderr=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]


def test_hosts_with_different_copies_of_a_checkpoint_are_refused(checkpoint: Get, tmp_path: Path) -> None:
    """Of the same names, shapes and sizes: a stale copy, which would give numbers that are nobody's."""
    stale = shutil.copytree(checkpoint("llama"), tmp_path / "stale")
    shard = next(stale.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    ranks = launched(free_port(), checkpoint("llama"), stale)
    try:
        assert ranks[0].stderr is not None
        said = ranks[0].stderr.read()
        assert ranks[0].wait(PATIENCE_S) == 1
        assert ranks[1].wait(PATIENCE_S) == 0, "it was told to leave"
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    ranks[0].stderr.close()
    assert f"the checkpoint on host {socket.gethostname()} (rank 1) is not the one that rank 0 has" in said
    assert "the bytes of the shards differ" in said


def test_ranks_of_a_launcher_are_all_told_of_when_ready_and_leave_when_asked(checkpoint: Get) -> None:
    """Though rank 1 comes after rank 0 has looked for it, and the next look is far away."""
    seldom = LAUNCHED.replace("deadline_s=4.0, beat_period_s=0.1", f"deadline_s={READY_S}, beat_period_s=60.0")
    with led(checkpoint("llama"), seldom, late=True) as (ranks, client):
        assert [beat.rank for beat in client.health().ranks] == [0, 1]
        params = SamplingParams(max_new_tokens=4, ignore_eos=True)
        assert len(client.complete([3, 4], params=params).tokens) == 4
        client.stop()
        assert [rank.wait(PATIENCE_S) for rank in ranks] == [0, 0]


def test_a_lost_rank_of_a_launcher_is_found_by_rank_0(checkpoint: Get) -> None:
    with led(checkpoint("llama"), LAUNCHED) as (ranks, client):
        ranks[1].send_signal(signal.SIGSTOP)
        until(lambda: not client.health().is_ready, "health is good though a rank is lost")
        assert ranks[0].wait(PATIENCE_S) == 1
        assert ranks[0].stderr is not None
        assert "firstlight: rank 1 in phase" in ranks[0].stderr.read()


@contextlib.contextmanager
def led(path: Path, script: str, late: bool = False) -> Iterator[tuple[list[subprocess.Popen[str]], EngineClient]]:
    """Two ranks of a launcher that are ready, and a client; with `late`, rank 1 comes after rank 0 listens."""
    ranks = launched(free_port(), path, path, script=script)
    try:
        if late:
            os.kill(ranks[1].pid, signal.SIGSTOP)
        assert ranks[0].stderr is not None
        url = next(line.strip() for line in ranks[0].stderr if line.startswith("http"))
        if late:
            os.kill(ranks[1].pid, signal.SIGCONT)
        with EngineClient(url) as client:
            until(lambda: client.health().is_ready, "it does not become ready", READY_S)
            yield ranks, client
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        assert ranks[0].stderr is not None
        ranks[0].stderr.close()


def test_a_host_that_cannot_start_says_so(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no engine host"):
        Host.attach(tmp_path)
    with (
        Host.start(tmp_path / "nowhere", run_dir=tmp_path / "run") as host,
        pytest.raises((Refused, RankFailure)) as caught,
    ):
        host.wait_ready(READY_S)
    assert "not a checkpoint directory" in str(caught.value)


def test_a_handle_that_no_host_wrote_is_refused(tmp_path: Path) -> None:
    (tmp_path / "host.json").write_text('{"status": "ready"}')
    with pytest.raises(Refused, match="handle of an engine host cannot be read"):
        Host.attach(tmp_path)
    with pytest.raises(Refused, match="no engine host was started here"):
        Host.attach(tmp_path / "host.json" / "inner")


@pytest.mark.parametrize("where", ["_taken", "_spawn", "_await_handle"])
def test_a_start_that_is_interrupted_leaves_no_folder(
    where: str, checkpoint: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("FIRSTLIGHT_RUNTIME", str(tmp_path))
    monkeypatch.setattr(hosts, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        Host.start(checkpoint("llama"))
    assert not [*tmp_path.iterdir()]
