"""Scanning Kimi K3's half million tensors, headers only, beside `safe_open` and plain JSON over the same shards.

The release is written as sparse files: real names, shapes, dtypes and index, 1.56 TB in length, 130 MB on the disk.
Each run has a process of its own; its start is counted for `firstlight scan`, as a person waits for it too. The seconds
of the processor stand beside those of the clock, since they tell less of what else the machine does.
`--faults` scans releases that are wrong throughout instead, each once: what is found must not take longer to say.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.benchmarks.common import ROOT, machine, median, seconds, show, spread, take_turns
from tests.engine.weights.releases import Stored, kimi_k3, kimi_k3_tensors, shipped_config, write_release

TENSORS = 497_220
MOST_S, MOST_BYTES, MOST_PLAN_S = 3.0, 1_000_000_000, 1.0


def names_by_safe_open(home: Path) -> None:
    """Every name, dtype and shape through the library, as a loader would ask for them."""
    from safetensors import safe_open

    seen = 0
    for file in sorted(home.glob("*.safetensors")):
        with safe_open(file, "np") as shard:
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                part = shard.get_slice(name)
                part.get_shape(), part.get_dtype()
                seen += 1
    assert seen == TENSORS


def plain_json(home: Path) -> None:
    import json

    seen = 0
    for file in sorted(home.glob("*.safetensors")):
        with file.open("rb") as stream:
            seen += len(json.loads(stream.read(int.from_bytes(stream.read(8), "little")))) - 1
    assert seen == TENSORS


def opened(home: Path) -> None:
    """Sizes, headers and index, checked: the part of a scan that the two above do a piece of."""
    from firstlight.engine.weights.checkpoint import Checkpoint

    found = Checkpoint.open(home)
    assert len(found.tensors) == TENSORS
    assert {finding.code for finding in found.findings} <= {"unwritten-bytes"}  # the files are sparse


def planned(home: Path) -> float:
    """Seconds from an account to the read plan of one rank of TP8 x EP8."""
    from firstlight.engine.model.families import FAMILIES
    from firstlight.engine.parallel.mesh import Mesh
    from firstlight.engine.parallel.pieces import rank_pieces
    from firstlight.engine.weights.checkpoint import Checkpoint
    from firstlight.engine.weights.files.uncollected import uncollected
    from firstlight.engine.weights.ledger import account

    checkpoint = Checkpoint.open(home)
    with uncollected():
        spec, matcher = FAMILIES.describe(checkpoint.config)
        ledger = account(checkpoint, spec, matcher)
        ledger.refuse_if_incomplete()
        return seconds(lambda: rank_pieces(spec, Mesh(tp=8, ep=8), 0, "BF16", ledger))


RUNS: dict[str, Callable[[Path], object]] = {
    "Checkpoint.open": opened,
    "safe_open, every name, dtype and shape": names_by_safe_open,
    "json.loads of the headers": plain_json,
}


def alone(name: str, home: Path) -> None:
    """What a fresh process does: the run, then its seconds, those of the processor, and the most ever resident."""
    if name == "plan":
        taken_s = planned(home)
        print(taken_s, taken_s, peak_bytes())
        return
    started_s = time.process_time()
    taken_s = seconds(partial(RUNS[name], home))
    print(taken_s, time.process_time() - started_s, peak_bytes())


def peak_bytes() -> int:
    """The most that was ever resident in this process."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def fresh(name: str, home: Path) -> tuple[float, float, int]:
    command = [sys.executable, "-m", "tests.benchmarks.bench_scan", "--alone", name, str(home)]
    output = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    return float(output[-3]), float(output[-2]), int(output[-1])


WATCH = """
import resource, subprocess, sys
assert subprocess.run(sys.argv[1:]).returncode in (0, 1)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)
"""


def scanned(home: Path) -> tuple[float, float, int]:
    """`firstlight scan` as a person calls it: seconds from call to prompt, of the processor, and peak memory."""
    command = [sys.executable, "-c", WATCH, sys.executable, "-m", "firstlight.workbench", "scan", str(home), "-q"]
    started_s = time.perf_counter()
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    return time.perf_counter() - started_s, float(output[-2]), int(output[-1])


FAULTS: dict[str, Callable[[list[Stored]], list[Stored]]] = {
    "another prefix": lambda tensors: [(f"other.{name}", *rest) for name, *rest in tensors],
    "every second tensor absent": lambda tensors: tensors[1::2],
    "experts from one on": lambda tensors: [
        (re.sub(r"(?<=experts\.)\d+", lambda number: str(int(number[0]) + 1), name), *rest) for name, *rest in tensors
    ],
    "numbers with zeros before them": lambda tensors: [
        (re.sub(r"(?<=\.)\d+(?=\.)", lambda number: f"{int(number[0]):04}", name), *rest) for name, *rest in tensors
    ],
    "every name of a kind of its own": lambda tensors: [
        (f"{name}.{place}x", *rest) for place, (name, *rest) in enumerate(tensors)
    ],
    "every fifth name made up": lambda tensors: [
        (name if place % 5 else f"model.a{place}b", *rest) for place, (name, *rest) in enumerate(tensors)
    ],
    "a layer's experts renamed": lambda tensors: [
        (name.replace(".experts.", ".expert.") if ".layers.40." in name else name, *rest) for name, *rest in tensors
    ],
    "every third scale absent": lambda tensors: [
        tensor for place, tensor in enumerate(tensors) if place % 3 or not tensor[0].endswith("_scale")
    ],
    "upper case": lambda tensors: [(name.upper(), *rest) for name, *rest in tensors],
    "underscores before numbers": lambda tensors: [(re.sub(r"\.(?=\d)", "_", name), *rest) for name, *rest in tensors],
    "hexadecimal numbers": lambda tensors: [
        (re.sub(r"(?<=\.)\d+(?=\.)", lambda number: f"{int(number[0]):x}", name), *rest) for name, *rest in tensors
    ],
    "numbers in brackets": lambda tensors: [(re.sub(r"\.(\d+)", r"[\1]", name), *rest) for name, *rest in tensors],
    "colons, and a star before numbers": lambda tensors: [
        (name.replace(".", "::").replace("::", "::*", 1), *rest) for name, *rest in tensors
    ],
    "backslashes": lambda tensors: [(name.replace(".", "\\"), *rest) for name, *rest in tensors],
    "ten numbers before each name": lambda tensors: [
        (".".join([*f"{place:010}"[::-1], name]), *rest) for place, (name, *rest) in enumerate(tensors)
    ],
    "thousands of shapes": lambda tensors: [
        (name, dtype, (shape[0], place % 5000 + 1) if len(shape) == 2 else shape)
        for place, (name, dtype, shape) in enumerate(tensors)
    ],
    "experts the other way round": lambda tensors: [
        (name, dtype, shape[::-1] if ".experts." in name else shape) for name, dtype, shape in tensors
    ],
}


def faulty(place: Path) -> Iterator[dict[str, object]]:
    """Kimi K3 with each fault, and its figures."""
    config = shipped_config("kimi-k3")
    tensors = list(kimi_k3_tensors(config))
    for fault, change in FAULTS.items():
        home = write_release(place / "faulty", config, change(tensors), 96)
        taken_s, used_s, most_bytes = scanned(home)
        shutil.rmtree(home)
        figures = {"s": round(taken_s, 2), "processor s": round(used_s, 2), "peak MB": round(most_bytes / 1e6)}
        yield {"fault": fault, **figures}


def main() -> None:
    if sys.argv[1:2] == ["--alone"]:
        alone(sys.argv[2], Path(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, dest="json_file")
    parser.add_argument("--faults", action="store_true", help="releases that are wrong throughout, each once")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        if given.faults:
            show("Scan of faulty releases", list(faulty(Path(place))), machine(1), given.json_file)
            return
        home = kimi_k3(Path(place) / "Kimi-K3")
        peaks: dict[str, int] = {}
        processor_s: dict[str, list[float]] = {}

        def run(name: str) -> float:
            taken_s, used_s, peaks[name] = scanned(home) if name == "firstlight scan" else fresh(name, home)
            processor_s.setdefault(name, []).append(used_s)
            return taken_s

        names = ("firstlight scan", *RUNS, "plan")
        figures = take_turns({name: partial(run, name) for name in names}, given.repeats)
    rows = [
        {
            "run": "read plan of a rank, TP8 x EP8" if name == "plan" else name,
            "s": round(median(figures[name]), 2),
            "lowest to highest s": spread(figures[name]),
            "processor s": round(median(processor_s[name]), 2),
            "tensors/s": round(TENSORS / median(figures[name])),
            "times safe_open": round(median(figures[name]) / median(figures[list(RUNS)[1]]), 2),
            "peak MB": round(peaks[name] / 1e6),
        }
        for name in names
    ]
    show("Scan", rows, {**machine(1), "tensors": TENSORS, "shards": 96}, given.json_file)
    within = median(figures["firstlight scan"]) <= MOST_S and peaks["firstlight scan"] <= MOST_BYTES
    print(f"scan in {MOST_S:g} s and 1 GB: {'yes' if within else 'no'}")
    print(f"plan in {MOST_PLAN_S:g} s more: {'yes' if median(figures['plan']) <= MOST_PLAN_S else 'no'}")


if __name__ == "__main__":
    main()
