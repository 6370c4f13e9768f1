"""Memory pools reserved before anything is read: one per role (weights, cache, ...), in huge pages where available."""

from __future__ import annotations

import ctypes
import math
import threading
import time
from weakref import ref

import msgspec
import torch

from firstlight.engine.errors import Refused
from firstlight.engine.weights.loading.pages import (
    ALIGNMENT_BYTES,
    SLOW_HUGE_PAGE_S,
    Pages,
    aligned,
    backed_bytes,
    does_not_fit,
    huge_page_bytes,
    join,
)

__all__ = ["Pool", "PoolReport", "aligned", "measure_read_bandwidth", "writable_bytes"]


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one pool holds and how the system backs it.

    `reserved_bytes` is what the system was asked for, `taken_bytes` what tensors use of it (with alignment). Of it,
    `backed_bytes` are in memory by now, `huge_page_bytes` in huge pages, None where that is not known;
    `huge_page_reason` says why it is not known, or why they were not waited for. `reserve_s` is the time from the first
    page to the last one, 0 where that is left to first use; for `waited_s` of it somebody stood still.
    """

    name: str
    device: str
    reserved_bytes: int
    taken_bytes: int
    backed_bytes: int | None
    huge_page_bytes: int | None
    huge_page_reason: str | None
    reserve_s: float
    waited_s: float


class Pool:
    """One contiguous range of memory, reserved as a whole, from which tensors are allocated and never freed.

    Tensors are views of the range and keep it alive. A pool never grows.
    """

    def __init__(self, name: str, data_N: torch.Tensor, pages: Pages | None, reserve_s: float = 0.0) -> None:
        """Take over `data_N`, uint8 [reserved bytes], and what backs it on CPUs; use `Pool.reserve` or `Pool.over`."""
        self.name = name
        self._data_N = data_N
        self._pages = pages
        self._start = data_N.data_ptr()
        self._bytes = memoryview(b"") if pages is None else memoryview(pages.area)[pages.start :]
        self._reserve_s = reserve_s
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
        wait: bool = True,
        slow_huge_page_s: float = SLOW_HUGE_PAGE_S,
    ) -> Pool:
        """Reserve `nbytes`; with `populate` every page is backed now, by `threads` threads (default: torch's).

        Without `wait` this returns at once and pages are backed in the background, by one thread less, from the start
        of the pool to its end (see `wait`, `take_over`); without `populate` a page is backed when it is first written
        to. On CPUs the range is anonymous memory that starts on a huge page and asks for them
        (`madvise(MADV_HUGEPAGE)`); `report()` tells whether they were given. Where they take longer than
        `slow_huge_page_s` each, the rest is backed by small pages until `join_pages` or the kernel itself joins them.
        Elsewhere it is one allocation of torch. Contents are zero on CPUs, undefined elsewhere. Each tensor is aligned
        to 64 bytes: ask for the sum of `aligned(nbytes)` over them.

        Raises:
            Refused: the device does not have that much memory.
        """
        device = torch.device(device)
        if device.type != "cpu":
            started = time.perf_counter()
            data_N = _reserve_on_device(nbytes, name, device)
            return cls(name, data_N, None, time.perf_counter() - started)
        pages = Pages(nbytes, name, huge_pages)
        if populate:
            others = 0 if wait else 1  # whoever does not wait has something to do meanwhile
            pages.back(threads or max(1, torch.get_num_threads() - others), slow_huge_page_s)
        pool = cls.over(pages, name)
        if wait:
            pool.wait()
        return pool

    @classmethod
    def over(cls, pages: Pages, name: str) -> Pool:
        """A pool on the CPU over memory that was reserved before, by a process that had not loaded torch yet."""
        data_N = torch.frombuffer(pages.area, dtype=torch.uint8, offset=pages.start, count=max(1, pages.nbytes))
        return cls(name, data_N[: pages.nbytes], pages)

    def wait(self, tensor: torch.Tensor | None = None) -> None:
        """Waits until every page up to the end of `tensor` (None: of the pool) is backed."""
        if self._pages is not None:
            self._pages.wait(None if tensor is None else self._offset(tensor) + tensor.nbytes)

    def take_over(self) -> None:
        """Stops backing pages in the background; writers must call `provide` first."""
        if self._pages is not None:
            self._pages.take_over()

    def provide(self, target: torch.Tensor | memoryview) -> None:
        """Backs the pages of a tensor (or bytes) of this pool now; does nothing for other memory."""
        if self._pages is None:
            return
        if isinstance(target, memoryview):
            start = ctypes.addressof(ctypes.c_char.from_buffer(target)) - self._pages.address if target.nbytes else 0
        else:
            start = self._offset(target)
        if 0 <= start < self._pages.nbytes:
            self._pages.provide(start, start + target.nbytes)

    def bytes_of(self, tensor: torch.Tensor) -> memoryview:
        """The memory of a contiguous tensor of this pool, to be read into; as `writable_bytes`, and much quicker."""
        if self._pages is None or not tensor.nbytes:
            return writable_bytes(tensor)
        start = self._offset(tensor)
        assert 0 <= start <= self.reserved_bytes - tensor.nbytes, "not a tensor of this pool"
        return self._bytes[start : start + tensor.nbytes]

    @property
    def waited_s(self) -> float:
        """Time in seconds that callers have waited for pages so far."""
        return self._reserve_s if self._pages is None else self._pages.waited_s

    def stop(self) -> None:
        """Stops backing pages, when a load is abandoned."""
        if self._pages is not None:
            self._pages.stop()

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
        if self._pages is not None and self._pages.reason is not None:
            threading.Thread(target=join, args=(ref(self._pages),), name=f"join {self.name}", daemon=True).start()

    def report(self) -> PoolReport:
        """Sizes, huge pages and the time to reserve."""
        huge_page_bytes, reason = self._huge_pages()
        return PoolReport(
            name=self.name,
            device=str(self.device),
            reserved_bytes=self.reserved_bytes,
            taken_bytes=self._taken_bytes,
            backed_bytes=backed_bytes(self._data_N.data_ptr(), self.reserved_bytes) if self._pages else None,
            huge_page_bytes=huge_page_bytes,
            huge_page_reason=reason,
            reserve_s=self._reserve_s if self._pages is None else self._pages.backing_s,
            waited_s=self._reserve_s if self._pages is None else self._pages.waited_s,
        )

    def check(self) -> None:
        """Asserts the invariants."""
        assert 0 <= self._taken_bytes <= self.reserved_bytes
        assert self._taken_bytes % ALIGNMENT_BYTES == 0
        assert self._data_N.data_ptr() % ALIGNMENT_BYTES == 0

    def _offset(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr() - self._start

    def _huge_pages(self) -> tuple[int | None, str | None]:
        if self.device.type != "cpu":
            return None, "not memory of the CPU"
        nbytes, unknown = huge_page_bytes(self._data_N.data_ptr(), self.reserved_bytes)
        reason = self._pages.reason if self._pages is not None and nbytes != self.reserved_bytes else None
        return nbytes, unknown or reason


def writable_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, to be read into; valid as long as the tensor lives."""
    assert tensor.device.type == "cpu", tensor.device
    assert tensor.is_contiguous(), tensor.stride()
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


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
        raise Refused(does_not_fit(name, nbytes, f"{device}: {error}")) from error
