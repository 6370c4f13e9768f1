"""Allocates anonymous memory and faults its pages in ahead of use, in huge pages where available. No torch."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from weakref import ref

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal
from firstlight.engine.room import available_bytes
from firstlight.engine.weights.loading.threads import await_end

ALIGNMENT_BYTES = 64  # of every tensor: a cache line, and the width of the widest vector registers
HUGE_PAGE_BYTES = 2 << 20
UNIT_BYTES = 256 << 10  # of small pages: who writes to one half of a huge page need not wait for the other half
UNITS = HUGE_PAGE_BYTES // UNIT_BYTES
HUGE_FROM_BYTES = 32 << 20  # smaller ranges are not rounded up to whole huge pages, which would cost more than 6 %
SLOW_HUGE_PAGE_S = 1e-3
LAST_PAGES = 2  # that tell the pace: a slow one takes as long as seven in small pages
HOPELESS = 4  # times as long as a slow one: then one is enough
JOINING_SHARE = 0.1  # of the time may go into joining pages while the process computes
BUSY_SHARE = 0.05  # of one core: more than that, and the process computes
LEAST_WORK_S, LONGEST_REST_S = 1e-3, 1.0
NOT_BEGUN, BEGUN, DONE = range(3)
MADV_POPULATE_WRITE = 23  # Linux 5.14
MADV_COLLAPSE = 25  # Linux 6.1


class Pages:
    """A range of zeroed memory aligned to huge pages, backed from start to end by its own threads.

    Whoever is about to write to it may take over from them (`take_over`) and have what is missing backed where and when
    it is needed (`provide`), by the thread that writes to it: what was just zeroed is still in its cache. The memory
    goes back when the last view of `area` is gone. `reason` says why huge pages were not waited for.
    """

    def __init__(self, nbytes: int, name: str, huge_pages: bool = True) -> None:
        """Maps `nbytes`; nothing is backed yet. Raises `Refused` where the machine does not have that much memory."""
        available = available_bytes()
        if available is not None and nbytes > available:
            raise Refused(does_not_fit(name, nbytes, f"{available} bytes available"))
        unit = HUGE_PAGE_BYTES if huge_pages and nbytes >= HUGE_FROM_BYTES else mmap.PAGESIZE
        self.nbytes = nbytes
        self.length = max(1, -(-nbytes // unit)) * unit
        # A huge page more at each end than needed: room to align, and the range stays an area of its own in smaps.
        try:
            self.area = mmap.mmap(-1, self.length + 2 * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise Refused(does_not_fit(name, nbytes, str(error))) from error
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.area))
        self.start = HUGE_PAGE_BYTES - address % HUGE_PAGE_BYTES
        self.reason: str | None = None
        self._backing_s = self._stood_s = self._provided_s = 0.0
        self._writers: set[int] = set()  # threads that had to have pages backed
        self.address = address + self.start
        self._madvise = madvise()
        self._changed = threading.Condition()
        self._workers: list[threading.Thread] = []
        self._units = bytearray(-(-self.length // UNIT_BYTES))  # of each: NOT_BEGUN, BEGUN, DONE
        self._next_unit = self._frontier = 0  # in order: the first that may not be begun, the first that is not done
        self._pace = _Pace(SLOW_HUGE_PAGE_S)
        self._is_taken_over = self._stop = False
        self._wants_huge = huge_pages
        self._untried: int | None = None  # the huge page that is to tell how long one takes, until it has
        self._ask_for_huge(huge_pages)

    def back(self, threads: int = 1, slow_huge_page_s: float = SLOW_HUGE_PAGE_S) -> None:
        """Starts backing the whole range, in order, with `threads` threads; returns at once.

        Where huge pages take longer than `slow_huge_page_s` each, the rest is backed by small ones. The last page is
        tried first, by one thread: nobody needs it soon, and what others need until it is there comes in small pages.
        """
        assert not self._workers, "backing has begun already"
        self._pace = _Pace(slow_huge_page_s)
        if self._wants_huge and self.length >= 2 * HUGE_PAGE_BYTES:
            self._untried = self.length // HUGE_PAGE_BYTES - 1
            self._ask_for_huge(False, self._untried * HUGE_PAGE_BYTES)
        started_s = time.perf_counter()
        # Making a thread needs the lock on the address space that backing pages holds: all are there before any begins.
        ready = threading.Barrier(threads)

        def work() -> None:
            if ready.wait() == 0:
                self._try_huge()
            with self._changed:  # those that wait for pages have them in small ones meanwhile; these do not
                self._changed.wait_for(lambda: self._untried is None or self._is_taken_over, SLOW_HUGE_PAGE_S)
            while (units := self._next()) is not None:
                self._back_units(units)
            with self._changed:
                self._backing_s = max(self._backing_s, time.perf_counter() - started_s)

        self._workers = [threading.Thread(target=work, name=f"pages-{n}", daemon=True) for n in range(threads)]
        for worker in self._workers:
            worker.start()

    @property
    def waited_s(self) -> float:
        """For how long callers of `wait` stood still, and those of `provide` on average."""
        return self._stood_s + self._provided_s / max(1, len(self._writers))

    @property
    def backing_s(self) -> float:
        """How long backing took: in the background, from the first page to the last, and then in `provide`."""
        return self._backing_s + self._provided_s / max(1, len(self._writers))

    def take_over(self) -> None:
        """The threads of `back` end after the page each is at; callers of `provide` have the rest backed."""
        with self._changed:
            self._is_taken_over = True
            self._changed.notify_all()

    def provide(self, start: int, stop: int) -> None:
        """Have bytes [start, stop) of the range backed by the time this returns, here and now where nobody is at it.

        For use after `take_over`; at once without `back`, and after `stop`.
        """
        first, last = start // UNIT_BYTES, min(-(-stop // UNIT_BYTES), len(self._units))
        if not self._workers or self._is_done(first, last):
            return
        started_s = time.perf_counter()
        self._complete(first, last)
        with self._changed:
            self._provided_s += time.perf_counter() - started_s
            self._writers.add(threading.get_ident())

    def wait(self, nbytes: int | None = None) -> None:
        """Return when the first `nbytes` (all of it: None) are backed, or `stop` was called; at once without `back`."""
        if not self._workers:
            return
        wanted = self.length if nbytes is None else min(nbytes, self.length)
        last, started_s = -(-wanted // UNIT_BYTES), time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._frontier >= last or self._stop or self._is_taken_over)
        if self._frontier < last:
            before_s = time.perf_counter()
            self._complete(0, last)
            self._backing_s += time.perf_counter() - before_s
        self._stood_s += time.perf_counter() - started_s
        if wanted == self.length:
            for worker in self._workers:
                await_end(worker)

    def stop(self) -> None:
        """Stops backing pages; pages that are backed stay."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        for worker in self._workers:
            await_end(worker)

    def join_page(self, offset: int) -> bool:
        """Have the system put a huge page in the place of small ones at `offset`; False if it never will."""
        failed = self._madvise(self.address + offset, HUGE_PAGE_BYTES, MADV_COLLAPSE) != 0
        return not self._stop and not (failed and ctypes.get_errno() == errno.EINVAL)

    def check(self) -> None:
        """Asserts the invariants between calls."""
        with self._changed:
            assert self._is_done(0, self._frontier), "a page counts as backed that is not"
            assert NOT_BEGUN not in self._units[: self._next_unit], "a page was passed over"

    def _try_huge(self) -> None:
        with self._changed:
            if self._untried is None or self._stop:
                return
            units = self._claim(self._untried * UNITS, (self._untried + 1) * UNITS)
        if len(units) == UNITS:
            self._back_units(units)
        with self._changed:
            last, self._untried = self._untried, None
            assert last is not None, "somebody else tried it"
            if self._pace.turns_slow():
                self._give_up_huge()
            elif not self._pace.is_slow:
                self._ask_for_huge(True, last * HUGE_PAGE_BYTES)
            self._changed.notify_all()

    def _complete(self, first: int, last: int) -> None:
        """Back what nobody is at, wait for what others are."""
        while units := self._begin(first, last):
            self._back_units(units)
        with self._changed:
            self._changed.wait_for(lambda: self._stop or self._is_done(first, last))

    def _is_done(self, first: int, last: int) -> bool:
        return self._units.count(DONE, first, last) == last - first

    def _next(self) -> range | None:
        """The next units for a thread of ours: what is not begun of a huge page."""
        with self._changed:
            if self._stop or self._is_taken_over:
                return None
            first = self._units.find(NOT_BEGUN, self._next_unit)
            if first < 0:
                return None
            units = self._claim(first, (first // UNITS + 1) * UNITS)
            self._next_unit = units.stop
            return units

    def _begin(self, first: int, last: int) -> range:
        """The next units for a writer to [first, last): of huge pages one, of small ones what it needs."""
        with self._changed:
            at = -1 if self._stop else self._units.find(NOT_BEGUN, first, last)
            if at < 0:
                return range(0)
            if self._pace.is_slow or self._untried is not None:
                return self._claim(at, last)
            start = at // UNITS * UNITS
            return self._claim(self._units.find(NOT_BEGUN, start), start + UNITS)

    def _claim(self, first: int, last: int) -> range:
        """Units from the first on that nobody is at."""
        stop = first
        while stop < min(last, len(self._units)) and self._units[stop] == NOT_BEGUN:
            self._units[stop] = BEGUN
            stop += 1
        return range(first, stop)

    def _back_units(self, units: range) -> None:
        with self._changed:
            if self._pace.turns_slow():
                self._give_up_huge()
        offset = units.start * UNIT_BYTES
        nbytes = min(len(units) * UNIT_BYTES, self.length - offset)
        is_huge = nbytes == HUGE_PAGE_BYTES and self._untried in (None, units.start // UNITS)
        before_s = time.thread_time()
        self._back(offset, nbytes)
        if is_huge:
            self._pace.took(time.thread_time() - before_s)
        with self._changed:
            self._units[units.start : units.stop] = bytes([DONE]) * len(units)
            while self._frontier < len(self._units) and self._units[self._frontier] == DONE:
                self._frontier += 1
            if self._frontier == len(self._units) and self._pace.is_slow:
                self._ask_for_huge(True)  # the kernel may join small pages when it sees to it
            self._changed.notify_all()

    def _give_up_huge(self) -> None:
        """Switches to small pages, with the reason."""
        self._ask_for_huge(False)
        self.reason = (
            f"the system took {self._pace.slow_page_s * 1e3:.1f} ms to provide a huge page, so small ones are used for "
            "now, and joined in the background"
        )

    def _back(self, offset: int, nbytes: int) -> None:
        if self._madvise(self.address + offset, nbytes, MADV_POPULATE_WRITE) != 0:  # Linux before 5.14
            self._touch(offset, nbytes)

    def _touch(self, offset: int, nbytes: int) -> None:
        """Touches every page by writing its contents back."""
        view = memoryview(self.area)
        for page in range(self.start + offset, self.start + offset + nbytes, mmap.PAGESIZE):
            view[page] = view[page]

    def _ask_for_huge(self, wanted: bool, nbytes: int | None = None) -> None:
        """For the first `nbytes` (all of them: None)."""
        if hasattr(mmap, "MADV_HUGEPAGE"):
            advice = mmap.MADV_HUGEPAGE if wanted else mmap.MADV_NOHUGEPAGE
            self.area.madvise(advice, self.start, self.length if nbytes is None else nbytes)


def join(pages: ref[Pages]) -> None:
    """Put huge pages in the place of small ones, milliseconds each, while somebody holds `pages`; from Linux 6.1 on.

    Meanwhile nothing else of the process gets memory, and who reads what is being joined waits: as long as the process
    computes, this takes a tenth of the time, and where it has nothing else to do, all of it.
    """
    held = pages()
    nbytes = held.nbytes if held is not None else 0
    del held
    share = _Share(JOINING_SHARE)
    for offset in range(0, nbytes - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES):
        held = pages()
        if held is None or not held.join_page(offset):
            return
        del held
        share.rest()


class _Share:
    """A thread that works for no more than a share of the time while other threads of the process compute.

    A low priority would not do: whoever waits for a lock would wait for a thread that nobody lets run.
    """

    def __init__(self, share: float) -> None:
        self._rest_per_work = 1 / share - 1
        self._worked_s = self._woke_s = self._marked_s = self._process_s = self._thread_s = 0.0
        self._mark()

    def rest(self) -> None:
        """Call it after each piece of work: sleeps as long as it has to."""
        now_s = time.perf_counter()
        self._worked_s += now_s - self._woke_s
        if self._worked_s < LEAST_WORK_S:
            self._woke_s = now_s
            return
        others_s = (time.process_time() - self._process_s) - (time.thread_time() - self._thread_s)
        if others_s > BUSY_SHARE * (now_s - self._marked_s):
            self._mark()
            time.sleep(min(LONGEST_REST_S, self._worked_s * self._rest_per_work))
            self._woke_s = time.perf_counter()
        else:
            self._mark()
        self._worked_s = 0.0

    def _mark(self) -> None:
        """Measure from here on what others compute."""
        self._marked_s = self._woke_s = time.perf_counter()
        self._process_s, self._thread_s = time.process_time(), time.thread_time()


class _Pace:
    """How long the last huge pages took, in time of the thread's own: being interrupted does not count.

    Zeroing one takes 0.1 to 0.2 ms. Where the host of a virtual machine has yet to find the memory, each takes
    milliseconds, while small pages may come from memory that is there.
    """

    def __init__(self, slow_s: float) -> None:
        self.slow_s = slow_s
        self.is_slow = False
        self.slow_page_s = 0.0
        self._took_s: list[float] = []

    def took(self, seconds: float) -> None:
        if not self.is_slow:
            self._took_s = [*self._took_s[1 - LAST_PAGES :], seconds]

    def turns_slow(self) -> bool:
        """Whether it became slow since the last call; it stays slow from then on."""
        slow = [seconds for seconds in self._took_s if seconds > self.slow_s]
        if self.is_slow or not slow or (len(slow) < LAST_PAGES and max(slow) <= HOPELESS * self.slow_s):
            return False
        self.is_slow, self.slow_page_s = True, statistics.median_high(slow)
        return True


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to what a tensor of that size takes from a pool."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def reserve(sizes: Iterable[int], name: str = "weights", threads: int | None = None) -> Pages:
    """Memory for tensors of these sizes, from now on backed in the background by `threads` (all cores but one).

    A start that knows its sizes before it has loaded torch wins the time that loading takes. Raises `Refused`.
    """
    pages = Pages(sum(aligned(nbytes) for nbytes in sizes), name)
    pages.back(threads or max(1, len(os.sched_getaffinity(0)) - 1))
    return pages


def madvise() -> Callable[[int, int, int], int]:
    """The system call, for advice that Python's mmap module does not know; releases the interpreter lock."""
    call = ctypes.CDLL(None, use_errno=True).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call


def huge_page_bytes(address: int, nbytes: int) -> tuple[int | None, str | None]:
    """Bytes of a range of this process that huge pages back, from /proc/self/smaps; or None and why it is not known."""
    found = _smaps(address, nbytes)
    return (None, "this system has no /proc/self/smaps") if found is None else (found["AnonHugePages"], None)


def backed_bytes(address: int, nbytes: int) -> int | None:
    """Resident bytes of a memory range of this process; None if the system cannot tell."""
    found = _smaps(address, nbytes)
    return None if found is None else found["Rss"]


def _smaps(address: int, nbytes: int) -> dict[str, int] | None:
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        return None
    totals = {"Rss": 0, "AnonHugePages": 0}
    inside = False
    for line in smaps.read_text().splitlines():
        if not line[0].isupper():  # `7f0000000000-7f0000200000 rw-p ...`: an area; what follows are its figures
            first, _, end = line.partition(" ")[0].partition("-")
            inside = int(first, 16) < address + nbytes and address < int(end, 16)
        elif inside and (name := line.partition(":")[0]) in totals:
            totals[name] += int(line.split()[1]) * 1024
    return {name: min(total, nbytes) for name, total in totals.items()}


def does_not_fit(name: str, nbytes: int, found: str) -> Finding:
    """The finding for memory that is not there."""
    return fatal(
        "does-not-fit",
        f"the pool '{name}' cannot be reserved",
        expected=f"{nbytes} bytes of memory",
        found=found,
        next="run `firstlight plan` for a layout that fits: more ranks, a shorter context or fewer sequences",
    )
