"""Compiles the native operators once per machine: one library, found again by a hash of all that it depends on."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from firstlight.kernels.native import library
from firstlight.kernels.registry_types import Situation, Verdict

FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno")
_TYPES: Mapping[str, Any] = MappingProxyType(
    {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}
)
KERNELS = Path(__file__).resolve().parent.parent


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
    if library.find_compiler() is None:
        return False, f"no C++ compiler (looked for {', '.join(library.COMPILERS)})"
    if openmp_runtime() is None:
        return False, "torch has loaded no OpenMP runtime whose threads could be shared"
    return True, ""


def load(folder: Path) -> ctypes.CDLL:
    """The operators for this process, found in `folder` or compiled into it now (about a second).

    Where nobody can write there, in a temporary folder. Raises `BuildError` where the compiler fails: choose others by
    `force={"linear": "reference", ...}`.
    """
    path = _writable(folder) / f"native-{fingerprint()}.so"
    if not path.exists():
        compile_library(path)
    return ctypes.CDLL(str(path))


@cache
def operators() -> ctypes.CDLL:
    """The operators that this process has loaded; else those of the user's cache, loaded now."""
    path = _mapped(rf"native-{fingerprint()}\.so")
    loaded = load(library.user_cache()) if path is None else ctypes.CDLL(str(path))
    loaded.firstlight_has_bf16_dot.restype = ctypes.c_int
    return loaded


@cache
def function(name: str, arguments: str) -> Any:
    """A function of the library that returns nothing; `arguments`: p pointer, l int64, i int, f float."""
    found = operators()[f"firstlight_{name}"]
    found.restype = None
    found.argtypes = [_TYPES[letter] for letter in arguments]
    return found


@cache
def has_bf16_dot() -> bool:
    """Whether the library was compiled for a CPU with dot products of bfloat16 (AVX512-BF16)."""
    return bool(operators().firstlight_has_bf16_dot())


def openmp_runtime() -> Path | None:
    """The OpenMP library that torch has loaded into this process."""
    return _mapped(r"lib(?:gomp|iomp5|omp)[^/]*\.so[^/]*")


def _mapped(name: str) -> Path | None:
    """The file that this process has loaded whose name has this pattern."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if found := re.search(rf"\s(/(?:.*/)?{name})$", line):
            return Path(found[1])
    return None


def _target() -> str:
    return "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"


def _sources() -> list[Path]:
    return sorted([*KERNELS.glob("*/*.cpp"), *KERNELS.glob("*/*.h")])


def fingerprint() -> str:
    """A hash of sources, flags, compiler, OpenMP runtime and CPU: another of any of them needs another library."""
    compiler = library.find_compiler()
    assert compiler is not None
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    return library.digest(_sources(), version, *FLAGS, _target(), str(openmp_runtime()), *library.cpu_lines())


def _writable(folder: Path) -> Path:
    """`folder`, made where it is not there; a temporary one where nobody can write to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="firstlight-"))


def compile_library(path: Path, *flags: str) -> None:
    """Compile the operators of all folders side by side and link them into `path`."""
    compiler, runtime = library.find_compiler(), openmp_runtime()
    assert compiler is not None
    assert runtime is not None

    def build(made: Path) -> None:
        sources = sorted(KERNELS.glob("*/native.cpp"))
        objects = [f"{made.parent}/{source.parent.name}.o" for source in sources]
        compile_one = [compiler, *FLAGS, _target(), *flags, "-c"]
        library.run_together(
            [[*compile_one, str(source), "-o", one] for source, one in zip(sources, objects, strict=True)]
        )
        # Linked without -fopenmp, against the runtime that is loaded: its threads are torch's.
        library.run_together([[compiler, "-shared", *objects, str(runtime), "-o", str(made)]])

    library.make_once(path, build)
