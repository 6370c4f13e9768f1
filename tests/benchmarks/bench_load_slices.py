"""One rank of tensor parallel 8: rows and columns of every matrix, beside safetensors' get_slice.

Bytes read are counted: by us as delivered, of the whole process as the system says (/proc/self/io, disk reads alone),
with what lies between shares of rows and was read with them. "Of it for memory" is for how long reading stood still
while the system provided pages (of the last run); a start has that done while torch is imported.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks.big import big_checkpoint
from tests.benchmarks.common import ROOT, machine, median, show, spread, take_turns
from tests.benchmarks.loaders import cold, warm

RANK, RANKS = 3, 8
BY_COLUMN = ("o_proj", "down_proj")


def firstlight(directory: Path, ready: bool = False) -> dict[str, Any]:
    """`ready`: memory is there before the clock starts, as it is in a start, which has it while torch is imported."""
    from firstlight.engine.model.families import FAMILIES
    from firstlight.engine.parallel.mesh import Mesh
    from firstlight.engine.parallel.pieces import rank_pieces
    from firstlight.engine.weights.checkpoint import Checkpoint
    from firstlight.engine.weights.ledger import account
    from firstlight.engine.weights.loader import load
    from firstlight.engine.weights.loading.pages import reserve

    checkpoint = Checkpoint.open(str(directory))
    spec, matcher = FAMILIES.describe(checkpoint.config)
    pieces = rank_pieces(spec, Mesh(tp=RANKS), RANK, "BF16", account(checkpoint, spec, matcher))
    reserved = None
    if ready:
        reserved = reserve(storage.nbytes for storage in pieces.storages)
        reserved.wait()
    before_s, started_s = reserved.waited_s if reserved else 0.0, time.perf_counter()
    weights = load(checkpoint, pieces, reserved=reserved)
    timed = {"seconds": time.perf_counter() - started_s} if ready else {}
    return {
        **timed,
        "needed_bytes": weights.bytes_needed,
        "asked_bytes": weights.bytes_read,
        "origin": weights.origin,
        "memory_s": weights.pools[0].waited_s - before_s,
    }


def get_slice(directory: Path) -> dict[str, Any]:
    import torch
    from safetensors import safe_open

    kept: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                cut = opened.get_slice(name)
                shape = cut.get_shape()
                dim = int(len(shape) == 2 and any(part in name for part in BY_COLUMN))
                if len(shape) == 1:
                    kept[name] = cut[:].clone()
                    continue
                low, high = shape[dim] * RANK // RANKS, shape[dim] * (RANK + 1) // RANKS
                kept[name] = (cut[:, low:high] if dim else cut[low:high]).clone().contiguous()
    nbytes = sum(tensor.nbytes for tensor in kept.values())
    return {"needed_bytes": nbytes, "asked_bytes": nbytes}


RUNS: dict[str, Any] = {
    "firstlight": firstlight,
    "firstlight, into the reserve": partial(firstlight, ready=True),
    "safetensors get_slice": get_slice,
}


def fresh(name: str, directory: Path, is_cold: bool, kept: dict[str, dict[str, Any]]) -> float:
    (cold if is_cold else warm)(directory)
    command = [sys.executable, "-m", "tests.benchmarks.bench_load_slices", "--alone", name, str(directory)]
    output = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    kept[name] = json.loads(output.strip().splitlines()[-1])
    return float(kept[name]["seconds"])


def alone(name: str, directory: Path) -> None:
    """What the fresh process does."""
    import safetensors.torch  # noqa: F401 - imports are not part of a load
    import torch

    import firstlight.engine.model.families.llama
    import firstlight.engine.weights.ledger
    import firstlight.engine.weights.loader  # noqa: F401

    torch.set_num_threads(2)
    before, started_s = _disk_bytes(), time.perf_counter()
    found = RUNS[name](directory)
    seconds = time.perf_counter() - started_s
    print(json.dumps({"seconds": seconds, **found, "disk_bytes": _disk_bytes() - before}))


def _disk_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split("read_bytes: ")[1].split()[0])


def main() -> None:
    if sys.argv[1:2] == ["--alone"]:
        alone(sys.argv[2], Path(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, help="a Llama's directory; without it one is made")
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm", action=argparse.BooleanOptionalAction, default=True, help="from the page cache")
    parser.add_argument("--cold", action=argparse.BooleanOptionalAction, default=True, help="from the disk")
    given = parser.parse_args()
    with big_checkpoint(int(given.gigabytes * 1e9)) if not given.checkpoint else nullcontext(given.checkpoint) as home:
        for is_cold in [False] * given.warm + [True] * given.cold:
            table(home, is_cold, given.repeats)


def table(directory: Path, is_cold: bool, repeats: int) -> None:
    kept: dict[str, dict[str, Any]] = {}
    runs: dict[str, Any] = {name: partial(fresh, name, directory, is_cold, kept) for name in RUNS}
    figures = take_turns(runs, repeats)
    theirs = median(figures["safetensors get_slice"])
    rows = [
        {
            "loader": name,
            "ms": round(median(figures[name]) * 1e3, 1),
            "lowest to highest": spread([figure * 1e3 for figure in figures[name]]),
            "of it for memory": round(kept[name].get("memory_s", 0) * 1e3, 1),
            "times get_slice": round(theirs / median(figures[name]), 2),
            "needed MB": round(kept[name]["needed_bytes"] / 1e6, 1),
            "delivered MB": round(kept[name]["asked_bytes"] / 1e6, 1),
            "from disk MB": round(kept[name]["disk_bytes"] / 1e6, 1),
        }
        for name in RUNS
    ]
    gigabytes = sum(file.stat().st_size for file in directory.glob("*.safetensors")) / 1e9
    where = "cold" if is_cold else "page cache"
    show(f"Rank {RANK} of tp {RANKS}, {gigabytes:.2g} GB, {where}", rows, {**machine(2), "repeats": repeats})
    print(f"firstlight's last: {kept['firstlight']['origin']}")


if __name__ == "__main__":
    main()
