"""Two hosts: network namespaces with a shaped link between, torchrun on each, as on two machines without each other."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from firstlight.engine.serving.request import SamplingParams
from firstlight.engine.serving.runtime import Engine
from tests.waiting import PATIENCE_S, gone, until

Get = Callable[[str], Path]
READY_S = 200.0
DEADLINE_S = 4.0
NAMES = ("alpha", "beta")
RATE = "200mbit"


@dataclass
class Hosts:
    """Two namespaces; `processes` are the launchers that were started in them."""

    mark: str
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def space(self, host: int) -> str:
        return f"{self.mark}{NAMES[host]}"

    def address(self, host: int) -> str:
        return f"10.213.7.{host + 1}"

    def inside(self, host: int, *words: str) -> list[str]:
        """A command that runs on a host, whose name is the host's."""
        script = f"hostname {NAMES[host]} && exec " + " ".join(words)
        return ["ip", "netns", "exec", self.space(host), "unshare", "--uts", "sh", "-c", script]

    def launch(self, host: int, per_host: int, home: Path, *words: str) -> subprocess.Popen[str]:
        """torchrun on one of the hosts; `words` are Firstlight's. What it prints goes to a file in `home`."""
        options = ["--nnodes", "2", "--nproc-per-node", str(per_host), "--node-rank", str(host)]
        options += ["--master-addr", self.address(0), "--master-port", "29471"]
        said = (home / f"{NAMES[host]}.txt").open("w")
        launcher = subprocess.Popen(
            self.inside(
                host, sys.executable, "-m", "torch.distributed.run", *options, "-m", "firstlight.workbench", *words
            ),
            cwd=home / NAMES[host],
            stdout=said,
            stderr=said,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
        )
        said.close()
        self.processes.append(launcher)
        return launcher

    def ask(self, path: str, port: int, body: str = "") -> str:
        """What rank 0 answers on its own loopback."""
        curl = f"""import sys, urllib.request
data = sys.argv[1].encode() or None
request = urllib.request.Request('http://127.0.0.1:{port}{path}', data)
try: answer = urllib.request.urlopen(request, timeout={PATIENCE_S})
except urllib.error.HTTPError as error: answer = error
print(answer.read().decode())"""
        words = ["ip", "netns", "exec", self.space(0), sys.executable, "-I", "-c", curl, body]
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout

    def health(self, port: int) -> dict[str, Any]:
        """What rank 0 says of itself; its status is `?` where nobody answers."""
        return dict(json.loads(self.ask("/health", port) or '{"status": "?"}'))

    def cut(self) -> None:
        """The link is gone: nobody is told."""
        run("ip", "-n", self.space(1), "link", "set", "out", "down")


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    made = Hosts(f"fl{os.getpid()}")
    try:
        for host in (0, 1):
            run("ip", "netns", "add", made.space(host))
        run(
            "ip",
            "-n",
            made.space(0),
            "link",
            "add",
            "out",
            "type",
            "veth",
            "peer",
            "name",
            "out",
            "netns",
            made.space(1),
        )
        for host in (0, 1):
            run("ip", "-n", made.space(host), "addr", "add", f"{made.address(host)}/24", "dev", "out")
            for link in ("lo", "out"):
                run("ip", "-n", made.space(host), "link", "set", link, "up")
            shape = ("root", "tbf", "rate", RATE, "burst", "64kb", "latency", "50ms")
            run("tc", "-n", made.space(host), "qdisc", "add", "dev", "out", *shape)
    except (OSError, subprocess.CalledProcessError) as error:
        remove(made)
        pytest.skip(f"network namespaces are not to be had here: {getattr(error, 'stderr', '') or error}")
    yield made
    remove(made)


def remove(hosts: Hosts) -> None:
    for launcher in hosts.processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (*psutil.Process(launcher.pid).children(recursive=True), psutil.Process(launcher.pid)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        launcher.wait()
    for host in (0, 1):
        subprocess.run(("ip", "netns", "del", hosts.space(host)), check=False, capture_output=True)


@pytest.fixture
def home(tmp_path: Path, checkpoint: Get) -> Path:
    """Where each host has its copy of the checkpoint: `ck` in a folder of its own."""
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "ck").symlink_to(checkpoint("llama"))
    return tmp_path


@pytest.mark.slow
def test_four_ranks_on_two_hosts_give_the_reference_s_numbers(
    hosts: Hosts, home: Path, golden_file: Callable[[str], Path]
) -> None:
    words = ("verify", "ck", "--golden", str(golden_file("llama")), "--tp", "2", "--pp", "2", "--json", "report.json")
    launchers = [hosts.launch(host, 2, home, *words) for host in (1, 0)]
    assert [launcher.wait(READY_S) for launcher in launchers] == [0, 0], (home / "alpha.txt").read_text()
    report = json.loads((home / "alpha" / "report.json").read_text())
    assert report["status"] == "passed"
    assert "pp 2 x tp 2" in report["title"]
    assert not (home / "beta" / "report.json").exists(), "rank 0 alone reports"


@pytest.mark.slow
def test_a_lost_host_is_found_and_nobody_is_left(hosts: Hosts, home: Path, checkpoint: Get) -> None:
    words = ("serve", "ck", "--tp", "2", "--port", "8461", "--dtype", "f32", "--deadline", str(DEADLINE_S))
    launchers = [hosts.launch(host, 1, home, *words) for host in (0, 1)]
    began_s = time.monotonic()
    while (health := hosts.health(8461))["status"] != "ready":
        assert time.monotonic() < began_s + READY_S, (home / "alpha.txt").read_text()
        assert all(launcher.poll() is None for launcher in launchers), (home / "alpha.txt").read_text()
    assert [(one["rank"], one["machine"]) for one in health["ranks"]] == [(0, "alpha"), (1, "beta")]
    body = json.dumps({"prompt": [5, 6, 7], "params": {"max_new_tokens": 4, "ignore_eos": True}, "chat": False})
    answer = hosts.ask("/admin/generate", 8461, body)
    wanted = Engine.start(str(checkpoint("llama")), dtype="F32", threads=1)
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    assert _tokens(answer) == wanted.complete([5, 6, 7], params=params).tokens
    ranks = [process for launcher in launchers for process in psutil.Process(launcher.pid).children(recursive=True)]
    assert len(ranks) >= 2
    hosts.cut()
    health = until(lambda: found if (found := hosts.health(8461))["status"] != "ready" else None, "health is good")
    failure = health["failure"]
    assert (failure["rank"], failure["machine"]) == (1, "beta")
    assert "on host beta" in failure["reason"]
    assert failure["phase"]
    gone([rank.pid for rank in ranks], "ranks on both sides end: beta's because rank 0 is silent")
    assert "rank 1 on host beta: rank 0 at 10.213.7.1 gave no sign of life" in (home / "beta.txt").read_text()
    assert launchers[0].wait(PATIENCE_S) == 1
    launchers[1].send_signal(signal.SIGTERM)


def _tokens(lines: str) -> tuple[int, ...]:
    return tuple(token for line in lines.splitlines() if line for token in json.loads(line).get("tokens", ()))
