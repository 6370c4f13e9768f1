"""C++ that turns codes in words round, straight into place: what `Format.laid` does in several passes over memory.

Compiled once per machine, in about a second. Without a compiler, or where the system differs, there is none, and codes
are laid out by torch: the same bytes, only later.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from firstlight.engine.settings import read_settings
from firstlight.engine.weights.formats.grid import COLUMNS, ROWS, Box, Format
from firstlight.kernels.native import library

FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC")
SOURCE = Path(__file__).with_name("laying.cpp")
Turn = Callable[[Tensor, Tensor], None]  # words, place


def turned_by(format_: Format, box: Box, rows_step: int) -> Turn | None:
    """What turns the codes of a box of a weight in this format round; None where torch has to."""
    if not format_.turns or rows_step != 1 or any(edge % 8 for edge in (*box[ROWS], box[COLUMNS][0])):
        return None
    if format_.turns == "words" and any(edge % 32 for edge in box[COLUMNS]):  # whole words
        return None
    compiled = _library()
    if compiled is None:
        return None
    function = compiled[f"firstlight_turn_{format_.turns}"]
    function.restype = None
    function.argtypes = (ctypes.c_void_p, *(3 * (ctypes.c_int64,)), ctypes.c_void_p, ctypes.c_int64)

    def turn(words: Tensor, place: Tensor) -> None:
        assert words.dtype == torch.int32
        assert place.dtype == torch.uint8
        assert words.stride(-1) == place.stride(-1) == 1
        function(words.data_ptr(), *words.shape, words.stride(0), place.data_ptr(), place.stride(0))

    return turn


@cache
def _library() -> ctypes.CDLL | None:
    if platform.system() != "Linux" or not _is_little():
        return None
    flags = (*FLAGS, "-march=native") if platform.machine() in ("x86_64", "AMD64") else FLAGS
    cpu = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].partition("flags")[2].partition("\n")[0]
    name = f"turning-{library.digest([SOURCE], *flags, platform.machine(), *platform.libc_ver(), cpu)}.so"
    path = read_settings().cache_dir / name
    try:
        if not path.exists():
            _build(path, flags)
        return ctypes.CDLL(str(path))
    except (OSError, library.BuildError):  # no compiler or an odd one, a read-only home, another machine's library
        return None


def _build(path: Path, flags: tuple[str, ...]) -> None:
    """Raises `OSError` and `BuildError`."""
    compiler = library.find_compiler()
    if compiler is None:
        raise library.BuildError(f"no C++ compiler (looked for {', '.join(library.COMPILERS)})")
    words = [compiler, *flags, str(SOURCE), "-o"]
    library.make_once(path, lambda made: library.run_together([[*words, str(made)]]))


def _is_little() -> bool:
    """Whether the lowest byte of a word comes first, as in files."""
    return bool(torch.tensor([1], dtype=torch.int32).view(torch.uint8)[0])
