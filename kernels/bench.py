"""Check every implementation on every case, and measure those that pass.

    python -m firstlight.kernels.bench                       speeds on this CPU
    python -m firstlight.kernels.bench --device cuda --check every case in every dtype natively, then speeds

No speed is printed for an implementation that fails a case of its operator. Speeds are medians; the fraction is of the
memory bandwidth measured in the same run, and is given only for calls that move more than the caches hold.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from firstlight.kernels import testing
from firstlight.kernels.registry import implementations, operator_names
from firstlight.kernels.registry_types import Implementation, Situation
from firstlight.kernels.testing import Case, Outcome

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CACHES_BYTES = 64 * 2**20
CPU_LIMIT_BYTES = 32 * 2**20
CPU_LIMIT_FLOPS = 10**9


@dataclass(frozen=True, slots=True)
class Trial:
    """One implementation on one case in one dtype: what a worker is asked to check."""

    operator: str
    implementation: str
    case: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Speed:
    """The median time of one call, and what it means."""

    operator: str
    implementation: str
    case: str
    dtype: str
    microseconds: float
    spread: float  # (slowest - fastest) / median of the repetitions
    gb_per_s: float
    tflop_per_s: float
    bandwidth_fraction: float | None  # None: the data fits the caches, or the work is arithmetic


def measure(call: Callable[[], object], device: torch.device, repeats: int = 5) -> tuple[float, float]:
    """Time a call: (median seconds, spread). On a GPU the second-level cache is overwritten before each repetition."""
    for _ in range(2):
        call()
    if device.type == "cuda":
        once = _cuda_seconds(call, device)
        return _summary([_cuda_seconds(call, device) for _ in range(repeats if once > 0.05 else 5 * repeats)])
    started = time.perf_counter()
    call()
    count = max(1, int(0.005 / max(time.perf_counter() - started, 1e-7)))
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(count):
            call()
        seconds.append((time.perf_counter() - started) / count)
    return _summary(seconds)


def _summary(seconds: Sequence[float]) -> tuple[float, float]:
    median = statistics.median(seconds)
    return median, (max(seconds) - min(seconds)) / median


def _cuda_seconds(call: Callable[[], object], device: torch.device) -> float:
    torch.empty(256 * 2**20, dtype=torch.int8, device=device).zero_()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def memory_bandwidth(device: torch.device) -> float:
    """Measure how fast memory is read (CPU: a sum) or read and written (GPU: a copy), in bytes per second."""
    if device.type == "cuda":
        source = torch.ones(2**28, dtype=torch.float32, device=device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / measure(lambda: target.copy_(source), device)[0]
    source = torch.ones(2**26, dtype=torch.float32)
    return source.nbytes / measure(source.sum, device)[0]


def trials(device: torch.device, dtypes: Iterable[str], operators: Iterable[str]) -> list[Trial]:
    """List what there is to check; float16 takes every third case, since only the type is new there."""
    found = []
    for operator in operators:
        for one in implementations(operator):
            for i, case in enumerate(testing.cases(operator)):
                for dtype in ["float32"] if operator in testing.IN_FLOAT32 else dtypes:
                    rare = dtype == "float16" and i % 3
                    large = case.benchmark and (dtype != "bfloat16" or not _feasible(case, device))
                    if not rare and not large and one.name != "reference" and _supports(one, case, device, dtype):
                        found.append(Trial(operator, one.name, case.name, dtype))
    return found


def _feasible(case: Case, device: torch.device) -> bool:
    work = case.work(torch.bfloat16)
    return device.type != "cpu" or (work.bytes <= CPU_LIMIT_BYTES and work.flops <= CPU_LIMIT_FLOPS)


def _supports(one: Implementation, case: Case, device: torch.device, dtype: str) -> bool:
    situation = Situation(device.type, DTYPES[dtype], case.shapes, has_triton=device.type == "cuda", interpret=False)
    return one.supports(situation)[0]


def run_trial(trial: Trial, device: str) -> Outcome:
    """Check one; an exception is a failed check here, with its text, so that one broken kernel hides no other."""
    case = next(case for case in testing.cases(trial.operator) if case.name == trial.case)
    try:
        return testing.check(trial.operator, trial.implementation, case, torch.device(device), DTYPES[trial.dtype])
    except Exception as error:  # noqa: BLE001 - whatever a kernel's compiler raises is the result of the check
        return Outcome(**asdict(trial), passed=False, distance=float("inf"), limit=0.0, detail=repr(error)[:500])


def run_trials(todo: Sequence[Trial], device: str, jobs: int) -> list[Outcome]:
    """Check all, in several processes where that pays: most of the time goes into compiling."""
    if jobs <= 1:
        return [run_trial(trial, device) for trial in todo]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return list(pool.map(run_trial, todo, [device] * len(todo), chunksize=1))


def speeds(
    passed: Sequence[tuple[str, str]], device: torch.device, dtype: str, bandwidth: float, repeats: int
) -> list[Speed]:
    """Measure the implementations that passed, on the cases large enough to mean something."""
    found = []
    for operator, name in passed:
        function = {one.name: one for one in implementations(operator)}[name].load()
        for case in testing.cases(operator):
            if not case.benchmark or not _feasible(case, device):
                continue
            call = case.make(device, DTYPES[dtype])
            with torch.inference_mode():
                seconds, spread = measure(partial(function, *call.args, **call.kwargs), device, repeats)
            work = case.work(DTYPES[dtype])
            rate = work.bytes / seconds
            memory_bound = work.flops < 200 * work.bytes and (device.type == "cuda" or work.bytes > CACHES_BYTES)
            found.append(
                Speed(
                    operator,
                    name,
                    case.name,
                    dtype,
                    seconds * 1e6,
                    spread,
                    rate / 1e9,
                    work.flops / seconds / 1e12,
                    rate / bandwidth if memory_bound else None,
                )
            )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; 0 only if every check passed."""
    parser = _parser()
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is here; --device cpu tries and times what this machine has")
    if options.threads:
        torch.set_num_threads(options.threads)
    operators = [one for one in _operators() if options.operator in ("", one)]
    dtypes = list(DTYPES) if options.check else [options.dtype]
    jobs = options.jobs or (min(12, os.cpu_count() or 1) if device.type == "cuda" else 1)
    outcomes = run_trials(trials(device, dtypes, operators), options.device, jobs)
    failed = {(one.operator, one.implementation) for one in outcomes if not one.passed}
    tried = dict.fromkeys((one.operator, one.implementation) for one in outcomes)
    _print_outcomes(outcomes)
    measured: list[Speed] = []
    bandwidth = 0.0
    if not options.no_speeds:
        bandwidth = memory_bandwidth(device)
        references = [(operator, "reference") for operator in operators]
        measured = speeds(
            [*references, *(one for one in tried if one not in failed)],
            device,
            options.dtype,
            bandwidth,
            options.repeats,
        )
        _print_speeds(measured, failed, bandwidth)
    if options.json:
        _write_json(options.json, device, outcomes, measured, bandwidth)
    return 1 if failed else 0


def _operators() -> list[str]:
    """The operators that have cases."""
    return [name for name in operator_names() if name in testing.FOLDERS]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m firstlight.kernels.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="what to try and time it on")
    parser.add_argument("--dtype", default="bfloat16", choices=list(DTYPES), help="dtype of the speeds")
    parser.add_argument("--operator", default="", choices=_operators(), metavar="NAME", help="only this one")
    parser.add_argument("--check", action="store_true", help="check all dtypes, not only the measured one")
    parser.add_argument("--no-speeds", action="store_true", help="check only")
    parser.add_argument("--repeats", type=int, default=5, help="repetitions, of which the median counts")
    parser.add_argument("--threads", type=int, default=0, help="torch's threads on the CPU; 0 leaves them")
    parser.add_argument("--jobs", type=int, default=0, help="processes that check; 0 chooses")
    parser.add_argument("--json", default="", help="write everything to a file, or - for standard output")
    return parser


def _print_outcomes(outcomes: Sequence[Outcome]) -> None:
    print(f"{'operator':18}{'implementation':16}{'checks':>7}{'failed':>7}  worst distance / limit")
    for operator, name in dict.fromkeys((one.operator, one.implementation) for one in outcomes):
        own = [one for one in outcomes if (one.operator, one.implementation) == (operator, name)]
        bad = [one for one in own if not one.passed]
        worst = max((one.distance / one.limit if one.limit else float("inf")) for one in own)
        print(f"{operator:18}{name:16}{len(own):7}{len(bad):7}  {worst:.3f}")
        for one in bad:
            print(f"    FAILED {one.case} {one.dtype}: distance {one.distance:.3g}, limit {one.limit:.3g} {one.detail}")


def _print_speeds(measured: Sequence[Speed], failed: set[tuple[str, str]], bandwidth: float) -> None:
    print(f"\nmemory bandwidth {bandwidth / 1e9:.1f} GB/s")
    print(
        f"{'operator':18}{'implementation':16}{'case':40}{'us':>10}{'spread':>8}{'GB/s':>9}{'TFLOP/s':>9}{'of bw':>7}"
    )
    for one in sorted(measured, key=lambda one: (one.operator, one.case, one.microseconds)):
        fraction = "" if one.bandwidth_fraction is None else f"{100 * one.bandwidth_fraction:.0f} %"
        print(
            f"{one.operator:18}{one.implementation:16}{one.case[:39]:40}{one.microseconds:10.1f}"
            f"{100 * one.spread:6.0f} %{one.gb_per_s:9.1f}{one.tflop_per_s:9.3f}{fraction:>7}"
        )
    for operator, name in sorted(failed):
        print(f"{operator:18}{name:16}no speed: its cases fail")


def _write_json(
    path: str, device: torch.device, outcomes: Sequence[Outcome], measured: Sequence[Speed], bandwidth: float
) -> None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    text = json.dumps(
        {
            "device": name,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "memory_bandwidth_gb_per_s": bandwidth / 1e9,
            "checks": [_finite(asdict(one)) for one in outcomes],
            "speeds": [asdict(one) for one in measured],
        },
        indent=1,
        allow_nan=False,
    )
    if path == "-":
        print(text)
    else:
        Path(path).write_text(text + "\n", encoding="utf-8")


def _finite(row: dict[str, object]) -> dict[str, object]:
    """JSON has no infinity: an infinite distance becomes null."""
    return {key: None if value in (float("inf"), float("-inf")) else value for key, value in row.items()}


if __name__ == "__main__":
    sys.exit(main())
