"""What happens while a run goes on, in one SQLite file: progress, readings, requests. One writer, any readers."""

from __future__ import annotations

import os
import queue
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal

BATCH_PERIOD_S = 0.1
BUSY_TIMEOUT_S = 10.0
MOST_IN_A_BATCH = 1000

SCHEMA = """
create table if not exists progress (
    id integer primary key, time_s real not null, rung text not null, phase text not null,
    done real not null, total real, unit text not null, detail text not null);
create table if not exists readings (
    id integer primary key, time_s real not null, source text not null, device text not null, metric text not null,
    unit text not null, value real, reason text not null);
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


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """A measured value, or the reason why there is none; never 0 for "not supported"."""

    time_s: float
    source: str
    device: str
    metric: str
    unit: str
    value: float | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        assert (self.value is None) == bool(self.reason), "a reading has a value or a reason"


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
TABLES: dict[type[Event], str] = {ProgressEvent: "progress", Reading: "readings", RequestEvent: "requests"}


class EventWriter:
    """Writes events from a thread of its own, many in one transaction, so that the work never waits for the disk.

    A disk that refuses (full, read-only) does not stop the work: `problem` says so and `close` raises `Refused`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.problem: str | None = None
        self._events: queue.SimpleQueue[Event | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="events", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Hands over an event; returns at once."""
        self._events.put(event)

    def flush(self, timeout_s: float = BUSY_TIMEOUT_S) -> bool:
        """Waits until everything handed over so far is on disk; False when that took too long or failed."""
        written = threading.Event()
        self._events.put(written)
        return written.wait(timeout_s) and self.problem is None

    def close(self) -> None:
        """Writes what is left and ends the thread."""
        if self._thread.is_alive():
            self._events.put(None)
            self._thread.join(BUSY_TIMEOUT_S)
        if self.problem is not None:
            raise Refused(
                fatal(
                    "not-available",
                    f"events were not written: {self.problem}",
                    file=str(self.path),
                    next="free the disk or use another --run directory",
                )
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self) -> None:
        waiting: list[threading.Event] = []
        try:
            connection = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S)
            connection.execute("pragma journal_mode = wal")
            connection.execute("pragma synchronous = normal")
            connection.executescript(SCHEMA)
            goes_on = True
            while goes_on:
                batch, waiting, goes_on = self._next_batch()
                with connection:
                    for event in batch:
                        _insert(connection, event)
                for flag in waiting:
                    flag.set()
            connection.close()
        except sqlite3.Error as error:
            self.problem = str(error)
            for flag in waiting:
                flag.set()
            self._discard()

    def _next_batch(self) -> tuple[list[Event], list[threading.Event], bool]:
        """Waits for an event, then takes what comes within the period; a flush or the end cuts it short."""
        batch: list[Event] = []
        until_s: float | None = None
        while len(batch) < MOST_IN_A_BATCH:
            try:
                wait_s = None if until_s is None else max(0.0, until_s - time.monotonic())
                item = self._events.get(timeout=wait_s)
            except queue.Empty:
                return batch, [], True
            if item is None:
                return batch, [], False
            if isinstance(item, threading.Event):
                return batch, [item], True
            batch.append(item)
            until_s = until_s or time.monotonic() + BATCH_PERIOD_S
        return batch, [], True

    def _discard(self) -> None:
        """After a failure: keep taking events, so that nobody who flushes waits for ever."""
        while (item := self._events.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()


class EventReader:
    """Follows an event file while it is written; `path` need not exist yet."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def progress(self, after: int = 0) -> Iterator[tuple[int, ProgressEvent]]:
        """Progress events with their ids, those after `after`."""
        return self._rows(ProgressEvent, after)

    def readings(self, after: int = 0) -> Iterator[tuple[int, Reading]]:
        return self._rows(Reading, after)

    def requests(self, after: int = 0) -> Iterator[tuple[int, RequestEvent]]:
        return self._rows(RequestEvent, after)

    def _rows(self, kind: type[Any], after: int) -> Iterator[tuple[int, Any]]:
        if not self.path.exists():
            return
        names = kind.__struct_fields__
        connection = sqlite3.connect(f"{self.path.resolve().as_uri()}?mode=ro", uri=True, timeout=BUSY_TIMEOUT_S)
        try:
            query = f"select id, {', '.join(names)} from {TABLES[kind]} where id > ? order by id"
            rows = connection.execute(query, (after,)).fetchall()
        except sqlite3.OperationalError as error:
            if "no such table" not in str(error):  # the writer has not got that far
                raise
            rows = []
        finally:
            connection.close()
        for identifier, *values in rows:
            yield identifier, kind(**dict(zip(names, values, strict=True)))


def _insert(connection: sqlite3.Connection, event: Event) -> None:
    names = event.__struct_fields__
    marks = ", ".join("?" * len(names))
    connection.execute(
        f"insert into {TABLES[type(event)]} ({', '.join(names)}) values ({marks})",
        [getattr(event, name) for name in names],
    )
