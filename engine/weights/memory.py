"""Memory reserved before anything is read into it: one pool per role (weights, cache, ...), in huge pages if given."""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import re
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import torch

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal

ALIGNMENT_BYTES = 64  # of every tensor: a cache line, and the width of the widest vector registers
HUGE_PAGE_BYTES = 2 << 20
HUGE_FROM_BYTES = 32 << 20  # smaller pools are not rounded up to whole huge pages, which would cost more than 6 %
SLOW_HUGE_PAGE_S = 1e-3
LAST_PAGES = 6  # that tell the pace
MADV_POPULATE_WRITE = 23  # Linux 5.14
MADV_COLLAPSE = 25  # Linux 6.1


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one pool holds and how the system backs it.

    `reserved_bytes` is what the system was asked for, `taken_bytes` what tensors use of it (with alignment).
    `huge_page_bytes` is what huge pages back of it by now, None where that is not known; `huge_page_reason` says why it
    is not known, or why they were not waited for.
    `reserve_s` is the time the reservation took, with every page backed unless it was told to leave that to first use.
    """

    name: str
    device: str
    reserved_bytes: int
    taken_bytes: int
    huge_page_bytes: int | None
    huge_page_reason: str | None
    reserve_s: float


class Pool:
    """One contiguous range of memory, reserved and backed at once, from which tensors are taken and never returned.

    Tensors are views of the range and keep it alive. A pool never grows.
    """

    def __init__(self, name: str, data_N: torch.Tensor, reserve_s: float, reason: str | None) -> None:
        """Take over `data_N`, uint8 [reserved bytes]; use `Pool.reserve`."""
        self.name = name
        self._data_N = data_N
        self._reserve_s = reserve_s
        self._reason = reason
        self._taken_bytes = 0

    @classmethod
    def reserve(
        cls,
        nbytes: int,
        name: str,
        device: str | torch.device = "cpu",
        threads: int | None = None,
        huge_pages: bool = True,
        populate: bool = True,
        slow_huge_page_s: float = SLOW_HUGE_PAGE_S,
    ) -> Pool:
        """Reserve `nbytes`; with `populate` every page is backed now, by `threads` threads (default: torch's).

        Without it a page is backed when it is first written to. On CPUs the range is anonymous memory that starts on a
        huge page and asks for them (`madvise(MADV_HUGEPAGE)`); `report()` tells whether they were given. Where they
        take longer than `slow_huge_page_s` each, the rest is backed by small pages until `join_pages` or the kernel
        itself joins them. Elsewhere it is one allocation of torch. Contents are zero on CPUs, undefined elsewhere. Each
        tensor is aligned to 64 bytes: ask for the sum of `aligned(nbytes)` over them.

        Raises:
            Refused: the device does not have that much memory.
        """
        device = torch.device(device)
        started = time.perf_counter()
        if device.type == "cpu":
            data_N, reason = _reserve_pages(
                nbytes, name, threads or torch.get_num_threads(), huge_pages, populate, slow_huge_page_s
            )
        else:
            data_N, reason = _reserve_on_device(nbytes, name, device), None
        return cls(name, data_N, time.perf_counter() - started, reason)

    @property
    def device(self) -> torch.device:
        return self._data_N.device

    @property
    def reserved_bytes(self) -> int:
        return self._data_N.numel()

    @property
    def free_bytes(self) -> int:
        return self.reserved_bytes - self._taken_bytes

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The next `shape` elements of the pool as a contiguous tensor, aligned to 64 bytes.

        Raises:
            MemoryError: the pool is used up; whoever reserved it counted wrong.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if aligned(nbytes) > self.free_bytes:
            raise MemoryError(
                f"pool '{self.name}' of {self.reserved_bytes} bytes has {self.free_bytes} left; "
                f"{aligned(nbytes)} were asked for {list(shape)} of {dtype}"
            )
        start = self._taken_bytes
        self._taken_bytes += aligned(nbytes)
        return self._data_N[start : start + nbytes].view(dtype).view(shape)

    def join_pages(self) -> None:
        """Have the system put huge pages in the place of small ones where `reserve` did not wait for them.

        It takes milliseconds for each, in a thread of its own that ends by itself; tensors stay where they are and may
        be used meanwhile. Without a reason to (see `report`), or on Linux before 6.1, nothing is done.
        """
        if self._reason is not None:
            threading.Thread(target=_join_pages, args=(self._data_N,), name=f"join {self.name}", daemon=True).start()

    def report(self) -> PoolReport:
        """Sizes, huge pages and the time to reserve."""
        huge_page_bytes, reason = self._huge_pages()
        return PoolReport(
            name=self.name,
            device=str(self.device),
            reserved_bytes=self.reserved_bytes,
            taken_bytes=self._taken_bytes,
            huge_page_bytes=huge_page_bytes,
            huge_page_reason=reason,
            reserve_s=self._reserve_s,
        )

    def check(self) -> None:
        """Assert what always holds."""
        assert 0 <= self._taken_bytes <= self.reserved_bytes
        assert self._taken_bytes % ALIGNMENT_BYTES == 0
        assert self._data_N.data_ptr() % ALIGNMENT_BYTES == 0

    def _huge_pages(self) -> tuple[int | None, str | None]:
        if self.device.type != "cpu":
            return None, "not memory of the CPU"
        nbytes, unknown = huge_page_bytes(self._data_N.data_ptr(), self.reserved_bytes)
        return nbytes, unknown or (self._reason if nbytes != self.reserved_bytes else None)


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to what a tensor of that size takes from a pool."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def writable_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, to be read into; valid as long as the tensor lives."""
    assert tensor.device.type == "cpu", tensor.device
    assert tensor.is_contiguous(), tensor.stride()
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def huge_page_bytes(address: int, nbytes: int) -> tuple[int | None, str | None]:
    """Bytes of a range of this process that huge pages back, from /proc/self/smaps; or None and why it is not known."""
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        return None, "this system has no /proc/self/smaps"
    total = 0
    inside = False
    for line in smaps.read_text().splitlines():
        if not line[0].isupper():  # `7f0000000000-7f0000200000 rw-p ...`: an area; what follows are its figures
            first, _, end = line.partition(" ")[0].partition("-")
            inside = int(first, 16) < address + nbytes and address < int(end, 16)
        elif inside and line.startswith("AnonHugePages:"):
            total += int(line.split()[1]) * 1024
    return min(total, nbytes), None


def available_bytes() -> int | None:
    """Memory this process can still get: what Linux calls available, within its cgroup's limit; None if not known."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
    limits = [int(found[1]) * 1024] if found else []
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        limits.append(max(0, int(text) - int(used.read_text())))
    return min(limits, default=None)


def measure_read_bandwidth(nbytes: int = 256 << 20, repeats: int = 7, huge_pages: bool = True) -> float:
    """Bytes per second that torch's threads together read from memory: the limit of decoding, which reads every weight.

    The best of `repeats` sums over `nbytes` that no cache holds, as int64: one vector addition for each load.
    """
    data_N = Pool.reserve(nbytes, "bandwidth", huge_pages=huge_pages, slow_huge_page_s=math.inf).take(
        (nbytes // 8,), torch.int64
    )
    data_N.fill_(1)  # a page that was never written to may be one and the same page of zeros
    best_s = math.inf
    for _ in range(repeats):
        started = time.perf_counter()
        data_N.sum()
        best_s = min(best_s, time.perf_counter() - started)
    return nbytes / best_s


def _reserve_on_device(nbytes: int, name: str, device: torch.device) -> torch.Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise _does_not_fit(name, nbytes, f"{device}: {error}") from error


def _reserve_pages(
    nbytes: int, name: str, threads: int, huge_pages: bool, populate: bool, slow_huge_page_s: float
) -> tuple[torch.Tensor, str | None]:
    """Zeroed anonymous memory as uint8 [nbytes] that starts on a huge page, and why huge pages were not waited for."""
    available = available_bytes()
    if available is not None and nbytes > available:
        raise _does_not_fit(name, nbytes, f"{available} bytes available")
    unit = HUGE_PAGE_BYTES if huge_pages and nbytes >= HUGE_FROM_BYTES else mmap.PAGESIZE
    length = max(1, -(-nbytes // unit)) * unit
    # A huge page more at each end than needed: room to align, and the range stays an area of its own in smaps.
    try:
        area = mmap.mmap(-1, length + 2 * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise _does_not_fit(name, nbytes, str(error)) from error
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    pages = _Pages(area, HUGE_PAGE_BYTES - address % HUGE_PAGE_BYTES, length)
    pages.ask_for_huge(huge_pages)
    reason = pages.back(threads, slow_huge_page_s) if populate else None
    return torch.frombuffer(area, dtype=torch.uint8, offset=pages.start, count=max(1, nbytes))[:nbytes], reason


def _join_pages(data_N: torch.Tensor) -> None:
    madvise = _madvise()
    for offset in range(0, data_N.numel() - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES):
        if (
            madvise(data_N.data_ptr() + offset, HUGE_PAGE_BYTES, MADV_COLLAPSE) != 0
            and ctypes.get_errno() == errno.EINVAL
        ):
            return


def _madvise() -> Callable[[int, int, int], int]:
    """The system call, for advice that Python's mmap module does not know; releases the interpreter lock."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise


class _Pages:
    """The pages of a range [start, start + length) of an anonymous mapping; `start` is that of a huge page."""

    def __init__(self, area: mmap.mmap, start: int, length: int) -> None:
        self.area = area
        self.start = start
        self.length = length
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(area)) + start
        self._madvise = _madvise()

    def ask_for_huge(self, wanted: bool) -> None:
        """Back new pages by huge ones from now on, or not; the kernel joins those that are there when it sees to it."""
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.area.madvise(mmap.MADV_HUGEPAGE if wanted else mmap.MADV_NOHUGEPAGE, self.start, self.length)

    def back(self, threads: int, slow_huge_page_s: float) -> str | None:
        """Have the system back all of the range now, a part per thread; why, if huge pages were not waited for."""
        part = max(1, -(-self.length // threads // HUGE_PAGE_BYTES)) * HUGE_PAGE_BYTES
        todo = [range(at, min(at + part, self.length), HUGE_PAGE_BYTES) for at in range(0, self.length, part)]
        pace = _Pace(slow_huge_page_s)
        done = self._in_threads([partial(self._back_at_pace, one, pace) for one in todo])
        if not pace.is_slow():
            return None
        self.ask_for_huge(False)
        rest = [one[count:] for one, count in zip(todo, done, strict=True)]
        self._in_threads([partial(self._back_at_pace, one, None) for one in rest])
        self.ask_for_huge(True)
        return (
            f"the system took {pace.recent_s() * 1e3:.1f} ms to provide a huge page, so small ones are used for now; "
            "join_pages joins them"
        )

    def _back_at_pace(self, offsets: range, pace: _Pace | None) -> int:
        """Back the 2 MiB at each offset, until the pace turns out to be slow; returns how many were backed."""
        for count, offset in enumerate(offsets):
            if pace is not None and pace.is_slow():
                return count
            started_s = time.perf_counter()
            self._back_part(offset, min(HUGE_PAGE_BYTES, self.length - offset))
            if pace is not None:
                pace.took_s.append(time.perf_counter() - started_s)
        return len(offsets)

    def _back_part(self, offset: int, nbytes: int) -> None:
        if self._madvise(self._address + offset, nbytes, MADV_POPULATE_WRITE) != 0:  # Linux before 5.14
            view = memoryview(self.area)
            for page in range(self.start + offset, self.start + offset + nbytes, mmap.PAGESIZE):
                view[page] = 0

    def _in_threads(self, parts: list[Callable[[], int]]) -> list[int]:
        """Run each part in a thread of its own; all of these are there before any part begins.

        Making a thread needs the lock on the address space that backing pages holds.
        """
        results = [0] * len(parts)
        ready = threading.Barrier(len(parts))

        def work(index: int) -> None:
            ready.wait()
            results[index] = parts[index]()

        workers = [threading.Thread(target=work, args=(index,)) for index in range(len(parts))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return results


class _Pace:
    """How long the huge pages of a range took so far. Zeroing one takes 0.1 to 0.2 ms.

    Where the host of a virtual machine has yet to find the memory, each takes milliseconds, while small pages may come
    from memory that is there. The first may be fast and all others slow; a single slow one means nothing, the thread
    was interrupted.
    """

    def __init__(self, slow_s: float) -> None:
        self.slow_s = slow_s
        self.took_s: list[float] = []

    def is_slow(self) -> bool:
        """Whether half of the last few were slow."""
        return sum(1 for took_s in self.took_s[-LAST_PAGES:] if took_s > self.slow_s) * 2 >= LAST_PAGES

    def recent_s(self) -> float:
        return statistics.median_high(self.took_s[-LAST_PAGES:])


def _does_not_fit(name: str, nbytes: int, found: str) -> Refused:
    return Refused(
        fatal(
            "does-not-fit",
            f"the pool '{name}' cannot be reserved",
            expected=f"{nbytes} bytes of memory",
            found=found,
            next="run `firstlight plan` for a layout that fits: more ranks, a shorter context or fewer sequences",
        )
    )
