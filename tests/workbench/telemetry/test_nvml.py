"""Readings of GPUs, through pynvml's own loader and a small NVML of our own: what is not supported is never 0."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from firstlight.engine.settings import child_environment

READ = """
import json, sys, time
import msgspec
from firstlight.workbench.telemetry.nvml import NvmlSource
source = NvmlSource()
rounds = [list(source.read(1000.0 + tick * float(sys.argv[2]), 7)) for tick in range(int(sys.argv[1]))]
print(msgspec.json.encode(rounds).decode())
"""
Rounds = list[dict[tuple[str, str], dict[str, Any]]]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).parent / "nvml_stand_in.c"
    target = folder / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(target), str(source)], check=True)
    return folder


@pytest.fixture
def gpus(library: Path) -> Callable[..., Rounds]:
    """Readings of a machine as the stand-in is told to be, by (device, metric), round by round."""

    def read(rounds: int = 1, every_s: float = 1.0, **machine: int) -> Rounds:
        settings = {f"STAND_IN_{name.upper()}": str(value) for name, value in machine.items()}
        env = child_environment(LD_LIBRARY_PATH=str(library), **settings)
        done = subprocess.run(
            [sys.executable, "-c", READ, str(rounds), str(every_s)],
            env=env,
            capture_output=True,
            text=True,
            check=True,
        )
        return [{(one["device"], one["metric"]): one for one in batch} for batch in json.loads(done.stdout)]

    return read


def test_a_usual_machine(gpus: Callable[..., Rounds]) -> None:
    (seen,) = gpus(count=2)
    assert {device for device, _ in seen} == {"gpu 0", "gpu 1"}
    expected = {
        "utilisation": (37, "%"),
        "memory_used": (3 << 30, "B"),
        "memory_total": (80 << 30, "B"),
        "temperature": (55, "°C"),
        "power": (250.5, "W"),
        "sm_clock": (1980, "MHz"),
        "pcie_sent": (2 << 20, "B/s"),
        "ecc_uncorrected": (0, "errors"),
    }
    for metric, (value, unit) in expected.items():
        one = seen["gpu 1", metric]
        assert (one["value"], one["unit"], one["step"], one["source"]) == (value, unit, 7, "nvml")
    assert seen["gpu 0", "fan"]["reason"] == "NotSupported"
    assert seen["gpu 0", "fan"]["value"] is None
    assert seen["gpu 0", "nvlink_sent"]["reason"] == "NotSupported"


def test_unified_memory_is_said_and_the_others_are_unaffected(gpus: Callable[..., Rounds]) -> None:
    (seen,) = gpus(count=2, unified=0)
    for metric in ("memory_used", "memory_total"):
        assert seen["gpu 0", metric]["value"] is None
        assert seen["gpu 0", metric]["reason"] == "NotSupported (UMA: system memory shown)"
    assert seen["gpu 0", "utilisation"]["reason"] == "NotSupported"
    assert seen["gpu 0", "temperature"]["value"] == 55
    assert seen["gpu 1", "memory_used"]["value"] == 3 << 30


def test_a_gpu_in_instances_has_no_utilisation_of_zero(gpus: Callable[..., Rounds]) -> None:
    (seen,) = gpus(count=2, mig=1)
    assert seen["gpu 1", "utilisation"]["value"] is None
    assert "MIG" in seen["gpu 1", "utilisation"]["reason"]
    assert seen["gpu 1 mig 0", "memory_total"]["value"] == 20 << 30
    assert not any(device == "gpu 1 mig 1" for device, _ in seen), "an empty slot is no device"
    assert seen["gpu 0", "utilisation"]["value"] == 37


def test_a_lost_gpu_is_an_alarm_and_polling_goes_on(gpus: Callable[..., Rounds]) -> None:
    rounds = gpus(rounds=5, count=2, lost=0)
    assert rounds[0]["gpu 0", "utilisation"]["value"] == 37
    lost = rounds[-1]["gpu 0", "utilisation"]
    assert lost["value"] is None
    assert lost["alarm"] is True
    assert lost["reason"].startswith("GPU lost")
    assert rounds[-1]["gpu 1", "utilisation"]["value"] == 37
    assert not any(one["alarm"] for (device, _), one in rounds[-1].items() if device == "gpu 1")


def test_link_counters_become_rates(gpus: Callable[..., Rounds]) -> None:
    first, second = gpus(rounds=2, count=1, links=1)
    assert first["gpu 0", "nvlink_sent"]["reason"] == "a rate needs two samples"
    assert (
        second["gpu 0", "nvlink_sent"]["value"] == 2 * 1024 * 1024
    )  # two fields moved 1,024 KiB each, one second later


def test_who_asks_often_is_spared_what_takes_long_for_all_gpus_but_one(gpus: Callable[..., Rounds]) -> None:
    rounds = gpus(rounds=16, every_s=0.1, count=3)
    assert all(("gpu 2", "utilisation") in found for found in rounds)
    whole = [[device for device, metric in found if metric == "pcie_sent"] for found in rounds]
    assert whole[0] == ["gpu 0", "gpu 1", "gpu 2"]
    assert all(len(found) <= 1 for found in whole[1:])
    assert sorted(device for found in whole[1:] for device in found) == ["gpu 0", "gpu 1", "gpu 2"]


def test_no_devices_and_no_driver_are_reasons(gpus: Callable[..., Rounds]) -> None:
    (seen,) = gpus(count=0)
    assert seen["nvml", "gpus"]["reason"] == "the driver sees no GPU"
    (seen,) = gpus(count=1, init=9)
    assert "DriverNotLoaded" in seen["nvml", "gpus"]["reason"]


def test_no_library_is_a_reason(tmp_path: Path) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a driver")
    env = child_environment(LD_LIBRARY_PATH=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", READ, "1", "1.0"], env=env, capture_output=True, text=True, check=True)
    ((one,),) = json.loads(done.stdout)
    assert one["value"] is None
    assert one["reason"].startswith("LibraryNotFound")
