"""The run directory: one bring-up with its reports, events, traces and what was made of them.

runs/<time>-<model>/  run.json  reports/<nn>-<verb>.json  events.sqlite  traces/  golden/  report.html  card.yaml  ...
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import msgspec

from firstlight.engine.errors import FirstlightError, Refused, unwritable
from firstlight.engine.findings import fatal, warning, what_is
from firstlight.workbench.environment import command_line
from firstlight.workbench.events import EventReader, EventWriter
from firstlight.workbench.report import Report, Status, now_iso, write_atomically
from firstlight.workbench.step_trace import step_trace
from firstlight.workbench.work import Work

LADDER = ("scan", "plan", "load", "start", "infer", "verify", "profile", "stress", "export")
STANDS_ON = {"generate": "infer", "serve": "start", "validate": "infer"}
"""Verbs off the ladder, and the rung whose place they take."""
WORK = (*LADDER[:-1], "validate", "generate")
"""Verbs that take a while and end with a report: meanwhile the run says so. An archive holds the run at rest."""

DEFAULT_ROOT = "runs"
FOLDERS = ("reports", "traces", "golden")
MOST_OF_A_NAME = 120  # characters of a model's name in that of a folder, of which file systems take 255 bytes


def own_file(directory: Path, name: str) -> Path:
    """A file of a run directory by its name in it, whether it is there yet or not.

    Raises `Refused` for one that leads out of the directory, by its name or by a link, and for what is no plain file (a
    pipe would keep its reader waiting): a directory that came from elsewhere holds whatever somebody put there.
    """
    path = directory / name
    try:
        real = path.resolve()
        inside, plain = real.is_relative_to(directory.resolve()), real.is_file() or not real.exists()
    except (OSError, RuntimeError, ValueError):  # links in a circle, names that no file can have
        inside, plain = False, False
    if not (inside and plain):
        raise Refused(
            fatal(
                "unsafe-file",
                f"{name} of the run {directory.name} is not read",
                file=str(path),
                expected="a plain file in the run's own directory",
                found="no plain file" if inside else "one outside of it",
                next="put the file itself there",
            )
        )
    return path


def name_of(checkpoint: str) -> str:
    """What a checkpoint is called: the last part of its path, or of its address; `.` has a name too."""
    path = Path(checkpoint)
    return path.name if path.name not in ("", "..", "~") else path.expanduser().resolve().name


class RungRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One report of a run, in brief."""

    number: int
    verb: str
    status: Status
    file: str
    started: str
    duration_s: float
    forced: bool = False


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`run.json`. `engine` is how to reach the host that this run started, if it is to be attached to.

    `url`: where the checkpoint is, if `checkpoint` is what a URL's small files are kept in. `work`: the rung that has
    begun and has no report yet.
    """

    model: str
    checkpoint: str
    created: str
    command: str
    rungs: tuple[RungRecord, ...] = ()
    engine: dict[str, Any] | None = None
    url: str = ""
    work: Work | None = None

    @property
    def source(self) -> str:
        """The checkpoint as a user names it: its URL or its directory."""
        return self.url or self.checkpoint


class Run:
    """A run directory, open for adding to and for reading."""

    def __init__(self, directory: Path, record: RunRecord) -> None:
        self.directory = directory
        self.record = record
        self.is_new = False  # made by this process, which has entered nothing yet
        self._was_there = True  # the directory, empty
        self._writer: EventWriter | None = None
        self._lost = 0  # events, as far as reports say

    @classmethod
    def create(cls, model: str, checkpoint: str, root: str | os.PathLike[str] = DEFAULT_ROOT) -> Run:
        """A new directory `<root>/<time>-<model>`."""
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S")
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip("-.")[:MOST_OF_A_NAME] or "model"
        directory, count = Path(root) / f"{stamp}-{name}", 1
        while directory.exists():
            count += 1
            directory = Path(root) / f"{stamp}-{name}-{count}"
        return cls._new(directory, model, checkpoint)

    @classmethod
    def at(cls, directory: str | os.PathLike[str], model: str = "", checkpoint: str = "") -> Run:
        """The run in `directory`, made there if the directory is absent or empty."""
        path = _with_a_name(directory)
        if (path / "run.json").is_file():
            return cls.attach(path)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise Refused(
                fatal(
                    "usage",
                    f"{path} is not a run directory",
                    file=str(path),
                    expected="a directory with run.json, an empty one, or a new name",
                    found="a directory of something else" if path.is_dir() else "a file",
                    next="name another --run directory",
                )
            )
        return cls._new(path, model, checkpoint)

    @classmethod
    def attach(cls, directory: str | os.PathLike[str]) -> Run:
        """An existing run. Raises `Refused` when there is none."""
        path = _with_a_name(directory)
        if (what := what_is(path)) != "a directory":
            raise Refused(
                fatal(
                    "not-found",
                    f"{directory} is not a run directory",
                    file=str(directory),
                    expected="a run directory as `firstlight up` makes it",
                    found=what,
                    next=f"name a directory under {DEFAULT_ROOT}/",
                )
            )
        try:
            record = msgspec.json.decode(own_file(path, "run.json").read_bytes(), type=RunRecord)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise Refused(
                fatal(
                    "not-found",
                    f"{path} holds no run: {reason}",
                    file=str(path / "run.json"),
                    expected="a run directory as `firstlight up` makes it",
                    found="no run.json" if isinstance(error, FileNotFoundError) else "a run.json of another kind",
                    next=f"name a directory under {DEFAULT_ROOT}/",
                )
            ) from error
        return cls(path, record)

    @classmethod
    def _new(cls, directory: Path, model: str, checkpoint: str) -> Run:
        was_there = directory.is_dir()
        try:
            for name in FOLDERS:
                (directory / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            place = "a place that may be written"
            raise unwritable(directory, error, expected=place, elsewhere="name another --run directory") from error
        record = RunRecord(
            model=model, checkpoint=checkpoint, created=now_iso(), command=command_line(), url=_url(checkpoint)
        )
        run = cls(directory, record)
        run._save()
        run.is_new, run._was_there = True, was_there
        return run

    def discard(self) -> None:
        """Takes away a directory that was made just now and holds nothing but its skeleton; else nothing."""
        if not self.is_new:
            return
        with contextlib.suppress(OSError):  # what somebody has put there stays
            for name in FOLDERS:
                (self.directory / name).rmdir()
            (self.directory / "run.json").unlink()
            if not self._was_there:
                self.directory.rmdir()

    @property
    def events(self) -> EventWriter:
        """The writer of this process, started when first used."""
        if self._writer is None:
            self._writer = EventWriter(self.directory / "events.sqlite")
        return self._writer

    def read_events(self) -> EventReader:
        return EventReader(self.directory / "events.sqlite")

    def add(self, report: Report) -> Path:
        """Appends a report as `reports/<nn>-<verb>.json` and enters it in run.json.

        One that timed a step call by call leaves it in `traces/<nn>-<verb>.json` as well, for Perfetto.
        """
        self.is_new = False
        self.record = self._on_disk()
        number = 1 + max((rung.number for rung in self.record.rungs), default=0)
        path = report.write(self.directory / "reports" / f"{number:02d}-{report.verb}.json")
        if timeline := report.tables.get("timeline"):
            (self.directory / "traces").mkdir(exist_ok=True)
            write_atomically(self.directory / "traces" / path.name, msgspec.json.encode(step_trace(timeline)))
        rung = RungRecord(
            number=number,
            verb=report.verb,
            status=report.status,
            file=f"reports/{path.name}",
            started=report.started,
            duration_s=report.duration_s,
            forced=report.forced,
        )
        work = None if self.record.work is not None and self.record.work.is_mine else self.record.work
        self.record = msgspec.structs.replace(self.record, rungs=(*self.record.rungs, rung), work=work)
        self._save()
        return path

    @contextlib.contextmanager
    def working(self, verb: str) -> Iterator[None]:
        """Enters in run.json that a rung has begun; its report, by `add`, takes that out again.

        What ends it without one is entered as well: whoever looks at the run knows what works, and what broke off.
        """
        if verb not in WORK:
            yield
            return
        work = Work.here(verb)
        self._tell(work)
        try:
            yield
        except FirstlightError:
            raise  # which becomes a report
        except BaseException as error:
            ended = "interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__
            self._tell(msgspec.structs.replace(work, ended=ended))
            raise

    def rest(self) -> None:
        """Takes out that a rung has begun, where it is to leave no trace."""
        self._tell(None)

    def _tell(self, work: Work | None) -> None:
        with contextlib.suppress(Refused):  # a full disk costs what is told of a rung, not the rung
            self.update(work=work)

    def with_losses(self, report: Report) -> Report:
        """The report with a warning if events could not be written since the last one: the disk is full, say."""
        writer = self._writer
        if writer is None or writer.lost <= self._lost:
            return report
        count, self._lost = writer.lost - self._lost, writer.lost
        said = warning(
            "events-lost",
            f"{count:,} progress events and readings could not be written: {writer.last_problem or 'the disk refused'}",
            file=str(writer.path),
            expected="room for what is told while a rung works",
            next="make room; the work itself has gone on, curves and progress of that time are missing",
        )
        return msgspec.structs.replace(report, findings=(*report.findings, said))

    def update(self, **fields: Any) -> None:
        """Replaces fields of run.json."""
        self.record = msgspec.structs.replace(self._on_disk(), **fields)
        self._save()

    def reports(self) -> tuple[Report, ...]:
        """Every report, in order."""
        return tuple(map(self.report, self.record.rungs))

    def report(self, rung: RungRecord) -> Report:
        """The report of one entry. Raises `Refused` for a file that is none, or lies outside the directory."""
        return Report.read(own_file(self.directory, rung.file))

    def latest(self, verb: str) -> Report | None:
        """The last report of a verb."""
        for rung in reversed(self.record.rungs):
            if rung.verb == verb:
                return self.report(rung)
        return None

    def write_page(self) -> Path:
        """Writes `report.html`: the last report of every verb on one page, the one over all rungs first."""
        from firstlight.workbench.render.html import reports_page

        last = {report.verb: report for report in self.reports()}
        ordered = sorted(last.values(), key=lambda report: report.verb != "up")
        page = reports_page(self.record.model or self.directory.name, ordered)
        return write_atomically(self.directory / "report.html", page.encode())

    def blockers(self, verb: str) -> tuple[RungRecord, ...]:
        """Rungs below `verb` whose last report is not a pass."""
        rung = STANDS_ON.get(verb, verb)
        if rung not in LADDER:
            return ()
        last = {record.verb: record for record in self.record.rungs}
        below = LADDER[: LADDER.index(rung)]
        return tuple(last[name] for name in below if name in last and last[name].status != "passed")

    def require(self, verb: str, force: bool = False) -> bool:
        """Refuses to go on top of a rung that did not pass; with `force` returns whether there was one."""
        blockers = self.blockers(verb)
        if not blockers or force:
            return bool(blockers)
        names = ", ".join(f"{rung.verb} ({rung.status})" for rung in blockers)
        raise Refused(
            fatal(
                "earlier-rung-failed",
                f"{verb} stands on {names}",
                file=str(self.directory / blockers[0].file),
                expected=f"{blockers[0].verb} passed",
                found=f"{blockers[0].verb} {blockers[0].status}",
                next=f"mend what {blockers[0].verb} found and run it again, or use --force, which the record shows",
            )
        )

    def close(self) -> None:
        """Ends the event writer; the directory stays."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _on_disk(self) -> RunRecord:
        """run.json as it is now: whoever else writes to this run loses nothing."""
        try:
            return msgspec.json.decode(own_file(self.directory, "run.json").read_bytes(), type=RunRecord)
        except (OSError, Refused, msgspec.DecodeError, UnicodeDecodeError):
            return self.record

    def _save(self) -> None:
        data = msgspec.json.format(msgspec.json.encode(self.record), indent=2) + b"\n"
        write_atomically(self.directory / "run.json", data)


def _url(checkpoint: str) -> str:
    """The address of a checkpoint that is read from one; empty for a directory."""
    from firstlight.engine.weights.sources.mirror import read_pointer

    try:
        pointer = read_pointer(Path(checkpoint)) if checkpoint else None
    except (OSError, Refused):  # no directory has such a name, or the verb will say what is wrong with it
        return ""
    return pointer.url if pointer is not None else ""


def _with_a_name(directory: str | os.PathLike[str]) -> Path:
    """A path whose last part is the directory's own name, which archives and titles are called by: not `.` or `..`."""
    path = Path(directory)
    return path.resolve() if path.name in ("", "..") and path.exists() else path
