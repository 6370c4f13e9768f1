"""Kinds of codes that operators multiply by, as data, and which of them pay on CPUs. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from firstlight.kernels.native.library import find_compiler

CODE_BITS: Mapping[str, int] = MappingProxyType({"e2m1": 4, "int2": 2, "int4": 4, "int8": 8, "e4m3": 8, "e5m2": 8})
"""`int2` and `int4` are stored as number + 2 and number + 8; several codes stand in a byte, the first column lowest."""

SMALL = 32  # columns: scales of smaller groups cost about as much as the codes
BESIDE = ("", " in small groups", " in any order")
KINDS = tuple(code + beside for code in CODE_BITS for beside in BESIDE)
"""What the time of a product depends on, in an order that ranks agree in."""

FASTER = frozenset(
    ("int2", "int4", "int4 in small groups", "e2m1", "e2m1 in small groups", "int8", "e5m2")
)  # fmt: skip
"""Kinds by which `native` multiplies a row faster than by plain bfloat16, which is read from memory.

Of a weight of 2048 x 4096 a row takes 0.5 (int4, a scale a row) to 0.9 (e5m2) of its time, E4M3 0.95 to 1.2, orders
0.95 and more; 2 rows at once take 0.56 to 0.97, 4 rows 1.0 to 1.4, 8 rows 0.95 to 1.4, 16 rows 1.1 to 1.45, 32 rows
0.95 to 1.12: only from 4 rows on are plain products bound by computing (AMD EPYC with AVX512-BF16, two threads, torch
2.13, side by side, best times, `python -m tests.benchmarks.bench_packed`, 2026-11-30, other work on the machine).
A llama of three layers, 2048 wide, decodes with MXFP4 at 1.43 of its plain rate with one sequence, 1.03 with 4, 1.01
with 8 and 0.81 with 16 (NVFP4 1.26, 0.94, 0.93, 0.75): whoever serves 16 at once is better off with `--packed never`.
"""

CPU_FLAGS = frozenset(("avx512_bf16", "avx512bw", "avx512dq", "avx512vl"))  # that `native` computes by vectors with


def kind_of(code: str, group_columns: int, is_ordered: bool) -> str:
    """The kind of a weight, whose scales are for so many columns each (0: for all)."""
    return code + BESIDE[2 if is_ordered else 1 if 0 < group_columns < SMALL else 0]


def expected_faster(dtype: str) -> frozenset[str]:
    """What an engine on CPUs like this machine's says is faster (`Choice.packs_faster`), without choosing operators.

    `dtype` of the run, as in files (BF16, F32).
    """
    file = Path("/proc/cpuinfo")
    found = re.search(r"^flags\s*:(.*)$", file.read_text(), re.MULTILINE) if file.exists() else None
    has_all = found is not None and set(found[1].split()) >= CPU_FLAGS
    return FASTER if dtype == "BF16" and has_all and find_compiler() is not None else frozenset()
