"""What telemetry at 10 Hz costs an engine: tokens a second with the sampler and without, turn about.

    python -m tests.benchmarks.bench_telemetry [--repeats 8] [--tokens 1500]

The sampler runs in a process of its own as under `firstlight up`, with all its sources and its events written to disk.
Rounds alternate so that what else the machine does falls on both; the medians and the spread are printed.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from firstlight.engine.serving.client import EngineClient
from firstlight.engine.serving.host import Host
from firstlight.engine.serving.request import SamplingParams
from tests.repo.tree import ROOT

MENAGERIE = ROOT / "data" / "samples" / "menagerie"
SAMPLE = """
import sys, time
from pathlib import Path
from firstlight.engine.serving.host import Host
from firstlight.workbench.events import EventWriter
from firstlight.workbench.telemetry.sampler import Sampler
host = Host.attach(Path(sys.argv[1]))
with EventWriter(sys.argv[2]) as writer, Sampler(writer.put, host.client, 1 / float(sys.argv[3])) as sampler:
    print("sampling", flush=True)
    sys.stdin.readline()
    print(sampler.cost, flush=True)
host.release()
"""


def tokens_per_s(client: EngineClient, tokens: int, at_once: int) -> float:
    """Several answers at once, `tokens` in all."""
    params = SamplingParams(max_new_tokens=tokens // at_once, ignore_eos=True)
    started_s = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        done = list(pool.map(lambda _: client.complete("what does a cow say?", params=params), range(at_once)))
    return sum(one.usage.completion_tokens for one in done) / (time.perf_counter() - started_s)


def sampled(host_dir: Path, client: EngineClient, tokens: int, at_once: int, hertz: float) -> tuple[float, float]:
    """(tokens a second while a sampler runs, the share of a core that sampling takes)."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", SAMPLE, str(host_dir), str(Path(folder) / "events.sqlite"), str(hertz)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        rate = tokens_per_s(client, tokens, at_once)
        out, _ = process.communicate("\n", timeout=60)
        return rate, float(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1500, help="a round")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--hertz", type=float, default=10.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder) / "engine"
        with Host.start(MENAGERIE, run_dir=where, max_batch=given.at_once, max_context=512) as host:
            host.wait_ready(300)
            client = host.client()
            tokens_per_s(client, given.tokens, given.at_once)
            without, watched, costs = [], [], []
            for _ in range(given.repeats):
                without.append(tokens_per_s(client, given.tokens, given.at_once))
                rate, cost = sampled(where, client, given.tokens, given.at_once, given.hertz)
                watched.append(rate)
                costs.append(cost)
    plain, seen = statistics.median(without), statistics.median(watched)
    spread = 100 * statistics.stdev(without) / plain if len(without) > 1 else 0.0
    print(
        f"without telemetry {plain:,.1f} tokens/s (spread {spread:.1f} %), at {given.hertz:g} Hz {seen:,.1f} tokens/s"
    )
    core = 100 * statistics.median(costs)
    print(f"telemetry takes {100 * (1 - seen / plain):.2f} % of the throughput, {core:.1f} % of a core")


if __name__ == "__main__":
    main()
