"""C++ helpers for local reads: page cache lookup and strided row reads without the GIL.

Compiled once per machine, in about a second, by whichever load has much to read first. Without a compiler, or where the
system differs, `native` gives None and `local.py` reads in its plain way: the same bytes, only later.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from firstlight.engine.settings import read_settings
from firstlight.kernels.native import library

FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC")
SOURCE = Path(__file__).with_name("native.cpp")


class Native:
    """The compiled functions; memoryviews are contiguous and writable."""

    def __init__(self, compiled: ctypes.CDLL) -> None:
        file, number, memory = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
        self._take, self._take_rows = compiled.firstlight_take, compiled.firstlight_take_rows
        self._try_rows, self._read_rows = compiled.firstlight_try_rows, compiled.firstlight_read_rows
        for function in (self._try_rows, self._read_rows):
            function.argtypes = (file, number, memory, number, number, number)
        self._take.argtypes = (file, number, memory, number, memory, number)
        self._take_rows.argtypes = (file, number, memory, number, number, number, memory, number)
        self._cached = compiled.firstlight_cached
        self._cached.argtypes, self._cached.restype = (file, number, number), number
        self._gather = compiled.firstlight_gather
        self._gather.argtypes, self._gather.restype = (memory, memory, number, number, number), None
        for function in (self._take, self._take_rows, self._try_rows, self._read_rows):
            function.restype = number

    def cached(self, descriptor: int, offset_bytes: int, nbytes: int) -> int:
        """How many bytes of a range, from its start on, seem to be in the page cache; nothing is read for that."""
        return int(self._cached(descriptor, offset_bytes, nbytes))

    def take(self, descriptor: int, offset_bytes: int, target: memoryview, scratch: memoryview) -> int:
        """Read a range by way of `scratch`, as far as the page cache holds it; bytes read."""
        return int(
            self._take(descriptor, offset_bytes, _address(target), target.nbytes, _address(scratch), scratch.nbytes)
        )

    def take_rows(
        self, descriptor: int, offset_bytes: int, target: memoryview, span: int, stride: int, scratch: memoryview
    ) -> int:
        """Copy `span` of every `stride` bytes by way of `scratch`, with what is between; rows copied.

        Those are as many as the page cache holds, with what is between them.
        """
        count, place = target.nbytes // span, _address(target)
        return int(
            self._take_rows(descriptor, offset_bytes, place, count, span, stride, _address(scratch), scratch.nbytes)
        )

    def try_rows(self, descriptor: int, offset_bytes: int, target: memoryview, span: int, stride: int) -> int:
        """Copy `span` of every `stride` bytes, one read a row, while the page cache holds them; rows copied."""
        count = target.nbytes // span
        return int(self._try_rows(descriptor, offset_bytes, _address(target), count, span, stride))

    def read_rows(self, descriptor: int, offset_bytes: int, target: memoryview, span: int, stride: int) -> int:
        """Read `span` of every `stride` bytes, one call a row; rows read before the end of the file.

        Raises `OSError`.
        """
        count = target.nbytes // span
        done = int(self._read_rows(descriptor, offset_bytes, _address(target), count, span, stride))
        if done < 0:
            raise OSError(-done, os.strerror(-done))
        return done

    def gather(self, address: int, target: memoryview, span: int, stride: int) -> None:
        """Copy `span` of every `stride` bytes from an address on."""
        self._gather(address, _address(target), target.nbytes // span, span, stride)


@cache
def native() -> Native | None:
    """The library, from the cache directory or compiled now; None where there is none to be had."""
    compiled = library.of_one_file(SOURCE, "reads", FLAGS, read_settings().cache_dir)
    return None if compiled is None else Native(compiled)


def _address(target: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(target))
