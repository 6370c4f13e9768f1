"""Ranks on a real Ray cluster of two nodes on this machine: placed, verified, lost, refused."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.waiting import PATIENCE_S

Get = Callable[[str], Path]
OTHER = "127.0.0.2"  # the second node's address; the first has the machine's own
START_S = 120.0
DEADLINE_S = 3.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install ray"),
]

CLUSTER = f"""
import sys
from ray.cluster_utils import Cluster
small = dict(num_cpus=2, object_store_memory=80_000_000)
cluster = Cluster(initialize_head=True, head_node_args=dict(include_dashboard=False, **small))
cluster.add_node(node_ip_address="{OTHER}", **small)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def ray() -> Iterator[str]:
    """The address of a cluster with two nodes of two CPUs each."""
    holder = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
        text=True,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stderr is not None
    try:
        address = holder.stdout.readline().strip()
        if not address:
            last = holder.stderr.read().strip().splitlines()[-1:]
            pytest.skip(f"a local Ray cluster does not start here: {last}")
        yield address
    finally:
        below = psutil.Process(holder.pid).children(recursive=True) if holder.poll() is None else []
        holder.stdin.close()
        try:
            holder.wait(20)
        except subprocess.TimeoutExpired:
            holder.kill()
            holder.wait()
        for process in psutil.wait_procs(below, timeout=10)[1]:
            process.kill()
        holder.stdout.close()
        holder.stderr.close()


def firstlight(ray: str, *words: str) -> list[str]:
    return [sys.executable, "-m", "firstlight.workbench", *words, "--hosts", f"{ray.partition(':')[0]},{OTHER}"]


def environment(ray: str) -> dict[str, str]:
    return {**os.environ, "RAY_ADDRESS": ray, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def call(ray: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        firstlight(ray, *words), env=environment(ray), capture_output=True, text=True, check=False, timeout=START_S
    )


def test_ranks_on_two_nodes_give_the_reference_s_numbers(
    ray: str, checkpoint: Get, golden_file: Get, tmp_path: Path
) -> None:
    where, golden, out = str(checkpoint("qwen3_moe")), str(golden_file("qwen3_moe")), tmp_path / "report.json"
    words = ("verify", where, "--golden", golden, "--ep", "2", "--pp", "2", "--json", str(out))
    done = call(ray, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(out.read_text())["status"] == "passed"


def test_what_cannot_be_placed_is_refused_with_the_reason(ray: str, checkpoint: Get) -> None:
    where = str(checkpoint("llama"))
    wide = call(ray, "serve", where, "--tp", "4", "--dp", "2", "--port", "0")
    assert wide.returncode == 2
    assert "no node of the Ray cluster has 4 CPUs" in " ".join(wide.stderr.split())
    odd = call(ray, "serve", where, "--pp", "3", "--port", "0")
    assert odd.returncode == 2
    assert "does not divide over 2 hosts" in " ".join(odd.stderr.split())
    words = [*firstlight(ray, "serve", where, "--pp", "2", "--port", "0")[:-1], "nowhere,elsewhere"]
    unknown = subprocess.run(words, env=environment(ray), capture_output=True, text=True, check=False)
    assert unknown.returncode == 2
    assert "names no node of the Ray cluster" in " ".join(unknown.stderr.split())
    assert OTHER in unknown.stderr


def test_a_lost_rank_is_named_and_nobody_is_left(ray: str, checkpoint: Get, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = ("serve", str(checkpoint("llama")), "--tp", "2", "--dp", "2", "--port", "0", "--token", "secret")
    said = (tmp_path / "said.txt").open("w")
    serving = subprocess.Popen(
        [*firstlight(ray, *words), "--deadline", str(DEADLINE_S), "--json", str(report)],
        env=environment(ray),
        stdout=said,
        stderr=said,
    )
    said.close()
    try:
        until = time.monotonic() + START_S
        while not report.exists():
            assert time.monotonic() < until, (tmp_path / "said.txt").read_text()
            assert serving.poll() is None, (tmp_path / "said.txt").read_text()
            time.sleep(0.1)
        url = json.loads(report.read_text())["metrics"]["url"]["value"]
        assert httpx.get(f"{url}/v1/models", timeout=PATIENCE_S).status_code == 401
        token = {"Authorization": "Bearer secret"}
        ranks = httpx.get(f"{url}/health", headers=token, timeout=PATIENCE_S).json()["ranks"]
        while len(ranks) < 4 or any(one["stage"] != "ready" for one in ranks):
            ranks = httpx.get(f"{url}/health", headers=token, timeout=PATIENCE_S).json()["ranks"]
        os.kill(ranks[2]["pid"], signal.SIGSTOP)
        assert serving.wait(DEADLINE_S + 30) == 1
        text = " ".join((tmp_path / "said.txt").read_text().split())
        assert "rank 2 failed in phase 'idle'" in text
        assert not psutil.wait_procs(
            [psutil.Process(one["pid"]) for one in ranks if psutil.pid_exists(one["pid"])], 10
        )[1]
    finally:
        serving.kill()
        serving.wait()
