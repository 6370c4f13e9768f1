"""Loading weights into reserved memory beside safetensors' load_file followed by a copy; files in the page cache.

Both end with every weight in memory of its own that was asked for before. Peak memory is that of a fresh process.
"""

from __future__ import annotations

import subprocess
import sys
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


def peak_growth_bytes(name: str, directory: Path, threads: int) -> int:
    """How much the peak of resident memory grows in a process that does nothing else; file pages count as well."""
    command = [sys.executable, "-m", "tests.benchmarks.bench_load", "--alone", name, str(directory), str(threads)]
    return int(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.split()[-1])


def alone(name: str, directory: Path, threads: int) -> None:
    import resource

    import safetensors.torch  # noqa: F401 - imports are not part of the load

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    RUNS[name](directory, threads)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)


def main() -> None:
    if sys.argv[1:2] == ["--alone"]:
        alone(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
        return
    given = setting(__doc__)
    torch.set_num_threads(given.threads)
    weight_bytes = sum(file.stat().st_size for file in given.checkpoint.glob("*.safetensors"))
    figures = take_turns(
        {name: lambda run=run: seconds(lambda: run(given.checkpoint, given.threads)) for name, run in RUNS.items()},
        given.repeats,
    )
    rows = [
        {
            "loader": name,
            "ms": round(median(figures[name]) * 1e3, 1),
            "lowest to highest ms": spread([figure * 1e3 for figure in figures[name]]),
            "GB/s": round(weight_bytes / median(figures[name]) / 1e9, 2),
            "ratio": round(median(figures["safetensors load_file + copy"]) / median(figures[name]), 2),
            "peak memory / weights": round(peak_growth_bytes(name, given.checkpoint, given.threads) / weight_bytes, 3),
        }
        for name in RUNS
    ]
    show("Load", rows, {**machine(given.threads), "weight_mb": round(weight_bytes / 1e6, 1)}, given.json_file)


if __name__ == "__main__":
    main()
