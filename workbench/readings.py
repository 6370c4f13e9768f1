"""Readings as rows: one row a series, one a reading, and sums by the minute, so that a day opens as fast as an hour.

Downsampling is done by the database. The tables lie in a run's `events.sqlite`; `workbench/events.py` writes them.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable, Iterator, Sequence

import msgspec

SCHEMA = """
create table if not exists series (
    id integer primary key, source text not null, device text not null, metric text not null, unit text not null,
    unique (source, device, metric, unit));
create table if not exists readings (
    id integer primary key, series integer not null, time_s real not null, value real, reason text not null,
    step integer, alarm integer not null);
create index if not exists readings_by_series on readings (series, time_s);
create table if not exists minutes (
    series integer not null, minute integer not null, count integer not null, total real not null, low real, high real,
    gaps integer not null, primary key (series, minute)) without rowid;
"""
MINUTE_S = 60.0
FINEST = 4  # buckets a minute from which on sums by the minute are too coarse


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """A measured value, or the reason why there is none; never 0 for "not supported".

    `step` is the engine's step that was computed last when it was read; `alarm` says that somebody should look.
    """

    time_s: float
    source: str
    device: str
    metric: str
    unit: str
    value: float | None = None
    reason: str = ""
    step: int | None = None
    alarm: bool = False

    def __post_init__(self) -> None:
        assert (self.value is None) == bool(self.reason), "a reading has a value or a reason"


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """What is read again and again: one metric of one device, from one source."""

    id: int
    source: str
    device: str
    metric: str
    unit: str


class Bucket(msgspec.Struct, frozen=True, array_like=True):
    """The readings of a stretch of time: `count` with a value, their mean, least and greatest; `gaps` without one."""

    time_s: float
    count: int
    mean: float | None
    low: float | None
    high: float | None
    gaps: int


class Recent(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody who comes late has to know: the last reading of every series, and its last stretch in buckets.

    `buckets`: per series (source, device, metric) the sums of `width_s` seconds each, by number since 1970: (number,
    count, total, gaps). `last_id`: readings behind it are news.
    """

    last_id: int
    latest: tuple[Reading, ...]
    buckets: dict[tuple[str, str, str], list[tuple[int, int, float, int]]]


class ReadingWriter:
    """Adds readings within the transaction of whoever calls it; one a connection."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        rows = connection.execute("select source, device, metric, unit, id from series")
        self._ids: dict[tuple[str, str, str, str], int] = {tuple(row[:4]): row[4] for row in rows}

    def add(self, readings: Iterable[Reading]) -> None:
        """Rows and sums by the minute; each series is summed once a call."""
        rows: list[tuple[object, ...]] = []
        sums: dict[tuple[int, int], list[float]] = {}
        for one in readings:
            series = self._id(one)
            if one.value is not None and not math.isfinite(one.value):  # which a database would keep as nothing at all
                one = msgspec.structs.replace(one, value=None, reason=f"the source said {one.value}")
            rows.append((series, one.time_s, one.value, one.reason, one.step, int(one.alarm)))
            found = sums.setdefault((series, int(one.time_s // MINUTE_S)), [0, 0.0, float("inf"), float("-inf"), 0])
            if one.value is None:
                found[4] += 1
                continue
            found[:4] = found[0] + 1, found[1] + one.value, min(found[2], one.value), max(found[3], one.value)
        self._connection.executemany(
            "insert into readings (series, time_s, value, reason, step, alarm) values (?, ?, ?, ?, ?, ?)", rows
        )
        self._connection.executemany(
            "insert into minutes values (?, ?, ?, ?, ?, ?, ?) on conflict do update set count = count + excluded.count,"
            " total = total + excluded.total, low = min(coalesce(low, excluded.low), coalesce(excluded.low, low)),"
            " high = max(coalesce(high, excluded.high), coalesce(excluded.high, high)), gaps = gaps + excluded.gaps",
            [
                (series, minute, int(count), total, low if count else None, high if count else None, int(gaps))
                for (series, minute), (count, total, low, high, gaps) in sums.items()
            ],
        )

    def _id(self, reading: Reading) -> int:
        key = reading.source, reading.device, reading.metric, reading.unit
        if key not in self._ids:
            self._connection.execute("insert into series (source, device, metric, unit) values (?, ?, ?, ?)", key)
            self._ids[key] = self._connection.execute("select last_insert_rowid()").fetchone()[0]
        return self._ids[key]

    def forget(self) -> None:
        """After a transaction that was rolled back: series it made are not there."""
        rows = self._connection.execute("select source, device, metric, unit, id from series")
        self._ids = {tuple(row[:4]): row[4] for row in rows}


_READING = "r.time_s, s.source, s.device, s.metric, s.unit, r.value, r.reason, r.step, r.alarm"


def _reading(row: Sequence[object]) -> Reading:
    names = ("time_s", "source", "device", "metric", "unit", "value", "reason", "step")
    found = dict(zip(names, row[:8], strict=True))
    if (found["value"] is None) == (not found["reason"]):
        raise ValueError("a reading that has neither a value nor a reason, or both")
    return msgspec.convert({**found, "alarm": bool(row[8])}, Reading)


def all_readings(connection: sqlite3.Connection, after: int) -> Iterator[tuple[int, Reading]]:
    """Readings with their ids, those after `after`, in the order of writing."""
    query = f"select r.id, {_READING} from readings r join series s on s.id = r.series where r.id > ? order by r.id"
    for identifier, *row in connection.execute(query, (after,)):
        yield identifier, _reading(row)


def all_series(connection: sqlite3.Connection) -> list[Series]:
    """Every series, in the order of appearance."""
    rows = connection.execute("select id, source, device, metric, unit from series order by id")
    return [Series(id=row[0], source=row[1], device=row[2], metric=row[3], unit=row[4]) for row in rows]


def latest(connection: sqlite3.Connection) -> list[Reading]:
    """The last reading of every series."""
    query = (
        f"select {_READING} from series s join readings r on r.id ="
        " (select id from readings where series = s.id order by time_s desc limit 1) order by s.id"
    )
    return [_reading(row) for row in connection.execute(query)]


def recent(connection: sqlite3.Connection, span_s: float, width_s: float) -> Recent:
    """The state of every series, as of one moment, with the last `span_s` before the newest reading."""
    connection.execute("begin")
    try:
        last_id = connection.execute("select max(id) from readings").fetchone()[0] or 0
        found = tuple(latest(connection))
        newest_s = max((one.time_s for one in found), default=0.0)
        query = (
            "select s.source, s.device, s.metric, cast(r.time_s / ? as integer) as number, count(r.value),"
            " total(r.value), sum(r.value is null) from series s join readings r on r.series = s.id"
            " where r.time_s >= ? group by s.id, number order by s.id, number"
        )
        buckets: dict[tuple[str, str, str], list[tuple[int, int, float, int]]] = {}
        since_s = width_s * ((newest_s - span_s) // width_s)  # whole stretches alone
        for source, device, metric, *row in connection.execute(query, (width_s, since_s)):
            buckets.setdefault((source, device, metric), []).append(tuple(row))
    finally:
        connection.execute("rollback")
    return Recent(last_id=last_id, latest=found, buckets=buckets)


def span(connection: sqlite3.Connection) -> tuple[float, float] | None:
    """(first, last) minute that has readings, as times; None without readings."""
    low, high = connection.execute("select min(minute), max(minute) from minutes").fetchone()
    return None if low is None else (low * MINUTE_S, (high + 1) * MINUTE_S)


def history(
    connection: sqlite3.Connection, series: Sequence[int], since_s: float, until_s: float, points: int
) -> dict[int, list[Bucket]]:
    """At most `points` buckets of each series between two times; a long stretch is read from the sums by the minute."""
    width_s = max((until_s - since_s) / max(1, points), 1e-3)
    found: dict[int, list[Bucket]] = {one: [] for one in series}
    marks = ",".join("?" * len(series))
    if width_s >= MINUTE_S / FINEST:
        width_s = max(MINUTE_S, width_s)
        query = (
            f"select series, cast((minute * 60.0 - ?) / ? as integer) as bucket, sum(count), sum(total), min(low),"
            f" max(high), sum(gaps) from minutes where series in ({marks}) and minute between ? and ?"
            " group by series, bucket order by series, bucket"
        )
        bounds: tuple[float, ...] = (since_s // MINUTE_S, until_s // MINUTE_S)
    else:
        query = (
            f"select series, cast((time_s - ?) / ? as integer) as bucket, count(value), sum(value), min(value),"
            f" max(value), sum(value is null) from readings where series in ({marks}) and time_s between ? and ?"
            " group by series, bucket order by series, bucket"
        )
        bounds = (since_s, until_s)
    for one, bucket, count, total, low, high, gaps in connection.execute(query, (since_s, width_s, *series, *bounds)):
        mean = total / count if count else None
        found[one].append(Bucket(since_s + (bucket + 0.5) * width_s, count, mean, low, high, gaps))
    return found
