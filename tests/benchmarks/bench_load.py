"""Loading weights into reserved memory beside safetensors' load_file followed by a copy; files in the page cache.

Both end with every weight in memory that was asked for before. Each load has a process of its own, as a start has.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import torch

from tests.benchmarks.common import ROOT, machine, median, seconds, setting, show, spread, take_turns


def ours(directory: Path, threads: int) -> None:
    from firstlight.engine.model.families import FAMILIES
    from firstlight.engine.parallel.mesh import Mesh
    from firstlight.engine.parallel.pieces import rank_pieces
    from firstlight.engine.weights.checkpoint import Checkpoint
    from firstlight.engine.weights.ledger import account
    from firstlight.engine.weights.loader import load

    checkpoint = Checkpoint.open(str(directory))
    spec, matcher = FAMILIES.describe(checkpoint.config)
    ledger = account(checkpoint, spec, matcher)
    load(checkpoint, rank_pieces(spec, Mesh(), 0, "BF16", ledger), threads=threads)


def theirs(directory: Path, threads: int) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file

    files = sorted(directory.glob("*.safetensors"))
    places = {}
    for file in files:
        with safe_open(file, "pt") as header:
            for name in header.keys():  # noqa: SIM118 - not a mapping
                places[name] = torch.empty(header.get_slice(name).get_shape(), dtype=torch.bfloat16)
    for file in files:
        for name, tensor in load_file(file).items():
            places[name].copy_(tensor)


RUNS = {"firstlight": ours, "safetensors load_file + copy": theirs}


def fresh(name: str, directory: Path, threads: int) -> tuple[float, int]:
    """Seconds of the load in a process of its own, and by how much it raised the peak of resident memory."""
    command = [sys.executable, "-m", "tests.benchmarks.bench_load", "--alone", name, str(directory), str(threads)]
    output = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    return float(output[-2]), int(output[-1])


def alone(name: str, directory: Path, threads: int) -> None:
    """What the fresh process does."""
    import safetensors.torch  # noqa: F401 - imports are not part of the load

    import firstlight.engine.model.families
    import firstlight.engine.weights.loader  # noqa: F401

    torch.set_num_threads(threads)
    before = peak_bytes()
    taken_s = seconds(partial(RUNS[name], directory, threads))
    print(taken_s, peak_bytes() - before)


def peak_bytes() -> int:
    """The most that was ever resident in this process; pages of mapped files count as well."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def main() -> None:
    if sys.argv[1:2] == ["--alone"]:
        alone(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
        return
    given = setting(__doc__)
    weight_bytes = sum(file.stat().st_size for file in given.checkpoint.glob("*.safetensors"))
    peaks: dict[str, int] = {}

    def load_s(name: str) -> float:
        taken_s, peaks[name] = fresh(name, given.checkpoint, given.threads)
        return taken_s

    figures = take_turns({name: partial(load_s, name) for name in RUNS}, given.repeats)
    theirs_s = median(figures["safetensors load_file + copy"])
    rows = [
        {
            "loader": name,
            "ms": round(median(figures[name]) * 1e3, 1),
            "lowest to highest ms": spread([figure * 1e3 for figure in figures[name]]),
            "GB/s": round(weight_bytes / median(figures[name]) / 1e9, 2),
            "ratio": round(theirs_s / median(figures[name]), 2),
            "peak memory / weights": round(peaks[name] / weight_bytes, 3),
        }
        for name in RUNS
    ]
    show("Load", rows, {**machine(given.threads), "weight_mb": round(weight_bytes / 1e6, 1)}, given.json_file)


if __name__ == "__main__":
    main()
