"""C++ that turns AWQ's codes in words round, straight into place.

`Format.laid` does it in several passes over memory. It is compiled once per machine, in about a second. Without a
compiler, or where the system differs, there is none, and codes are laid out by torch: the same bytes, only later.
GPTQ's words are turned by torch as fast as memory allows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from firstlight.engine.settings import read_settings
from firstlight.engine.weights.formats.awq import Awq
from firstlight.engine.weights.formats.grid import COLUMNS, ROWS, Box, Format
from firstlight.kernels.native import library

FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC")
SOURCE = Path(__file__).with_name("laying.cpp")
Turn = Callable[[Tensor, Tensor], None]  # words, place


def turned_by(format_: Format, box: Box, rows_step: int) -> Turn | None:
    """What turns the codes of a box of a weight in this format round; None where torch has to."""
    if not isinstance(format_, Awq) or rows_step != 1 or any(edge % 8 for edge in (*box[ROWS], box[COLUMNS][0])):
        return None
    return _compiled()


@cache
def _compiled() -> Turn | None:
    found = library.of_one_file(SOURCE, "turning", FLAGS, read_settings().cache_dir) if _is_little() else None
    if found is None:
        return None
    function = found.firstlight_turn_awq
    function.restype = None
    function.argtypes = (ctypes.c_void_p, *(3 * (ctypes.c_int64,)), ctypes.c_void_p, ctypes.c_int64)

    def turn(words: Tensor, place: Tensor) -> None:
        assert words.dtype == torch.int32
        assert place.dtype == torch.uint8
        assert words.stride(-1) == place.stride(-1) == 1
        function(words.data_ptr(), *words.shape, words.stride(0), place.data_ptr(), place.stride(0))

    return turn


def _is_little() -> bool:
    """Whether the lowest byte of a word comes first, as in files."""
    return bool(torch.tensor([1], dtype=torch.int32).view(torch.uint8)[0])
