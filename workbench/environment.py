"""Where a report was made: versions, commit, machine, devices. torch is described only where it is already loaded."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

PACKAGES = ("firstlight", "torch", "triton", "transformers", "safetensors", "tokenizers", "numpy")


def environment() -> dict[str, Any]:
    """Everything a reader of a report needs to judge and to repeat it."""
    return {
        "command": command_line() if _is_command_line() else "",
        **_machine(),
        "commit": commit(),
        "versions": versions(),
        **_torch(),
    }


def command_line() -> str:
    """The command as it was given, but for secrets; of a program of the user's own, or a notebook, that one."""
    if _is_kernel() and not _is_command_line():
        return "a notebook"
    words = list(sys.argv[1:])
    for index, word in enumerate(words):
        if word.startswith("--token="):
            words[index] = "--token=..."
        elif index and words[index - 1] == "--token":
            words[index] = "..."
    program = ["firstlight"] if _is_command_line() else ["python", *filter(None, sys.argv[:1])]
    return shlex.join([*program, *words])


def _is_kernel() -> bool:
    """Whether this process is a notebook's, and not only one that has imported what kernels are made of."""
    module = sys.modules.get("ipykernel.kernelapp")
    return module is not None and bool(module.IPKernelApp.initialized())


@cache
def versions() -> dict[str, str]:
    """Versions of Python and of the packages whose numerics or formats matter; an absent package is left out.

    Read off the names of the installed distributions: parsing their metadata takes longer than a whole scan.
    """
    installed: dict[str, str] = {}
    for folder in sys.path:
        with contextlib.suppress(OSError):  # entries of the path that are archives or not there
            for entry in os.scandir(folder or "."):
                name, dash, version = entry.name.removesuffix(".dist-info").partition("-")
                if dash and entry.name.endswith(".dist-info"):
                    installed.setdefault(name.lower().replace("_", "-"), version)
    known = {package: installed[package] for package in PACKAGES if package in installed}
    return {"python": ".".join(map(str, sys.version_info[:3])), **known}


@cache
def commit() -> str:
    """The commit of the source tree, `+changes` with uncommitted ones; empty outside a repository."""
    import subprocess

    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return ""
    try:
        run = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+changes"],
            capture_output=True,
            text=True,
            timeout=5,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout.strip()


@cache
def _machine() -> dict[str, Any]:
    return {
        "hostname": os.uname().nodename,
        "system": f"{os.uname().sysname} {os.uname().release}",
        "cpu": cpu_model(),
        "cores": core_count(),
        "memory_bytes": memory_bytes(),
    }


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return os.uname().machine


def core_count() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int | None:
    """Memory of the machine in bytes, None where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def since_process_start_s() -> float:
    """Seconds since this process was started, by the system's clock (10 ms steps)."""
    import psutil

    return time.time() - psutil.Process().create_time()


def _torch() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    described: dict[str, Any] = {"torch_threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        described["devices"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        described["cuda"] = torch.version.cuda
    return described


def _is_command_line() -> bool:
    program = Path(sys.argv[0] if sys.argv else "")
    return program.name == "firstlight" or program.parts[-2:] == ("workbench", "__main__.py")
