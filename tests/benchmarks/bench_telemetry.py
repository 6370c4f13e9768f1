"""What telemetry at 10 Hz costs an engine: neighbouring slices of one load with and without a sampler.

    python -m tests.benchmarks.bench_telemetry [--seconds 300] [--slice 0.3] [--watched] [--keep FILE]

One engine answers without a pause. The sampler runs in a process of its own as under `firstlight up`, with all its
sources and its events written to disk; in slices without, that process is stopped where it stands (SIGSTOP). A round is
three neighbouring slices in an order that is drawn: two without and one with. They are short, three samples each: the
speed of a shared machine wanders more in a second than in a third of one, and many rounds even out the rest. The loss
is the trimmed mean over rounds of what the one with has less than the two without, with a bootstrapped 95 % interval;
the two without, held against each other in the same way, say what the machine's own noise makes of nothing. Tokens
are those that the engine counts, between two moments that it names itself. Beside throughput, which is noisy on a
shared machine, stands what the scheduler accounts for: how long the engine's threads were ready and had no core, its
processor time for a token, and that of the sampler's process.

`--keep FILE`: rounds are added to this file, and the figures are those of all that it holds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from firstlight.engine.serving.client import EngineClient
from firstlight.engine.serving.host import Host
from firstlight.engine.serving.request import SamplingParams
from firstlight.engine.serving.stats import EngineStats
from firstlight.workbench.events import EventReader
from tests.repo.tree import ROOT

MENAGERIE = ROOT / "data" / "samples" / "menagerie"
TOKENS = 400  # an answer
SETTLE_S = 0.1  # after the sampler was stopped or let go on
DRAWS = 2000  # of the bootstrap
TRIM = 0.1  # of the rounds at each end: moments at which the machine was taken away
SAMPLE = """
import sys
from pathlib import Path
from firstlight.engine.serving.host import Host
from firstlight.workbench.events import EventWriter
from firstlight.workbench.telemetry.sampler import Sampler
host = Host.attach(Path(sys.argv[1]))
with EventWriter(sys.argv[2]) as writer, Sampler(writer.put, host.client, 1 / float(sys.argv[3])):
    print("sampling", flush=True)
    sys.stdin.readline()
host.release()
"""


class Slice(NamedTuple):
    """Tokens a second, the engine's processor time a token, the sampler's process as a share of one core, and how long
    the engine's threads were ready without a core, all together, as a share of the time."""

    tokens_per_s: float
    engine_us_per_token: float
    sampler_share: float
    engine_waits: float


Round = tuple[Slice, Slice, Slice]  # without, without, with


class Spent(NamedTuple):
    """What a process's threads have had of the cores, and how long they were ready and had none."""

    ran_ns: int
    waited_ns: int


class Moment(NamedTuple):
    """What was counted up to a time: by the engine itself, and by the scheduler for both sides (ns)."""

    stats: EngineStats
    engine: Spent
    sampler: Spent
    at_s: float


def spent(processes: Iterable[int]) -> Spent:
    """Of all threads of the processes that are there, as the scheduler accounts for it."""
    ran, waited = 0, 0
    for file in (file for process in processes for file in Path(f"/proc/{process}/task").glob("*/schedstat")):
        try:
            numbers = file.read_text().split()
        except OSError:  # a thread that has just ended
            continue
        ran, waited = ran + int(numbers[0]), waited + int(numbers[1])
    return Spent(ran, waited)


@contextmanager
def sampling(where: Path, events: Path, hertz: float) -> Iterator[psutil.Process]:
    """The sampler's process, sampling when this is entered."""
    command = [sys.executable, "-c", SAMPLE, str(where), str(events), str(hertz)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = psutil.Process(process.pid)
        try:
            yield found
        finally:
            found.resume()
            process.communicate("\n", timeout=60)


@contextmanager
def busy(client: EngineClient, at_once: int) -> Iterator[None]:
    """The engine answers so many at once, one behind the other, until left."""
    params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            client.complete("what does a cow say?", params=params)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(at_once)]
    for index, thread in enumerate(threads):
        thread.start()
        time.sleep(0.2 * index)  # so that answers do not all end at once
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(60)


def measured(look: Callable[[], Moment], seconds: float) -> Slice:
    before = look()
    time.sleep(seconds)
    after = look()
    tokens = after.stats.generated_tokens - before.stats.generated_tokens
    wall_ns = 1e9 * (after.at_s - before.at_s)
    return Slice(
        tokens / (after.stats.time_s - before.stats.time_s),
        1e-3 * (after.engine.ran_ns - before.engine.ran_ns) / tokens,
        (after.sampler.ran_ns - before.sampler.ran_ns) / wall_ns,
        (after.engine.waited_ns - before.engine.waited_ns) / wall_ns,
    )


def take_rounds(look: Callable[[], Moment], sampler: psutil.Process, given: argparse.Namespace) -> list[Round]:
    """Rounds of (without, without, with) until the time is over; their order is drawn, so that no period of the load,
    whose answers begin and end, falls together with it."""
    rounds: list[Round] = []
    until_s = time.monotonic() + given.seconds
    reader, draw = EventReader(given.events), random.Random(time.time_ns())
    while time.monotonic() < until_s:
        if given.watched:
            reader.watch()
        found: dict[int, Slice] = {}
        for turn in draw.sample(range(3), 3):
            (sampler.resume if turn == 2 else sampler.suspend)()
            time.sleep(SETTLE_S)
            found[turn] = measured(look, given.slice)
        rounds.append((found[0], found[1], found[2]))
    return rounds


def trimmed(values: Sequence[float]) -> float:
    """The mean of what is left without the highest and the lowest."""
    cut = int(TRIM * len(values))
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The trimmed mean and its 95 % interval, from as many draws with replacement."""
    draw = random.Random(0)
    means = sorted(trimmed(draw.choices(values, k=len(values))) for _ in range(DRAWS))
    return trimmed(values), means[int(0.025 * DRAWS)], means[int(0.975 * DRAWS) - 1]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="of measuring, at the least one round")
    parser.add_argument("--slice", type=float, default=0.3, help="seconds")
    parser.add_argument("--keep", type=Path, help="add the rounds to this file and show the figures of all it holds")
    parser.add_argument(
        "--watched", action="store_true", help="as with a dashboard open: events are written at 10 Hz too"
    )
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--hertz", type=float, default=10.0)
    parser.add_argument("--threads", type=int, default=None, help="of the engine (default: as many as cores)")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    with tempfile.TemporaryDirectory() as folder:
        where, given.events = Path(folder) / "engine", Path(folder) / "events.sqlite"
        options = {"max_batch": given.at_once, "max_context": 512, "threads": given.threads}
        with Host.start(MENAGERIE, run_dir=where, **options) as host:
            host.wait_ready(300)
            client = host.client()
            with sampling(where, given.events, given.hertz) as sampler, busy(client, given.at_once):

                def look() -> Moment:
                    stats = client.glance()
                    assert stats is not None, "an engine that steps lays its statistics out"
                    return Moment(stats, spent(host.pids), spent([sampler.pid]), time.monotonic())

                measured(look, 3.0)  # the first answers are those of a start
                rounds = take_rounds(look, sampler, given)
    if given.keep is not None:
        with given.keep.open("a") as file:
            file.writelines(json.dumps(one) + "\n" for one in rounds)
        lines = given.keep.read_text().splitlines()
        rounds = [(Slice(*one), Slice(*other), Slice(*seen)) for one, other, seen in map(json.loads, lines)]
    report(rounds, given.hertz)


def between(one: float, other: float, seen: float) -> float:
    """What `seen` has more than the geometric mean of the two others, in per cent."""
    return 100 * (seen / (one * other) ** 0.5 - 1)


def report(rounds: Sequence[Round], hertz: float) -> None:
    plain = statistics.median(one.tokens_per_s for pair in rounds for one in pair[:2])
    seen = statistics.median(one[2].tokens_per_s for one in rounds)
    print(f"{len(rounds)} rounds: without {plain:,.1f} tokens/s, at {hertz:g} Hz {seen:,.1f} tokens/s (medians)")
    losses = interval([-between(a.tokens_per_s, b.tokens_per_s, c.tokens_per_s) for a, b, c in rounds])
    print("telemetry takes {:.2f} % of the throughput (95 %: {:.2f} to {:.2f})".format(*losses))
    nothing = interval([100 * (1 - b.tokens_per_s / a.tokens_per_s) for a, b, _ in rounds])
    print("nothing at all takes {:.2f} % (95 %: {:.2f} to {:.2f}): the noise of this run".format(*nothing))
    cost = statistics.median(one.engine_us_per_token for pair in rounds for one in pair[:2])
    dearer = interval(
        [between(a.engine_us_per_token, b.engine_us_per_token, c.engine_us_per_token) for a, b, c in rounds]
    )
    grows = "grows by {:.2f} % (95 %: {:.2f} to {:.2f})".format(*dearer)
    print(f"the engine's processor time a token, {cost:,.0f} us, {grows}")
    waits = statistics.median(100 * one.engine_waits for pair in rounds for one in pair[:2])
    longer = interval([100 * (c.engine_waits - (a.engine_waits + b.engine_waits) / 2) for a, b, c in rounds])
    print(
        f"the engine's threads wait for a core {waits:.2f} % of the time,"
        + " with telemetry {:+.2f} % of it (95 %: {:.2f} to {:.2f})".format(*longer)
    )
    cores, share = os.cpu_count() or 1, interval([100 * one[2].sampler_share for one in rounds])
    print(
        "the sampler's process takes {:.3f} % of one core (95 %: {:.3f} to {:.3f})".format(*share)
        + f", {share[0] / cores:.3f} % of all {cores}"
    )


if __name__ == "__main__":
    main()
