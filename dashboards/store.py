"""What the pages show, read from run directories and live engines: one store a server, any number of pages.

A `Follower` reads one run again and again while somebody looks at it; `Snapshot` is what it has found, as frozen data
with a version that grows with every change. Views compare versions and draw; they read nothing themselves. No panel.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from firstlight.dashboards.trails import SPAN_S, WIDTH_S, Gatherer, SeriesKey, Trail
from firstlight.engine.errors import FirstlightError, Refused
from firstlight.engine.findings import fatal, is_text
from firstlight.engine.serving.api import EngineInfo, Health
from firstlight.engine.serving.client import EngineClient
from firstlight.engine.serving.host import Host
from firstlight.workbench.bringup import ENGINE_FOLDER
from firstlight.workbench.events import SERVED, EventReader, ProgressEvent, RequestEvent
from firstlight.workbench.progress import Pace
from firstlight.workbench.readings import Bucket, Reading, Series
from firstlight.workbench.report import Report, refusal
from firstlight.workbench.runs import Run, RunRecord, own_file
from firstlight.workbench.telemetry.sampler import Sampler

Answer = TypeVar("Answer")

EVENTS = "events.sqlite"
POLL_S = 0.04  # asking whether there is news costs next to nothing
LEAST_S = 0.08  # between two looks at a run that has news: nobody reads faster
HEALTH_S = 0.5
KEPT_REQUESTS = 200
IDLE_S = 30.0  # after which a run that nobody looks at is read no more
SAME_S = 60.0  # within this, a number and a length are one request: engines count from 1 again
AGAIN_S = 2.0  # until what could not be read is tried anew
PATIENCE_S = 0.2  # with a file that somebody holds: all runs wait for one
UNREADABLE = (
    FirstlightError, OSError, sqlite3.Error, ValueError, TypeError, LookupError, AttributeError, ArithmeticError,
    AssertionError, RecursionError,
)  # fmt: skip
"""What reading and drawing a run raises whose files hold something else than this version writes."""
SILENT_S = 5.0  # without a reading of a live engine: whoever took readings is gone, and the store takes them


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A run as it is now. `version` grows with each change; the other numbers say which part changed last.

    `problem` says what of its events cannot be read, and why.
    """

    directory: str
    record: RunRecord
    version: int = 0
    reports_version: int = 0
    readings_version: int = 0
    reports: tuple[Report, ...] = ()
    progress: Mapping[tuple[str, str], Pace] = {}
    trails: Mapping[SeriesKey, Trail] = {}
    requests: tuple[RequestEvent, ...] = ()
    health: Health | None = None
    info: EngineInfo | None = None
    problem: str = ""

    def latest(self, verb: str) -> Report | None:
        """The last report of a verb."""
        return next((report for report in reversed(self.reports) if report.verb == verb), None)

    def figures(self, verb: str) -> Report | None:
        """The last report of a verb, if it holds any: one that was refused holds the reason alone."""
        report = self.latest(verb)
        return report if report is not None and (report.metrics or report.tables or report.checks) else None

    @property
    def has_engine(self) -> bool:
        """Whether an engine answers now."""
        return self.health is not None and self.health.status in ("ready", "draining")

    @property
    def alarms(self) -> tuple[Reading, ...]:
        return tuple(trail.last for trail in self.trails.values() if trail.last.alarm)


class Follower:
    """Reads one run. `snapshot` is replaced, never changed, so any thread may read it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        run = Run.attach(directory)
        self.snapshot = Snapshot(directory=str(directory), record=run.record)
        self._reader = EventReader(directory / EVENTS, keep=True, patience_s=PATIENCE_S)
        self._record_time: tuple[int, int] = (0, 0)
        self._seen = {"progress": 0, "requests": 0, "readings": 0}
        self._progress: dict[tuple[str, str], Pace] = {}
        self._gatherers: dict[SeriesKey, Gatherer] = {}
        self._trails: dict[SeriesKey, Trail] = {}
        self._listeners: list[Callable[[], None]] = []
        self._polled_s = self._again_s = 0.0
        self._requests: deque[RequestEvent] = deque(maxlen=KEPT_REQUESTS)
        self._host: Host | None = None
        self._sampler: Sampler | None = None
        self._looked_s = 0.0
        self.wanted_s = time.monotonic()
        self._lock = threading.Lock()

    def client(self) -> EngineClient | None:
        """The engine of the run, while it answers."""
        host = self._host
        return host.client() if host is not None and self.snapshot.has_engine else None

    def listen(self, listener: Callable[[], None]) -> None:
        """Has `listener` called, from another thread, after every change; it must return at once."""
        self._listeners.append(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)

    def poll_if_news(self) -> None:
        """Look, if there is anything to see and the last look is long enough ago."""
        self._reader.watch()
        now_s = time.monotonic()
        if now_s < self._again_s or now_s - self._polled_s < LEAST_S:
            return
        if self._time_of_record() != self._record_time or self._has_events():
            self._polled_s = now_s
            self.poll()

    def poll(self) -> None:
        """Look once; called by one thread at a time."""
        with self._lock:
            changes = self._read_reports() if self._read_record() else {}
            problem = self._read_events(changes)
            if problem != self.snapshot.problem:
                changes["problem"] = problem
            self._change(changes)

    def _read_reports(self) -> dict[str, object]:
        """Record and reports as they are now; what was read stays where there is no record any more."""
        try:
            run = Run.attach(self.directory)
        except Refused:
            self._record_time, self._again_s = (0, 0), time.monotonic() + AGAIN_S
            return {}
        changes = {"record": run.record, "reports": reports_of(run)}
        if run.record.created != self.snapshot.record.created:
            changes |= self._begin_anew()
        return changes | {"reports_version": self.snapshot.reports_version + 1}

    def _read_events(self, changes: dict[str, object]) -> str:
        """Adds what is new of the events to `changes`; the reason why they cannot be read, if so."""
        try:
            own_file(self.directory, EVENTS)
            if self._read_progress():
                changes["progress"] = dict(self._progress)
            if self._read_requests():
                changes["requests"] = tuple(self._requests)
            if self._read_readings():
                changes |= {"trails": dict(self._trails), "readings_version": self.snapshot.readings_version + 1}
        except UNREADABLE as error:
            self._again_s = time.monotonic() + AGAIN_S
            return f"{EVENTS} cannot be read: {error}"
        return ""

    def _has_events(self) -> bool:
        """Whether somebody wrote; True also where that cannot be told, so that a look says why."""
        try:
            own_file(self.directory, EVENTS)
            return self._reader.has_news()
        except UNREADABLE:
            return True

    @property
    def is_due(self) -> bool:
        """Whether the engine was asked long enough ago."""
        return time.monotonic() - self._looked_s >= HEALTH_S

    def look(self) -> None:
        """Ask the engine how it is, which may take as long as its deadline; called by one thread at a time."""
        self._looked_s = time.monotonic()
        changes = self._look_at_engine()
        with self._lock:
            self._change(changes)

    def _change(self, changes: dict[str, object]) -> None:
        if changes:
            changes["version"] = self.snapshot.version + 1
            self.snapshot = msgspec.structs.replace(self.snapshot, **changes)
            for listener in tuple(self._listeners):
                listener()

    def progress(self, rungs: Sequence[str]) -> list[ProgressEvent]:
        """Every event of some rungs, from the file: for a replay."""
        nothing: list[tuple[int, ProgressEvent]] = []
        return [
            event for _, event in self._asked(lambda: list(self._reader.progress()), nothing) if event.rung in rungs
        ]

    def series(self) -> list[Series]:
        return self._asked(self._reader.series, [])

    def span(self) -> tuple[float, float] | None:
        return self._asked(self._reader.span, None)

    def history(self, series: Sequence[int], since_s: float, until_s: float, points: int) -> dict[int, list[Bucket]]:
        """Older readings, downsampled by the database."""
        return self._asked(lambda: self._reader.history(series, since_s, until_s, points), {})

    def _asked(self, question: Callable[[], Answer], nothing: Answer) -> Answer:
        """What the file of events says; nothing where it cannot be read, which `problem` tells."""
        try:
            own_file(self.directory, EVENTS)
            return question()
        except UNREADABLE:
            return nothing

    def close(self) -> None:
        """Reads no more. The engine goes on."""
        with self._lock:
            if self._sampler is not None:
                self._sampler.close()
                self._sampler = None
            if self._host is not None:
                self._host.release()
                self._host = None
            self._reader.close()

    def _begin_anew(self) -> dict[str, object]:
        """Another run has taken the folder's name: nothing of the first is true of it."""
        self._seen = dict.fromkeys(self._seen, 0)
        for kept in (self._progress, self._gatherers, self._trails, self._requests):
            kept.clear()
        if self._host is not None:
            self._host.release()
            self._host = None
        return {"progress": {}, "trails": {}, "requests": (), "health": None, "info": None}

    def _read_record(self) -> bool:
        now = self._time_of_record()
        changed, self._record_time = now != self._record_time, now
        return changed

    def _time_of_record(self) -> tuple[int, int]:
        try:
            stat = (self.directory / "run.json").stat()
        except OSError:
            return self._record_time  # it is being replaced, or the run was removed; what was read stays
        return stat.st_mtime_ns, stat.st_ino

    def _read_progress(self) -> bool:
        changed = False
        for identifier, event in self._reader.progress(self._seen["progress"]):
            self._seen["progress"], changed = identifier, True
            key = event.rung, event.phase
            known = self._progress.get(key)
            begins = known is None or event.done < known.last.done
            self._progress[key] = Pace(event if begins or known is None else known.first, event)
        return changed

    def _read_requests(self) -> bool:
        changed = False
        for identifier, event in self._reader.requests(self._seen["requests"]):
            self._seen["requests"], changed = identifier, True
            self._requests.append(event)
        return changed

    def _read_readings(self) -> bool:
        if not self._trails:
            return self._read_past()
        changed: dict[SeriesKey, Reading] = {}
        for identifier, one in self._reader.readings(self._seen["readings"]):
            self._seen["readings"] = identifier
            key = one.source, one.device, one.metric
            if key not in self._gatherers:
                self._gatherers[key] = Gatherer()
            self._gatherers[key].add(one)
            changed[key] = one
        self._trails.update((key, self._gatherers[key].trail(last)) for key, last in changed.items())
        return bool(changed)

    def _read_past(self) -> bool:
        """The first look: who comes late sees what is seen by who was there."""
        past = self._reader.recent(SPAN_S, WIDTH_S)
        self._seen["readings"] = past.last_id
        for one in past.latest:
            key = one.source, one.device, one.metric
            self._gatherers[key] = Gatherer(past.buckets.get(key, ()))
            self._trails[key] = self._gatherers[key].trail(one)
        return bool(past.latest)

    def _look_at_engine(self) -> dict[str, object]:
        """What changed of its health, and what runs."""
        health, before = self._health(), self.snapshot.health
        changes: dict[str, object] = (
            {} if (health and _told(health)) == (before and _told(before)) else {"health": health}
        )
        if health is not None and health.is_ready and self.snapshot.info is None and self._host is not None:
            with contextlib.suppress(FirstlightError):  # it has just gone; the next look will say so
                changes["info"] = self._host.client().info()
        self._sample_if_nobody_does(health)
        return changes

    def _health(self) -> Health | None:
        folder = self.directory / ENGINE_FOLDER
        if self._host is None:
            try:
                if not own_file(self.directory, f"{ENGINE_FOLDER}/host.json").exists():
                    return None
                self._host = Host(folder)
            except UNREADABLE:
                return None
        try:
            health = self._host.health()
        except UNREADABLE as error:
            return Health(status="failed", stage=str(error))
        if not self._host.is_alive() and health.status in ("starting", "ready", "draining"):
            return Health(status="stopped", stage=health.stage)
        return health

    def _sample_if_nobody_does(self, health: Health | None) -> None:
        """A detached engine has nobody who takes readings: while somebody looks, the store does."""
        if health is None or not health.is_ready:
            if self._sampler is not None:
                self._sampler.close()
                self._sampler = None
            return
        if self._sampler is None and time.time() - self._newest_s() > SILENT_S:
            run = Run.attach(self.directory)
            self._sampler = Sampler(run.events.put, self.client, 1.0, known=self._told_requests()).start()

    def _told_requests(self) -> set[int]:
        """Numbers of this engine's requests that the file has already; those of an engine before it are others."""
        since_s = (self.directory / ENGINE_FOLDER / "host.json").stat().st_mtime
        found = (number_of(event) for event in self._requests if event.rung == SERVED and event.time_s >= since_s)
        return {number for number in found if number is not None}

    def _newest_s(self) -> float:
        return max((trail.last.time_s for trail in self.snapshot.trails.values()), default=0.0)


def _told(health: Health) -> object:
    """What of an engine's health is worth drawing again for."""
    stages = tuple((stage.name, stage.status) for stage in health.stages)
    ranks = tuple((beat.pid, beat.phase or beat.stage) for beat in health.ranks)
    return health.status, health.stage, stages, ranks, health.done, health.running, health.waiting, str(health.failure)


class DataStore:
    """The runs below `root`, and followers of those that somebody looks at."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).resolve()
        self._followers: dict[str, Follower] = {}
        self.left_out: dict[str, str] = {}
        self._records: dict[str, tuple[int, RunRecord]] = {}
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, name="store", daemon=True)
        self._lookers = ThreadPoolExecutor(4, thread_name_prefix="health")
        self._looking: dict[str, Future[None]] = {}

    def start(self) -> DataStore:
        """Begins to follow in the background."""
        self._thread.start()
        return self

    def close(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(10.0)
        with self._lock:
            for follower in self._followers.values():
                follower.close()
            self._followers.clear()
        self._lookers.shutdown(wait=False, cancel_futures=True)

    def runs(self) -> list[tuple[str, RunRecord]]:
        """Names and records of all runs, the latest first; `left_out` says which cannot be read, and why."""
        found: list[tuple[str, RunRecord]] = []
        wrong: dict[str, str] = {}
        for path in self.root.iterdir() if self.root.is_dir() else ():
            try:
                changed = (path / "run.json").lstat().st_mtime_ns
                if not self._is_inside(path):
                    wrong[path.name] = f"it leads out of {self.root.name}, or its name is no text"
                    continue
                known = self._records.get(path.name)
                if known is None or known[0] != changed:
                    known = changed, Run.attach(path).record
                    self._records[path.name] = known
                found.append((path.name, known[1]))
            except Refused as refused:
                wrong[path.name] = refused.findings[0].message
            except OSError:  # no run at all
                continue
        self.left_out = wrong
        return sorted(found, key=lambda item: item[1].created, reverse=True)

    def follow(self, name: str) -> Follower:
        """The follower of a run by its folder's name; `Refused` for anything that is not a run of this root."""
        is_name = name == Path(name).name and name not in ("", ".", "..") and "\0" not in name
        if not (is_name and self._is_inside(self.root / name) and (self.root / name / "run.json").is_file()):
            raise Refused(
                fatal(
                    "not-found",
                    f"there is no run {name!r} here",
                    expected=f"a folder of {self.root.name} with a run.json",
                    found="nothing of that name",
                    next="choose a run from the list",
                )
            )
        with self._lock:
            if name not in self._followers:
                follower = Follower(self.root / name)
                follower.poll()
                self._followers[name] = follower
            follower = self._followers[name]
        follower.wanted_s = time.monotonic()
        return follower

    def _is_inside(self, path: Path) -> bool:
        """Whether a folder lies below the root, wherever its name, or a link of that name, leads; and is text."""
        try:
            return is_text(path.name) and path.resolve().is_relative_to(self.root)
        except (OSError, RuntimeError):  # links in a circle
            return False

    def touch(self, follower: Follower) -> None:
        """Somebody still looks at this run."""
        follower.wanted_s = time.monotonic()
        with self._lock:
            self._followers.setdefault(Path(follower.snapshot.directory).name, follower)

    def _work(self) -> None:
        while not self._end.wait(POLL_S):
            with self._lock:
                followers = list(self._followers.items())
            for name, follower in followers:
                if time.monotonic() - follower.wanted_s > IDLE_S:
                    with self._lock:
                        self._followers.pop(name, None)
                    follower.close()
                    continue
                try:
                    follower.poll_if_news()
                except UNREADABLE:
                    continue  # the run is being written or was removed; what was read stays
                if self._end.is_set():
                    return  # closed meanwhile: nobody looks any more
                if follower.is_due and (name not in self._looking or self._looking[name].done()):
                    self._looking[name] = self._lookers.submit(follower.look)


def number_of(event: RequestEvent) -> int | None:
    """The engine's number of a request, if its record has it."""
    try:
        found = msgspec.json.decode(event.record)
    except msgspec.DecodeError:
        return None
    number = found.get("number") if isinstance(found, dict) else None
    return number if isinstance(number, int) else None


def reports_of(run: Run) -> tuple[Report, ...]:
    """Every report of a run, in order; in the place of one that cannot be read stands the refusal that says why."""
    found = []
    for rung in run.record.rungs:
        try:
            found.append(run.report(rung))
        except Refused as refused:
            wrong = [msgspec.structs.replace(finding, next=f"do {rung.verb} again") for finding in refused.findings]
            found.append(refusal(rung.verb, run.record.model, Refused(wrong)))
    return tuple(found)


def requests_once(found: Sequence[RequestEvent]) -> list[RequestEvent]:
    """Requests, the latest first; one that a rung recorded itself, with its name, is not shown as the engine's too."""
    named = {(number_of(event), event.prompt_tokens): event.time_s for event in found if event.rung != SERVED}
    return [
        event
        for event in reversed(found)
        if event.rung != SERVED
        or abs(named.get((number_of(event), event.prompt_tokens), -SAME_S) - event.time_s) >= SAME_S
    ]


def progress_rows(snapshot: Snapshot, rung: str | None = None) -> list[tuple[ProgressEvent, Pace]]:
    """The latest event of every phase, of one rung or of all, in the order of their beginning."""
    found = [(pace.last, pace) for (of, _), pace in snapshot.progress.items() if rung is None or of == rung]
    return sorted(found, key=lambda item: item[1].first.time_s)
