"""A model three times larger than its budget for weights, and a first token before the last byte.

Each run is a process of its own: the same prompt, greedy. Memory is the growth of the process from just before the
start to its peak; what is not weights (cache, activations, operators) is what the resident run has beside its weights
once it is loaded, when the staging of its load is gone. `--dtype float32`: of the bfloat16 checkpoint, so that all of
it is converted on its way; the budget is a third of what the weights take then.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.big import big_checkpoint
from tests.benchmarks.common import ROOT, machine, median, show
from tests.benchmarks.contestants import prompt_ids
from tests.benchmarks.loaders import cold, warm

PROMPT, ANSWER = 16, 12
DTYPES = {"bfloat16": ("BF16", 1), "float32": ("F32", 2)}  # and how often a stored byte counts in memory


def alone(directory: str, options: dict[str, Any], dtype: str) -> None:
    """What the fresh process does: start, answer, report."""
    from firstlight.engine.serving.request import SamplingParams
    from firstlight.engine.serving.runtime import Engine

    _peak_from_here()
    before, started_s = _status("VmRSS"), time.perf_counter()
    engine = Engine.start(directory, max_batch=1, max_context=PROMPT + ANSWER, dtype=dtype, **options)
    peak = _status("VmHWM")
    _peak_from_here()
    params = SamplingParams(max_new_tokens=ANSWER, ignore_eos=True)
    ids = prompt_ids(0, PROMPT, engine.worker.rank.spec.vocab_size)
    stream = engine.submit(ids, params=params, chat=False)
    tokens: list[int] = []
    first_s = 0.0
    while len(tokens) < ANSWER:
        assert engine.step()
        while (delta := stream.read(0)) is not None:
            tokens += delta.tokens
            first_s = first_s or time.perf_counter() - started_s
    total_s = time.perf_counter() - started_s
    report = engine.memory()[0].residency
    engine.close()
    answering = _status("VmHWM")
    memory = {"grown": max(peak, answering) - before, "loaded": answering - before}
    print(json.dumps({"tokens": tokens, "first_s": first_s, "total_s": total_s, "residency": report, **memory}))


def fresh(directory: Path, options: dict[str, Any], dtype: str, is_cold: bool) -> dict[str, Any]:
    (cold if is_cold else warm)(directory)
    words = ["--alone", str(directory), json.dumps(options), dtype]
    command = [sys.executable, "-m", "tests.benchmarks.bench_residency", *words]
    output = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return found


def _peak_from_here() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) * 1024


def main() -> None:
    if sys.argv[1:2] == ["--alone"]:
        alone(sys.argv[2], json.loads(sys.argv[3]), sys.argv[4])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="what the weights are computed with")
    parser.add_argument("--cold", action="store_true", help="files are read from the disk, not from the page cache")
    given = parser.parse_args()
    with big_checkpoint(int(given.gigabytes * 1e9), hidden=1024) as directory:
        whole = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        dtype, wider = DTYPES[given.dtype]
        whole *= wider
        budget = whole // 3
        runs = {
            "resident": {},
            "streamed, no budget": {"residency": "streamed"},
            "streamed, a third": {"residency": "streamed", "weights_budget": budget},
        }
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
        for _ in range(given.repeats):
            for name, options in runs.items():
                found[name].append(fresh(directory, options, dtype, given.cold))
    other = median([one["loaded"] for one in found["resident"]]) - whole
    rows = []
    for name, results in found.items():
        last = results[-1]["residency"] or {}
        grown = median([one["grown"] for one in results])
        rows.append(
            {
                "weights": name,
                "same tokens": all(one["tokens"] == found["resident"][0]["tokens"] for one in results),
                "first token s": round(median([one["first_s"] for one in results]), 3),
                "s a token": round(median([(one["total_s"] - one["first_s"]) / (ANSWER - 1) for one in results]), 4),
                "memory MB": round(grown / 1e6, 1),
                "weights MB": round((grown - other) / 1e6, 1),
                "of budget": round((grown - other) / budget, 3) if name.endswith("third") else "-",
                "hits": last.get("hits", "-"),
                "misses": last.get("misses", "-"),
                "waited s": round(last["waited_s"], 2) if last else "-",
                "ahead": last.get("ahead", "-"),
            }
        )
    about = {**machine(2), "model_mb": round(whole / 1e6), "budget_mb": round(budget / 1e6), "cold": given.cold}
    show("Weights that come and go", rows, about)


if __name__ == "__main__":
    main()
