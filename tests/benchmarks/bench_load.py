"""Loading weights beside safetensors' load_file and a copy, fastsafetensors, runai-model-streamer and plain preads.

Every load has a process of its own, and all take turns. `read` is into memory that is there already, where a loader can
be given some; `total` starts with none. Without --checkpoint: SmolLM2-135M, then a Llama of --gigabytes made for the
purpose, from the page cache and from the disk; fio, where it is installed, says what the disk gives.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks.big import big_checkpoint
from tests.benchmarks.common import machine, median, show, smollm2, spread, take_turns
from tests.benchmarks.loaders import LOADERS, absent, cold, fresh, warm

LEGEND = """
read: into memory that is there (backed before the clock starts, for those that can be given some).
total: from nothing but the files to all weights in memory of one's own. reserve: of it, being given that memory.
`of` somebody's: that one's time divided by this one's. `its total / our read`: what a loader needs in all, beside our
read alone, where the reserve was made while something else was done (a start does it while torch is imported)."""
FIO = "fio, queue depth 32"
Figures = dict[tuple[str, bool], list[float]]
WARM = [name for name in LOADERS if "," not in name]
COLD = list(LOADERS)


def table(title: str, directory: Path, names: list[str], threads: int, repeats: int, is_cold: bool) -> None:
    weight_bytes = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    there = [name for name in names if not absent(name)]
    for name in names:
        if reason := absent(name):
            print(f"left out: {name}: {reason}")
    found: dict[tuple[str, bool], list[dict[str, float]]] = {}

    def run(name: str, ready: bool) -> float:
        (cold if is_cold else warm)(directory)
        times = fresh(name, directory, threads, ready)
        found.setdefault((name, ready), []).append(times)
        return times["read_s"] if ready else times["total_s"]

    modes = (False,) if is_cold else (True, False)
    turns: dict[str, Any] = {json.dumps([name, ready]): partial(run, name, ready) for name in there for ready in modes}
    if is_cold and shutil.which("fio"):
        turns[json.dumps([FIO, False])] = partial(fio_s, directory)
    figures: Figures = {tuple(json.loads(key)): values for key, values in take_turns(turns, repeats).items()}
    rows = [
        _row(name, figures, found.get((name, False), [{}])[1:], weight_bytes)
        for name in dict.fromkeys(name for name, _ in figures)
    ]
    about = {**machine(threads), "weight_mb": round(weight_bytes / 1e6, 1), "repeats": repeats}
    show(title, rows, about)
    print(LEGEND)


def _row(name: str, figures: Figures, own: list[dict[str, float]], weight_bytes: int) -> dict[str, Any]:
    """Read against read, total against total, and this one's total against our read into memory that is there."""
    total, read = median(figures[name, False]), figures.get((name, True))
    peer, ours = figures["safetensors load_file + copy", False], figures.get(("firstlight", True))
    fio = figures.get((FIO, False))
    row: dict[str, Any] = dict.fromkeys(
        ("loader", "read ms", "read GB/s", "read, of pread's", "read, of load_file's"), "-"
    )
    row["loader"] = name
    if read:
        row["read ms"] = round(median(read) * 1e3, 1)
        row["read GB/s"] = round(weight_bytes / median(read) / 1e9, 2)
        row["read, of pread's"] = round(median(figures["parallel pread", True]) / median(read), 2)
        row["read, of load_file's"] = round(median(figures["safetensors load_file + copy", True]) / median(read), 2)
    return row | {
        "reserve ms": round(median([one["reserve_s"] for one in own]) * 1e3, 1) if own and own[0] else "-",
        "total ms": round(total * 1e3, 1),
        "lowest to highest": spread([one * 1e3 for one in figures[name, False]]),
        "total GB/s": round(weight_bytes / total / 1e9, 2),
        "total, of load_file's": round(median(peer) / total, 2),
        "total, of fio's": round(median(fio) / total, 2) if fio else "-",
        "its total / our read": round(total / median(ours), 2) if ours else "-",
        "peak / weights": round(max(o["peak_bytes"] for o in own) / weight_bytes, 3) if own and own[0] else "-",
    }


def fio_s(directory: Path) -> float:
    """Seconds that fio takes for the same files at queue depth 32, past the page cache."""
    files = ":".join(str(file) for file in sorted(directory.glob("*.safetensors")))
    words = ["--name=read", "--rw=read", "--bs=1M", "--direct=1", "--ioengine=libaio", "--iodepth=32"]
    run = subprocess.run(
        ["fio", *words, f"--filename={files}", "--output-format=json"], stdout=subprocess.PIPE, text=True, check=True
    )
    read = json.loads(re.sub(r"^[^{]*", "", run.stdout, count=1))["jobs"][0]["read"]
    total = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    return total / float(read["bw_bytes"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, help="measure this one alone; without it SmolLM2 and a large one")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5, help="rounds in which everyone runs once; medians are shown")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of the large checkpoint; 0: none")
    parser.add_argument("--warm", action=argparse.BooleanOptionalAction, default=True, help="from the page cache")
    parser.add_argument("--cold", action=argparse.BooleanOptionalAction, default=True, help="large ones from the disk")
    given = parser.parse_args()
    if given.checkpoint:
        tables(given.checkpoint.name, given.checkpoint, given)
        return
    if given.warm:
        table("Load, smollm2, page cache", smollm2(), WARM, given.threads, given.repeats, False)
    if given.gigabytes:
        with big_checkpoint(int(given.gigabytes * 1e9)) as large:
            tables(f"{given.gigabytes:g} GB of bfloat16", large, given)


def tables(name: str, directory: Path, given: argparse.Namespace) -> None:
    if given.warm:
        table(f"Load, {name}, page cache", directory, WARM, given.threads, given.repeats, False)
    if given.cold:
        table(f"Load, {name}, cold", directory, COLD, given.threads, given.repeats, True)


if __name__ == "__main__":
    main()
