"""Chooses the implementation of linear layers by shape: each is timed once, on the first weight that has it.

What was chosen can be recorded and replayed, so that a second run computes the same bits. Noise must not decide:
implementations that need no memory of their own come first, a later one must be clearly faster to take their place,
and one thread is timed, since two wait for each other whenever something else runs on the machine.
Legend: T rows, H input width, F output width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from firstlight.kernels.signatures import PreparedLinear, PrepareLinear

CLEARLY_FASTER = 0.8  # a later candidate must take at most this share of the time of those before it
DECIDED = 1.5  # a lead of the preferred candidate after which no repetition is needed
REPEATS = 5


class MeasuredLinear:
    """Prepares each weight by the implementation that was fastest for its shape, over the row counts asked for.

    `candidates` are names of modules beside this one, in order of preference.
    """

    def __init__(self, candidates: Sequence[str]) -> None:
        self.candidates = tuple(candidates)
        self._prepare: dict[str, PrepareLinear] = {
            name: import_module(f"firstlight.kernels.linear.{name}").prepare for name in candidates
        }
        self._chosen: dict[str, str] = {}

    def __call__(
        self, weight_FH: Tensor, bias_F: Tensor | None = None, row_counts: Sequence[int] = (1,)
    ) -> PreparedLinear:
        """Prepare a weight [F, H] and bias [F]; the first of its shape is timed (about 10 ms)."""
        shape = shape_name(weight_FH)
        if shape not in self._chosen:
            self._chosen[shape] = self._fastest(weight_FH, bias_F, row_counts)
        return self._prepare[self._chosen[shape]](weight_FH, bias_F, row_counts)

    def record(self) -> dict[str, str]:
        """The implementation of each shape, for JSON; `replay` takes it."""
        return dict(self._chosen)

    def replay(self, record: Mapping[str, str]) -> None:
        """Use the recorded implementations for their shapes; a name that is no candidate here is a ValueError."""
        for shape, name in record.items():
            if name not in self._prepare:
                raise ValueError(f"linear {shape} was recorded as {name}; here there are {', '.join(self._prepare)}")
            self._chosen[shape] = name

    def _fastest(self, weight_FH: Tensor, bias_F: Tensor | None, row_counts: Sequence[int]) -> str:
        evict = _evictor(weight_FH.nbytes)
        found: dict[str, dict[int, float]] = {name: {} for name in self._prepare}
        ready = {name: prepare(weight_FH, bias_F, row_counts) for name, prepare in self._prepare.items()}
        for rows in row_counts:
            x_TH = torch.ones(rows, weight_FH.shape[1], dtype=weight_FH.dtype)
            for name, seconds in _time(ready, x_TH, evict).items():
                found[name][rows] = seconds
        return _pick(found)


def shape_name(weight_FH: Tensor) -> str:
    """What a choice depends on besides the machine: `bfloat16 960x576`."""
    return f"{str(weight_FH.dtype).removeprefix('torch.')} {weight_FH.shape[0]}x{weight_FH.shape[1]}"


def _pick(found: Mapping[str, Mapping[int, float]]) -> str:
    """The fastest over all row counts, each weighted the same; the order of candidates stands unless clearly beaten."""
    row_counts = next(iter(found.values()))
    fastest = {rows: min(times[rows] for times in found.values()) for rows in row_counts}
    cost = {name: sum(times[rows] / fastest[rows] for rows in row_counts) for name, times in found.items()}
    chosen, *others = found
    for name in others:
        if cost[name] < cost[chosen] * CLEARLY_FASTER:
            chosen = name
    return chosen


def _time(ready: Mapping[str, PreparedLinear], x_TH: Tensor, evict: Callable[[], object]) -> dict[str, float]:
    """Best seconds of each candidate on one thread, weights in memory; ends early if the first is far ahead."""
    with torch.inference_mode(), _one_thread():
        for linear in ready.values():  # threads are awake and code is compiled
            linear(x_TH)
        best = dict.fromkeys(ready, float("inf"))
        for _ in range(REPEATS):
            for name, linear in ready.items():
                evict()
                started_s = time.perf_counter()
                linear(x_TH)
                best[name] = min(best[name], time.perf_counter() - started_s)
            first_s, *others_s = best.values()
            if min(others_s, default=first_s) > DECIDED * first_s:
                break
    return best


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _evictor(weight_bytes: int) -> Callable[[], object]:
    """Something that leaves no part of a weight in a cache: a pass over other memory, unless the weight is larger."""
    last_cache_bytes = _last_cache_bytes()
    if weight_bytes >= last_cache_bytes:
        return lambda: None
    return torch.zeros(last_cache_bytes // 8, dtype=torch.int64).sum


def _last_cache_bytes() -> int:
    """Size of the last cache of the first core, as Linux tells it; 32 MiB if it does not."""
    file = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    text = file.read_text().strip() if file.exists() else ""
    return int(text[:-1]) << 10 if text.endswith("K") and text[:-1].isdecimal() else 32 << 20
