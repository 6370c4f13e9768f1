"""What the benchmarks share: taking turns, medians, the checkpoint, the machine, and the table at the end."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Setting:
    """What every benchmark is told on the command line."""

    checkpoint: Path
    threads: int
    repeats: int
    json_file: Path | None


def setting(description: str, arguments: Sequence[str] | None = None) -> Setting:
    """Read the command line; without --checkpoint, SmolLM2-135M-Instruct is made where it is not there yet."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--checkpoint", type=Path, help="checkpoint directory (default: SmolLM2-135M-Instruct in bfloat16)"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5, help="rounds in which everyone runs once; medians are shown")
    parser.add_argument("--json", type=Path, dest="json_file", help="also write the figures to this file")
    found = parser.parse_args(arguments)
    return Setting(found.checkpoint or smollm2(), found.threads, found.repeats, found.json_file)


def smollm2() -> Path:
    """The checkpoint directory that data/samples/fetch_smollm2.py makes and prints."""
    script = ROOT / "data" / "samples" / "fetch_smollm2.py"
    made = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, check=True)
    return Path(made.stdout.strip().splitlines()[-1])


def take_turns(runs: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Let everyone run once a round, so that what else the machine does meets all; the first round is not counted."""
    figures: dict[str, list[float]] = {name: [] for name in runs}
    for round_number in range(repeats + 1):
        for name, run in runs.items():
            figure = run()
            if round_number:
                figures[name].append(figure)
    return figures


def seconds(action: Callable[[], object]) -> float:
    """How long one call takes."""
    started_s = time.perf_counter()
    action()
    return time.perf_counter() - started_s


def median(figures: Sequence[float]) -> float:
    return statistics.median(figures)


def spread(figures: Sequence[float]) -> str:
    """Lowest to highest."""
    return f"{min(figures):.3g} to {max(figures):.3g}"


def machine(threads: int) -> dict[str, Any]:
    """Hardware, versions and date: without them a figure means nothing."""
    import torch

    names = [line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    flags = next((line for line in _cpuinfo() if line.startswith("flags")), "")
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(names),
        "avx512_bf16": "avx512_bf16" in flags,
        "threads": threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        "load_average": [round(value, 1) for value in _load_average()],
    }


def show(
    title: str, rows: Sequence[Mapping[str, Any]], about: Mapping[str, Any], json_file: Path | None = None
) -> None:
    """Print the table in Markdown, the machine below it, and write both to a file if asked."""
    columns = list(rows[0])
    print(f"\n## {title}\n")
    print("| " + " | ".join(columns) + " |")
    print("|" + " --- |" * len(columns))
    for row in rows:
        print("| " + " | ".join(_cell(row[column]) for column in columns) + " |")
    print("\n" + ", ".join(f"{name} {value}" for name, value in about.items()))
    if json_file is not None:
        json_file.write_text(json.dumps({"title": title, "rows": list(rows), "machine": dict(about)}, indent=2) + "\n")


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cpuinfo() -> list[str]:
    file = Path("/proc/cpuinfo")
    return file.read_text().splitlines() if file.exists() else []


def _load_average() -> Sequence[float]:
    file = Path("/proc/loadavg")
    return [float(value) for value in file.read_text().split()[:3]] if file.exists() else []
