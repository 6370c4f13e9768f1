"""Which way of reading is the better one on this machine, for these files: tried on the load itself, then kept to."""

from __future__ import annotations

import threading
from typing import Literal

PHASES: tuple[tuple[Literal["buffered", "direct"], int, bool], ...] = (
    ("buffered", 16 << 20, False),
    ("buffered", 32 << 20, True),
    ("direct", 32 << 20, False),
    ("direct", 32 << 20, True),
)  # bytes read in either way before one is chosen, and whether they count
CLEARLY_FASTER = 1.1  # what past the cache must be to be worth that the next start finds nothing in it
TURN_BYTES = 16 << 20  # copied in each way before one is chosen


class Trial:
    """Which way of reading what the page cache lacks is faster here, measured on the load itself.

    The first cold bytes go through the cache, then as many past it, each by all readers together; then the faster way
    is kept to. What each costs at first (memory, a descriptor for each file, pages that were asked for ahead by the
    other way) is not counted. Loads with little to read go through the cache, which then serves the next one. Bytes are
    those delivered, whatever the disk gave for them.
    """

    def __init__(self) -> None:
        self.verdict = ""
        self._phase = 0
        self._rates: list[float] = []
        self._lock = threading.Lock()
        self._chosen: Literal["buffered", "direct"] | None = None
        self._bytes = 0
        self._began_s: float | None = None

    def method(self) -> Literal["buffered", "direct"]:
        return self._chosen or PHASES[self._phase][0]

    def took(self, method: str, nbytes: int, started_s: float, ended_s: float) -> None:
        """A read that was begun in the phase that is being measured counts; others belong to the one before."""
        with self._lock:
            if self._chosen is not None:
                return
            if self._began_s is None:
                self._began_s = started_s
            wanted, phase_bytes, counts = PHASES[self._phase]
            if method != wanted or started_s < self._began_s:
                return
            self._bytes += nbytes
            if self._bytes < phase_bytes:
                return
            if counts:
                self._rates.append(self._bytes / (ended_s - self._began_s))
            self._bytes, self._began_s = 0, ended_s
            if self._phase + 1 == len(PHASES):
                self._choose()
            else:
                self._phase += 1

    def _choose(self) -> None:
        buffered, direct = self._rates
        words = "past" if direct > CLEARLY_FASTER * buffered else "through"
        rates = f"buffered {buffered / 1e9:.2f}, O_DIRECT {direct / 1e9:.2f} GB/s on this load"
        self.verdict = f"cold files are read {words} the page cache: {rates}"
        self._chosen = "direct" if words == "past" else "buffered"


class Cheaper:
    """Which of several ways of copying takes less of the processor's time a byte.

    Out of the page cache that is either reading or mapping: mapping is a third cheaper where the cache holds a file in
    large pieces, as it does what was written or read in order, and twice as dear where it holds single pages.
    """

    def __init__(self, *ways: str) -> None:
        self._ways = ways
        self._seconds = dict.fromkeys(ways, 0.0)
        self._bytes = dict.fromkeys(ways, 0)
        self._lock = threading.Lock()
        self._chosen: str | None = None

    def way(self) -> str:
        """The one to go now: that of which least is known, until one is chosen."""
        return self._chosen or min(self._ways, key=self._bytes.__getitem__)

    def took(self, way: str, nbytes: int, seconds: float) -> None:
        """`seconds` of the thread's own time."""
        if self._chosen is not None:
            return
        with self._lock:
            self._bytes[way] += nbytes
            self._seconds[way] += seconds
            if min(self._bytes.values()) >= TURN_BYTES:
                self._chosen = min(self._ways, key=lambda one: self._seconds[one] / self._bytes[one])
