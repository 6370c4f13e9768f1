"""Chooses the faster of two ways of reading by trying both on the load itself."""

from __future__ import annotations

import threading
import time
from typing import Literal

PHASES: tuple[tuple[Literal["buffered", "direct"], int, bool], ...] = (
    ("buffered", 8 << 20, False),
    ("buffered", 24 << 20, True),
    ("direct", 16 << 20, False),
    ("direct", 32 << 20, True),
)  # of a round: bytes read in either way, and whether they count
ROUNDS = (1, 4, 8)  # of how many times as many bytes that count
CLOSE = 2  # times as fast as the other: what a round of few bytes cannot tell from chance
CLEARLY_FASTER = 1.1  # what past the cache must be to be worth that the next start finds nothing in it
TURN_BYTES = 2 << 20  # copied in each way before one is chosen
BYTES_A_S, REQUESTS_A_S = 1e9, 5e4  # what a disk is taken for, and for how long, before it is measured
GUESS_S = 0.01


class Trial:
    """Which way of reading what the page cache lacks is faster here, measured on the load itself.

    The first cold bytes go through the cache, then as many past it, each by all readers together; then the faster way
    is kept to, or, where both are about as fast, a longer round tells. What each costs at first (memory, a descriptor
    for each file, pages that were asked for ahead by the other way) is not counted. Loads with little to read go
    through the cache, which then serves the next one. Bytes are those asked for, with what lies between shares of rows
    and is read with them.
    """

    def __init__(self) -> None:
        self.verdict = ""
        self._round = self._phase = 0
        self._rates: list[float] = []  # of this round
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
            if self._bytes < phase_bytes * (ROUNDS[self._round] if counts else 1):
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
        if self._round + 1 < len(ROUNDS) and 1 / CLOSE < direct / buffered < CLOSE:
            self._round, self._phase, self._rates = self._round + 1, 0, []
            return
        words = "past" if direct > CLEARLY_FASTER * buffered else "through"
        rates = f"buffered {buffered / 1e9:.2f}, O_DIRECT {direct / 1e9:.2f} GB/s on this load"
        self.verdict = f"cold files are read {words} the page cache: {rates}"
        self._chosen = "direct" if words == "past" else "buffered"


class Pipe:
    """What is under way of one kind, and how much of it a second brings while any of it is."""

    def __init__(self, rate: float) -> None:
        """`rate`: a guess, until more is known."""
        self.under_way = 0
        self._done, self._busy_s, self._since_s = rate * GUESS_S, GUESS_S, 0.0

    def begin(self, amount: int, now_s: float) -> None:
        if not self.under_way:
            self._since_s = now_s
        self.under_way += amount

    def end(self, amount: int, now_s: float) -> None:
        self.under_way -= amount
        self._done += amount
        self._busy_s, self._since_s = self._busy_s + now_s - self._since_s, now_s

    @property
    def rate(self) -> float:
        return self._done / self._busy_s

    @property
    def is_measured(self) -> bool:
        return self._busy_s > 2 * GUESS_S


class Gaps:
    """Whether shares of rows are read with what lies between them, or in a request for each.

    A gap is worth a request where it takes longer to be read: what a disk gives in a second, by the requests it answers
    in one, both as measured on the load itself. Rows of one kind all go one way: small requests among large ones hold
    those up and take longer themselves.
    """

    def __init__(self) -> None:
        self.bytes = {"buffered": Pipe(BYTES_A_S), "direct": Pipe(BYTES_A_S)}
        self.requests = Pipe(REQUESTS_A_S)
        self._lock = threading.Lock()

    def begin(self, method: str, asked_bytes: int) -> float:
        """Bytes are being read: when that began."""
        with self._lock:
            now_s = time.perf_counter()
            self.bytes[method].begin(asked_bytes, now_s)
            return now_s

    def end(self, method: str, asked_bytes: int) -> float:
        with self._lock:
            now_s = time.perf_counter()
            self.bytes[method].end(asked_bytes, now_s)
            return now_s

    def begin_rows(self, rows: int) -> None:
        """So many requests are being made, one a row."""
        with self._lock:
            self.requests.begin(rows, time.perf_counter())

    def end_rows(self, rows: int) -> None:
        with self._lock:
            self.requests.end(rows, time.perf_counter())

    def is_together(self, method: str, span_bytes: int, stride_bytes: int, is_settled: bool = True) -> bool:
        """Whether rows are to be read with what is between them. `is_settled`: `method` is not on trial."""
        with self._lock:
            worth = BYTES_A_S / REQUESTS_A_S  # by a guess: what is measured on one trial must not bear on another
            if is_settled:
                worth = self.bytes[method].rate / self.requests.rate
            return stride_bytes - span_bytes <= worth

    @property
    def verdict(self) -> str:
        """What a request was found to cost; empty before it is known."""
        known = [pipe for pipe in self.bytes.values() if pipe.is_measured]
        if not known or not self.requests.is_measured:
            return ""
        rate = max(pipe.rate for pipe in known)
        return (
            f"of shares of rows a request takes as long as {rate / self.requests.rate / 1e3:.0f} KB between them "
            f"({self.requests.rate:,.0f} requests a second, or {rate / 1e9:.2f} GB/s)"
        )


class Cheaper:
    """Which of several ways of copying takes less of the processor's time a byte.

    Shares of rows out of the page cache: short ones that are near each other are cheaper with what lies between them,
    others by a read for each. Ranges that lie otherwise in memory than in their file: some processors copy them in half
    the time by way of memory where they lie alike, others in two thirds of it at once.
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
