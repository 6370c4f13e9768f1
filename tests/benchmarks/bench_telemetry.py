"""What telemetry at 10 Hz costs an engine: neighbouring slices of one load with and without a sampler.

    python -m tests.benchmarks.bench_telemetry [--seconds 300] [--samplers 8] [--slice 0.3] [--watched] [--keep FILE]

One engine answers without a pause. A sampler runs in a process of its own as under `firstlight up`, with all its
sources and its events written to disk. What one costs is less than what the speed of a shared machine wanders by from
one moment to the next; so several run, each as if it were the only one, and what they cost together is divided by
their number. In slices without, their processes are stopped where they stand (SIGSTOP). A round is
three neighbouring slices in an order that is drawn: two without and one with. They are short, three samples each: the
speed of a shared machine wanders more in a second than in a third of one, and many rounds even out the rest. The loss
is the trimmed mean over rounds of what the one with has less than the two without, with a bootstrapped 95 % interval;
the two without, held against each other in the same way, say what the machine's own noise makes of nothing. Tokens
are those that the engine counts, between two moments that it names itself. Beside throughput, which is noisy on a
shared machine, stands what the scheduler accounts for: how long the engine's threads were ready and had no core, its
processor time for a token, and that of the sampler's process.

Rounds in which somebody else had more than `QUIET` of a core are left out, and counted.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
QUIET = 0.1
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
    """Tokens a second; the engine's processor time a token; the sampler's process as a share of one core; how long the
    engine's threads were ready without a core, all together, as a share of the time; what others had of a core."""

    tokens_per_s: float
    engine_us_per_token: float
    sampler_share: float
    engine_waits: float
    others_share: float


Round = tuple[Slice, Slice, Slice]  # without, without, with


class Spent(NamedTuple):
    """What a thread has had of the cores, and how long it was ready and had none."""

    ran_ns: int
    waited_ns: int


class Moment(NamedTuple):
    """What was counted up to a time: by the engine itself, and by the scheduler for both sides (ns)."""

    stats: EngineStats
    engine: Mapping[str, Spent]
    sampler: Mapping[str, Spent]
    here: Mapping[str, Spent]
    busy_s: float  # of all cores together
    at_s: float


def spent(processes: Iterable[int]) -> Mapping[str, Spent]:
    """Of every thread of the processes, by name, as the scheduler accounts for it."""
    found = {}
    for file in (file for process in processes for file in Path(f"/proc/{process}/task").glob("*/schedstat")):
        try:
            ran, waited, *_ = map(int, file.read_text().split())
        except OSError:  # a thread that has just ended
            continue
        found[file.parent.name] = Spent(ran, waited)
    return found


def grown(before: Mapping[str, Spent], after: Mapping[str, Spent]) -> Spent:
    """What the threads that are there now have had since."""
    was = [before.get(name, Spent(0, 0)) for name in after]
    return Spent(
        sum(now.ran_ns - then.ran_ns for now, then in zip(after.values(), was, strict=True)),
        sum(now.waited_ns - then.waited_ns for now, then in zip(after.values(), was, strict=True)),
    )


def busy_s() -> float:
    """What all cores have worked together."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait)


@contextmanager
def sampling(where: Path, events: Path, hertz: float) -> Iterator[psutil.Process]:
    """A sampler's process, sampling when this is entered."""
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
    while (after := look()).stats.generated_tokens == before.stats.generated_tokens:  # the whole machine stood still
        time.sleep(SETTLE_S)
    tokens = after.stats.generated_tokens - before.stats.generated_tokens
    wall_ns = 1e9 * (after.at_s - before.at_s)
    engine, sampler = grown(before.engine, after.engine), grown(before.sampler, after.sampler)
    ours = engine.ran_ns + sampler.ran_ns + grown(before.here, after.here).ran_ns
    return Slice(
        tokens / (after.stats.time_s - before.stats.time_s),
        1e-3 * engine.ran_ns / tokens,
        sampler.ran_ns / wall_ns,
        engine.waited_ns / wall_ns,
        max(0.0, 1e9 * (after.busy_s - before.busy_s) - ours) / wall_ns,
    )


def take_rounds(
    look: Callable[[], Moment], samplers: Sequence[psutil.Process], given: argparse.Namespace
) -> list[Round]:
    """Rounds of (without, without, with) until the time is over; their order is drawn, so that no period of the load,
    whose answers begin and end, falls together with it."""
    rounds: list[Round] = []
    until_s = time.monotonic() + given.seconds
    reader, draw = EventReader(Path(f"{given.events}-0")), random.Random(time.time_ns())
    while time.monotonic() < until_s:
        if given.watched:
            reader.watch()
        found: dict[int, Slice] = {}
        for turn in draw.sample(range(3), 3):
            for sampler in samplers:
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
    parser.add_argument("--samplers", type=int, default=8, help="at once; what they cost is divided by their number")
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
            with ExitStack() as stack:
                samplers = [
                    stack.enter_context(sampling(where, Path(f"{given.events}-{number}"), given.hertz))
                    for number in range(given.samplers)
                ]
                stack.enter_context(busy(client, given.at_once))

                def look() -> Moment:
                    stats = client.glance()
                    assert stats is not None, "an engine that steps lays its statistics out"
                    pids = [sampler.pid for sampler in samplers]
                    here = spent([os.getpid()])
                    return Moment(stats, spent(host.pids), spent(pids), here, busy_s(), time.monotonic())

                measured(look, 3.0)  # the first answers are those of a start
                rounds = take_rounds(look, samplers, given)
    if given.keep is not None:
        with given.keep.open("a") as file:
            file.writelines(json.dumps(one) + "\n" for one in rounds)
        lines = given.keep.read_text().splitlines()
        rounds = [(Slice(*one), Slice(*other), Slice(*seen)) for one, other, seen in map(json.loads, lines)]
    report(rounds, given.hertz, given.samplers)


def between(one: float, other: float, seen: float) -> float:
    """What `seen` has more than the geometric mean of the two others, in per cent."""
    return 100 * (seen / (one * other) ** 0.5 - 1)


def report(rounds: Sequence[Round], hertz: float, samplers: int) -> None:
    """Figures of one sampler: what `samplers` of them make of a slice, divided by their number."""
    quiet = [one for one in rounds if max(part.others_share for part in one) <= QUIET]
    print(f"{len(rounds) - len(quiet)} of {len(rounds)} rounds left out: somebody else was at work")
    rounds = quiet
    plain = statistics.median(one.tokens_per_s for pair in rounds for one in pair[:2])
    seen = statistics.median(one[2].tokens_per_s for one in rounds)
    at_work = f"with {samplers} samplers of {hertz:g} Hz {seen:,.1f} tokens/s"
    print(f"{len(rounds)} rounds: without {plain:,.1f} tokens/s, {at_work} (medians)")
    losses = interval([-between(a.tokens_per_s, b.tokens_per_s, c.tokens_per_s) / samplers for a, b, c in rounds])
    print("one takes {:.2f} % of the throughput (95 %: {:.2f} to {:.2f})".format(*losses))
    nothing = interval([100 * (1 - b.tokens_per_s / a.tokens_per_s) / samplers for a, b, _ in rounds])
    print("nothing at all takes {:.2f} % (95 %: {:.2f} to {:.2f}): the noise of this run".format(*nothing))
    cost = statistics.median(one.engine_us_per_token for pair in rounds for one in pair[:2])
    dearer = interval(
        [between(a.engine_us_per_token, b.engine_us_per_token, c.engine_us_per_token) / samplers for a, b, c in rounds]
    )
    grows = "grows by {:.2f} % (95 %: {:.2f} to {:.2f})".format(*dearer)
    print(f"the engine's processor time a token, {cost:,.0f} us, {grows}")
    waits = statistics.median(100 * one.engine_waits for pair in rounds for one in pair[:2])
    longer = interval([100 * (c.engine_waits - (a.engine_waits + b.engine_waits) / 2) / samplers for a, b, c in rounds])
    print(
        f"the engine's threads together wait {waits:.2f} % of the time for a core,"
        + " and {:.2f} % more (95 %: {:.2f} to {:.2f})".format(*longer)
    )
    cores, share = os.cpu_count() or 1, interval([100 * one[2].sampler_share / samplers for one in rounds])
    print(
        "the sampler's process takes {:.3f} % of one core (95 %: {:.3f} to {:.3f})".format(*share)
        + f", {share[0] / cores:.3f} % of all {cores}"
    )


if __name__ == "__main__":
    main()
