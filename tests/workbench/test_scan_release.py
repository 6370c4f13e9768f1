"""A release of half a million tensors and 1.56 TB, in sparse files: everything accounted for, in little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.costs import within
from tests.engine.weights.releases import kimi_k3

SCAN = """
import json, sys
from firstlight.workbench.cli import main
status = main(["scan", sys.argv[1], "-q", "--json", sys.argv[2]])
peak = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
print(json.dumps([status, peak]))
"""


@pytest.mark.slow
def test_kimi_k3_is_scanned_whole(tmp_path: Path) -> None:
    home, written = kimi_k3(tmp_path / "Kimi-K3"), tmp_path / "report.json"
    said: list[str] = []

    def scan() -> None:
        command = [sys.executable, "-c", SCAN, str(home), str(written)]
        said[:] = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()

    within(4.5, scan, lambda: plain_json(home), rounds=3)  # 1.4 where nothing else runs
    status, peak_bytes = json.loads(said[-1])
    report = json.loads(written.read_text())
    metrics = {name: metric["value"] for name, metric in report["metrics"].items()}
    assert status == 0
    assert (metrics["tensors"], metrics["checkpoint_bytes"]) == (497_220, 1_560_860_324_864)
    assert metrics["parameters"] // 10**7 == 277_993
    assert sum(row["count"] for row in report["tables"]["tensors"]) == 497_220
    padded = next(finding for finding in report["findings"] if finding["code"] == "padded-tensor")
    assert "rows 96 to 127 of 128" in padded["message"]
    assert len(padded["tensors"]) == 69
    assert peak_bytes < 1_000_000_000


def plain_json(home: Path) -> None:
    """All headers by `json.loads`, results kept."""
    kept = []
    for file in sorted(home.glob("*.safetensors")):
        with file.open("rb") as stream:
            kept.append(json.loads(stream.read(int.from_bytes(stream.read(8), "little"))))
