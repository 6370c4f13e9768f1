"""What one thing costs in another's costs: how much slower a machine is, and how busy, takes no part in it."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable
from pathlib import Path

ROUNDS = 40


def seconds(call: Callable[[], object]) -> float:
    """Processor seconds of one call, those of child processes that it waits for among them."""
    began_s = _spent_s()
    call()
    return _spent_s() - began_s


def within(times: float, ours: Callable[[], object], theirs: Callable[[], object], rounds: int = ROUNDS) -> None:
    """`ours` costs less than `times` what `theirs` costs; fails where no round of many shows it.

    Both run in turns, and of each the least so far counts. A neighbour can make a call slower and never quicker, so
    more rounds come nearer to the truth: what is really slower stays so in all of them, what was disturbed does not.
    """
    cost_s, limit_s = float("inf"), float("inf")
    for _ in range(rounds):
        cost_s = min(cost_s, seconds(ours))
        limit_s = min(limit_s, seconds(theirs))
        if cost_s < times * limit_s:
            return
    raise AssertionError(f"{cost_s:.3g} s, {cost_s / limit_s:.2f} times {limit_s:.3g} s; at most {times} asked")


def _spent_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def read_bytes() -> int:
    """How much this process has read so far, by whatever call, from disk or from memory; Linux counts it."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


def own_bytes() -> int:
    """Memory of this process that no file backs, counted page by page; Linux tells it.

    Code and files that are mapped take no part: the system takes their pages and brings them as it likes.
    """
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
