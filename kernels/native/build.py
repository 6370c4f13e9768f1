"""Compiles the native operators once per machine: one library, found again by a hash of all that it depends on."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from firstlight.kernels.registry_types import Situation, Verdict

COMPILERS = ("g++", "clang++", "c++")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno")
_TYPES: Mapping[str, Any] = MappingProxyType(
    {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}
)
KERNELS = Path(__file__).resolve().parent.parent


class NativeBuildError(RuntimeError):
    """The compiler refused the native operators; choose others by `force={"linear": "reference", ...}`."""


def with_native(situation: Situation) -> Verdict:
    """Bfloat16 on CPUs, where it can be compiled; float32 stays torch's own, which verification relies on."""
    if situation.device_type != "cpu" or situation.dtype != torch.bfloat16:
        dtype = str(situation.dtype).removeprefix("torch.")
        return False, f"made for bfloat16 on cpu, not {dtype} on {situation.device_type}"
    return available()


@cache
def available() -> Verdict:
    """Whether native operators can be compiled here: with a C++ compiler, on torch's own OpenMP threads."""
    if platform.system() != "Linux":
        return False, f"made for Linux, not {platform.system()}"
    if _compiler() is None:
        return False, f"no C++ compiler (looked for {', '.join(COMPILERS)})"
    if openmp_runtime() is None:
        return False, "torch has loaded no OpenMP runtime whose threads could be shared"
    return True, ""


@cache
def library() -> ctypes.CDLL:
    """The compiled library, from the user's cache or compiled now (about a second).

    Raises:
        NativeBuildError: the compiler failed; the message holds its output.
    """
    path = _cache_directory() / f"native-{fingerprint()}.so"
    if not path.exists():
        compile_library(path)
    loaded = ctypes.CDLL(str(path))
    loaded.firstlight_has_bf16_dot.restype = ctypes.c_int
    return loaded


@cache
def function(name: str, arguments: str) -> Any:
    """A function of the library that returns nothing; `arguments`: p pointer, l int64, i int, f float."""
    found = library()[f"firstlight_{name}"]
    found.restype = None
    found.argtypes = [_TYPES[letter] for letter in arguments]
    return found


@cache
def has_bf16_dot() -> bool:
    """Whether the library was compiled for a CPU with dot products of bfloat16 (AVX512-BF16)."""
    return bool(library().firstlight_has_bf16_dot())


def openmp_runtime() -> Path | None:
    """The OpenMP library that torch has loaded into this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if found := re.search(r"(/\S*/lib(?:gomp|iomp5|omp)[^/]*\.so[^/]*)$", line):
            return Path(found[1])
    return None


def _compiler() -> str | None:
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


def _target() -> str:
    return "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"


def _sources() -> list[Path]:
    return sorted([*KERNELS.glob("*/*.cpp"), *KERNELS.glob("*/*.h")])


def fingerprint() -> str:
    """A hash of sources, flags, compiler, OpenMP runtime and CPU: another of any of them needs another library."""
    digest = hashlib.sha256()
    for path in _sources():
        digest.update(path.read_bytes())
    compiler = _compiler()
    assert compiler is not None
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    digest.update("\n".join([version, *FLAGS, _target(), str(openmp_runtime()), *cpu_lines()]).encode())
    return digest.hexdigest()[:16]


def cpu_lines() -> list[str]:
    """What Linux says about the model and the instructions of the CPU; nothing elsewhere."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return sorted({line for line in lines if re.match(r"(model name|flags|Features)\b", line)})


def _cache_directory() -> Path:
    """A directory that only this user writes to; a temporary one where the home directory cannot be written to."""
    directory = Path.home() / ".cache" / "firstlight"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if os.access(directory, os.W_OK):
            return directory
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="firstlight-"))


def compile_library(path: Path, *flags: str) -> None:
    """Compile to a name of our own, then move it into place, so that ranks that start together do no harm."""
    compiler, runtime = _compiler(), openmp_runtime()
    assert compiler is not None
    assert runtime is not None
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        sources = sorted(KERNELS.glob("*/native.cpp"))
        objects = [f"{scratch}/{source.parent.name}.o" for source in sources]
        compile_one = [compiler, *FLAGS, _target(), *flags, "-c"]
        _run_together([[*compile_one, str(source), "-o", one] for source, one in zip(sources, objects, strict=True)])
        # Linked without -fopenmp, against the runtime that is loaded: its threads are torch's.
        made = Path(scratch) / path.name
        _run_together([[compiler, "-shared", *objects, str(runtime), "-o", str(made)]])
        made.replace(path)


def _run_together(commands: list[list[str]]) -> None:
    """Run commands side by side; the first that fails is a NativeBuildError with what it said."""
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    said = [process.communicate()[1] for process in started]
    for command, process, words in zip(commands, started, said, strict=True):
        if process.returncode != 0:
            raise NativeBuildError(f"{' '.join(command)}\n{words}")
