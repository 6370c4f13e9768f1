"""What happens while a run goes on, in one SQLite file: progress, readings, requests. One writer, any readers."""

from __future__ import annotations

import contextlib
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from firstlight.workbench import readings
from firstlight.workbench.courtesy import step_back
from firstlight.workbench.readings import Bucket, Reading, Recent, Series

Result = TypeVar("Result")

BATCH_PERIOD_S = 0.05  # so short that readings at 10 Hz come one by one
UNWATCHED_PERIOD_S = 0.4  # while nobody looks; whoever comes sees what is younger than half a second
WATCHED = ".watched"  # beside the file, touched again and again by whoever looks
WATCHED_S = 15.0
PAST_S = 600.0  # a file that was not written for so long is that of a run that is over
BUSY_TIMEOUT_S = 10.0
MOST_IN_A_BATCH = 10_000
HELD = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)  # by somebody else, for now

SCHEMA = """
create table if not exists progress (
    id integer primary key, time_s real not null, rung text not null, phase text not null,
    done real not null, total real, unit text not null, detail text not null);
create table if not exists requests (
    id integer primary key, time_s real not null, name text not null, rung text not null, status text not null,
    prompt_tokens integer, completion_tokens integer, first_token_s real, total_s real, record text not null);
"""


class ProgressEvent(msgspec.Struct, frozen=True, kw_only=True):
    """How far a phase of a rung is: `done` of `total` (None: not known) in `unit`."""

    time_s: float
    rung: str
    phase: str
    done: float
    total: float | None = None
    unit: str = ""
    detail: str = ""


SERVED = "serve"  # in the place of the rung: the engine itself told of this request


class RequestEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One request as it ended; `record` holds what else is known (prompt, picture records, seed), as JSON."""

    time_s: float
    name: str
    rung: str
    status: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    first_token_s: float | None = None
    total_s: float | None = None
    record: str = "{}"


Event = ProgressEvent | Reading | RequestEvent
TABLES: dict[type[ProgressEvent | RequestEvent], str] = {ProgressEvent: "progress", RequestEvent: "requests"}


class EventWriter:
    """Writes events from a thread of its own, many in one transaction, so that the work never waits for the disk.

    A disk that refuses (full, read-only) does not stop the work: events are lost until it takes them again, `lost`
    counts them, `problem` says why as long as that lasts (`last_problem`: and behind it), and the count is written as
    an alarm as soon as it can be. A file that somebody else holds is waited for: its events are written with the next.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.problem: str | None = None
        self.last_problem: str | None = None
        self.lost = 0
        self._kept: list[Event] = []  # of a file that was held
        self._told = 0  # of the lost ones
        self._file: _File | None = None
        self._events: queue.SimpleQueue[Event | threading.Event | None] = queue.SimpleQueue()
        self._hurry = threading.Event()  # somebody waits for what was handed over so far
        self._thread = threading.Thread(target=self._work, name="events", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Hands over an event; returns at once."""
        self._events.put(event)

    def flush(self, timeout_s: float = BUSY_TIMEOUT_S) -> bool:
        """Waits until everything handed over so far is on disk; False when that took too long or failed."""
        written = threading.Event()
        self._hurry.set()
        self._events.put(written)
        return written.wait(timeout_s) and self.problem is None

    def close(self) -> None:
        """Writes what is left and ends the thread. `lost` and `problem` say what did not get onto the disk."""
        if self._thread.is_alive():
            self._hurry.set()
            self._events.put(None)
            self._thread.join(BUSY_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        step_back()
        goes_on = True
        while goes_on:
            batch, waiting, goes_on = self._next_batch()
            self._write([*self._kept, *batch], may_wait=goes_on)
            for flag in waiting:
                flag.set()
        if self._file is not None:
            self._file.close()

    def _write(self, batch: list[Event], may_wait: bool = True) -> None:
        try:
            self._file = self._file or _File(self.path)
            late = [_loss(self.lost)] if self.lost > self._told else []
            self._file.add([*batch, *late])
            self.problem, self._told, self._kept = None, self.lost, []
        except (sqlite3.Error, OverflowError) as error:  # numbers that no column holds are one
            self.problem = self.last_problem = str(error)
            is_held = getattr(error, "sqlite_errorcode", None) in HELD
            self._kept = batch if may_wait and is_held and len(batch) <= MOST_IN_A_BATCH else []
            self.lost += 0 if self._kept else len(batch)

    def _next_batch(self) -> tuple[list[Event], list[threading.Event], bool]:
        """Waits for an event and lets more come for a while, asleep: a thread that woke up for each would cost more.

        A flush or the end cuts it short.
        """
        batch: list[Event] = []
        item = self._events.get()
        while True:
            if item is None:
                return batch, [], False
            if isinstance(item, threading.Event):
                if self._events.empty():
                    self._hurry.clear()
                return batch, [item], True
            if not batch:
                self._hurry.wait(self._period_s())
            batch.append(item)
            if len(batch) == MOST_IN_A_BATCH or self._events.empty():
                return batch, [], True
            item = self._events.get()

    def _period_s(self) -> float:
        """How long events gather: a moment if somebody looks, else so long that writing costs the engine little."""
        try:
            seen_s = (self.path.parent / WATCHED).stat().st_mtime
        except OSError:
            return UNWATCHED_PERIOD_S
        return BATCH_PERIOD_S if abs(time.time() - seen_s) < WATCHED_S else UNWATCHED_PERIOD_S


class _File:
    """The open database, as the writing thread has it."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, check_same_thread=False)
        self._connection.execute("pragma journal_mode = wal")
        self._connection.execute("pragma synchronous = normal")
        self._connection.executescript(SCHEMA + readings.SCHEMA)
        self._readings = readings.ReadingWriter(self._connection)

    def add(self, events: Sequence[Event]) -> None:
        """All of them or, when the disk refuses (`sqlite3.Error`), none."""
        try:
            with self._connection:
                self._readings.add(event for event in events if isinstance(event, Reading))
                for event in events:
                    if not isinstance(event, Reading):
                        _insert(self._connection, event)
        except (sqlite3.Error, OverflowError):
            self._readings.forget()
            raise

    def close(self) -> None:
        """Moves what is in the log into the file itself, also while others read: it may be copied from then on."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute("pragma wal_checkpoint(passive)")
        self._connection.close()


def _loss(count: int) -> Reading:
    return Reading(
        time_s=time.time(), source="events", device="run", metric="lost", unit="events", value=count, alarm=True
    )


class EventReader:
    """Follows an event file while it is written; `path` need not exist yet.

    `keep`: the file stays open between questions, and `has_news` tells cheaply whether it is worth asking.
    `patience_s`: how long one waits for somebody who holds the file. Raises `sqlite3.Error` for what is no such file,
    and `ValueError` for rows that hold something else.
    """

    def __init__(self, path: str | os.PathLike[str], keep: bool = False, patience_s: float = BUSY_TIMEOUT_S) -> None:
        self.path = Path(path)
        self._keep = keep
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._open: tuple[sqlite3.Connection, int] | None = None  # with the file's number
        self._watched_s = float("-inf")
        self._version = -1

    def has_news(self) -> bool:
        """Whether somebody wrote since this was asked last; True the first time there is something."""

        def is_new(connection: sqlite3.Connection) -> bool:
            before, self._version = self._version, connection.execute("pragma data_version").fetchone()[0]
            return before != self._version

        return self._ask(is_new, False)

    def watch(self) -> None:
        """Tells whoever writes that somebody looks; to be called again and again. What is over is left as it is."""
        if time.monotonic() - self._watched_s < WATCHED_S / 3:
            return
        self._watched_s = time.monotonic()
        log = self.path.with_name(self.path.name + "-wal")
        with contextlib.suppress(OSError):  # nothing was written yet, or this folder is not ours to write in
            if time.time() - log.stat().st_mtime > PAST_S:
                return
            mark = os.open(self.path.parent / WATCHED, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
            os.utime(mark)
            os.close(mark)

    def close(self) -> None:
        """Lets go of a file that was kept open."""
        with self._lock:
            self._let_go()

    def progress(self, after: int = 0) -> Iterator[tuple[int, ProgressEvent]]:
        """Progress events with their ids, those after `after`."""
        return self._rows(ProgressEvent, after)

    def requests(self, after: int = 0) -> Iterator[tuple[int, RequestEvent]]:
        return self._rows(RequestEvent, after)

    def readings(self, after: int = 0) -> Iterator[tuple[int, Reading]]:
        nothing: list[tuple[int, Reading]] = []
        return iter(self._ask(lambda connection: list(readings.all_readings(connection, after)), nothing))

    def recent(self, span_s: float, width_s: float) -> Recent:
        """The state of every series and its last stretch, for whoever begins to follow."""
        nothing = Recent(last_id=0, latest=(), buckets={})
        return self._ask(lambda connection: readings.recent(connection, span_s, width_s), nothing)

    def series(self) -> list[Series]:
        """Everything that has readings."""
        return self._ask(readings.all_series, [])

    def latest(self) -> list[Reading]:
        """The last reading of every series."""
        return self._ask(readings.latest, [])

    def span(self) -> tuple[float, float] | None:
        """The times between which there are readings, to the minute."""
        return self._ask(readings.span, None)

    def history(self, series: Sequence[int], since_s: float, until_s: float, points: int) -> dict[int, list[Bucket]]:
        """At most `points` buckets of each series (by id), downsampled by the database."""
        return self._ask(lambda connection: readings.history(connection, series, since_s, until_s, points), {})

    def _rows(self, kind: type[Any], after: int) -> Iterator[tuple[int, Any]]:
        names = kind.__struct_fields__
        query = f"select id, {', '.join(names)} from {TABLES[kind]} where id > ? order by id"
        nothing: list[Any] = []
        for identifier, *values in self._ask(
            lambda connection: connection.execute(query, (after,)).fetchall(), nothing
        ):
            yield identifier, msgspec.convert(dict(zip(names, values, strict=True)), kind)

    def _ask(self, question: Callable[[sqlite3.Connection], Result], nothing: Result) -> Result:
        """The answer of the file as it is now; `nothing` before the writer has got that far."""
        with self._lock:
            connection = self._connection()
            if connection is None:
                return nothing
            try:
                return question(connection)
            except sqlite3.OperationalError as error:
                self._let_go()
                if "no such table" not in str(error):
                    raise
                return nothing
            finally:
                if not self._keep:
                    self._let_go()

    def _connection(self) -> sqlite3.Connection | None:
        """A connection to the file that bears the name now; None while there is no file."""
        try:
            number = self.path.stat().st_ino
        except FileNotFoundError:
            self._let_go()
            return None
        if self._open is None or self._open[1] != number:
            self._let_go()
            address = f"{self.path.resolve().as_uri()}?mode=ro"
            self._version = -1
            connection = sqlite3.connect(
                address, uri=True, timeout=self._patience_s, check_same_thread=False, isolation_level=None
            )
            self._open = connection, number
        return self._open[0]

    def _let_go(self) -> None:
        if self._open is not None:
            self._open[0].close()
            self._open = None


def _insert(connection: sqlite3.Connection, event: ProgressEvent | RequestEvent) -> None:
    names = event.__struct_fields__
    marks = ", ".join("?" * len(names))
    connection.execute(
        f"insert into {TABLES[type(event)]} ({', '.join(names)}) values ({marks})",
        [getattr(event, name) for name in names],
    )
