"""What telemetry at 10 Hz costs an engine: pairs of rounds with and without a sampler, and where the time goes.

    python -m tests.benchmarks.bench_telemetry [--pairs 40] [--seconds 4]

The sampler runs in a process of its own as under `firstlight up`, with all its sources and its events written to disk;
in rounds without, that process sleeps. A pair is two neighbouring rounds, which of the two comes first alternates, and
the loss is the median of the pairs' own losses with its 95 % interval: what else the machine does falls on both. Beside
throughput, which is noisy on a machine of few cores, stand the processor time of the engine for a token and that of the
sampler's process as a share of all cores: what they sum to is what a machine without idle cores would lose.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import psutil

from firstlight.engine.serving.client import EngineClient
from firstlight.engine.serving.host import Host
from firstlight.engine.serving.request import SamplingParams
from tests.repo.tree import ROOT

MENAGERIE = ROOT / "data" / "samples" / "menagerie"
TOKENS = 200  # an answer
SETTLE_S = 1.0  # a sampler's first questions are those of a start, not of 10 Hz
SAMPLE = """
import sys
from pathlib import Path
from firstlight.engine.serving.host import Host
from firstlight.workbench.events import EventWriter
from firstlight.workbench.telemetry.sampler import Sampler
host = Host.attach(Path(sys.argv[1]))
with EventWriter(sys.argv[2]) as writer:
    print("there", flush=True)
    while sys.stdin.readline():
        with Sampler(writer.put, host.client, 1 / float(sys.argv[3])):
            print("sampling", flush=True)
            sys.stdin.readline()
        print("ended", flush=True)
host.release()
"""


class Round(NamedTuple):
    """Tokens a second, the engine's processor time a token, and the share of all cores that the other process took."""

    tokens_per_s: float
    engine_us_per_token: float
    sampler_share: float


class Other:
    """The sampler's process; `turn` has it begin or end sampling."""

    def __init__(self, where: Path, events: Path, hertz: float) -> None:
        command = [sys.executable, "-c", SAMPLE, str(where), str(events), str(hertz)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self.usage = psutil.Process(self._process.pid)
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def turn(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._process.stdout.readline()

    def close(self) -> None:
        self._process.communicate(timeout=60)


def spent_s(processes: Sequence[psutil.Process]) -> float:
    """Processor time of all threads so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measured(
    client: EngineClient, engine: Sequence[psutil.Process], other: Other, seconds: float, at_once: int
) -> Round:
    """One round: several answers at once, one behind the other, for so long."""
    params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
    engine_s, other_s, started_s = spent_s(engine), spent_s([other.usage]), time.perf_counter()

    def ask(_: int) -> int:
        count = 0
        while time.perf_counter() - started_s < seconds:
            count += client.complete("what does a cow say?", params=params).usage.completion_tokens
        return count

    with ThreadPoolExecutor(at_once) as pool:
        count = sum(pool.map(ask, range(at_once)))
    took_s = time.perf_counter() - started_s
    cores = os.cpu_count() or 1
    return Round(
        count / took_s, 1e6 * (spent_s(engine) - engine_s) / count, (spent_s([other.usage]) - other_s) / took_s / cores
    )


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median and its 95 % interval by order statistics, whatever the distribution and whatever a few rounds met."""
    ordered, count = sorted(values), len(values)
    below = 0.0
    for rank in range(count // 2):
        below += math.comb(count, rank) / 2**count
        if below > 0.025:
            break
    else:
        rank = count // 2
    rank = max(0, rank - 1)
    return statistics.median(ordered), ordered[rank], ordered[count - 1 - rank]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=4.0, help="a round")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--hertz", type=float, default=10.0)
    parser.add_argument("--threads", type=int, default=None, help="of the engine (default: as many as cores)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder) / "engine"
        options = {"max_batch": given.at_once, "max_context": 512, "threads": given.threads}
        with Host.start(MENAGERIE, run_dir=where, **options) as host:
            host.wait_ready(300)
            client, engine = host.client(), [psutil.Process(pid) for pid in host.pids]
            other = Other(where, Path(folder) / "events.sqlite", given.hertz)
            measured(client, engine, other, given.seconds, given.at_once)
            without: list[Round] = []
            watched: list[Round] = []
            for pair in range(given.pairs):
                for sampling in (pair % 2 == 0, pair % 2 == 1):
                    if sampling:
                        other.turn()
                    time.sleep(SETTLE_S)  # before either kind of round: an engine that has just rested is another
                    one = measured(client, engine, other, given.seconds, given.at_once)
                    if sampling:
                        other.turn()
                    (watched if sampling else without).append(one)
            other.close()
    report(without, watched, given.hertz)


def report(without: Sequence[Round], watched: Sequence[Round], hertz: float) -> None:
    losses = [100 * (1 - b.tokens_per_s / a.tokens_per_s) for a, b in zip(without, watched, strict=True)]
    dearer = [100 * (b.engine_us_per_token / a.engine_us_per_token - 1) for a, b in zip(without, watched, strict=True)]
    plain, seen = (statistics.median(one.tokens_per_s for one in rounds) for rounds in (without, watched))
    print(f"{len(losses)} pairs: without {plain:,.1f} tokens/s, at {hertz:g} Hz {seen:,.1f} tokens/s (medians)")
    middle, low, high = interval(losses)
    print(f"telemetry takes {middle:.2f} % of the throughput (95 %: {low:.2f} to {high:.2f})")
    middle, low, high = interval(dearer)
    cost = statistics.median(one.engine_us_per_token for one in without)
    print(
        f"the engine's processor time a token, {cost:,.0f} us, grows by {middle:.2f} % (95 %: {low:.2f} to {high:.2f})"
    )
    middle, low, high = interval([100 * one.sampler_share for one in watched])
    cores = os.cpu_count() or 1
    print(
        f"the sampler's process takes {middle:.3f} % of the time of all {cores} cores (95 %: {low:.3f} to {high:.3f}),"
        f" {cores * middle:.2f} % of one"
    )


if __name__ == "__main__":
    main()
