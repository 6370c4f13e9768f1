"""What a verb of the command line gets: its run, where output goes, and progress that reaches both."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from firstlight.engine.errors import Occupied, Refused
from firstlight.engine.findings import fatal
from firstlight.workbench.events import ProgressEvent
from firstlight.workbench.face import Face
from firstlight.workbench.outlet import Outlet
from firstlight.workbench.progress import Progress
from firstlight.workbench.report import Report
from firstlight.workbench.runs import LADDER, Run


@dataclass
class Session:
    """One call of a verb. `run` is None without --run; `forced` tells that an earlier rung did not pass."""

    face: Face
    run: Run | None = None
    force: bool = False
    forced: bool = False
    has_said_all: bool = False  # the verb has shown its report itself
    outlet: Outlet = field(default_factory=lambda: Outlet(()))

    def progress(self, rung: str) -> Progress:
        """Progress that goes to the live view and, with a run, to its events."""
        listeners = [self.face.progress]
        if self.run is not None:
            listeners.append(self._to_events)
        return Progress(rung, tuple(listeners))

    def require(self, verb: str) -> None:
        """Refuses on top of a rung that did not pass, unless forced."""
        if self.run is not None:
            self.forced = self.run.require(verb, self.force)

    def working(self, verb: str) -> contextlib.AbstractContextManager[None]:
        """Lets the run, if there is one, know what is being done."""
        return contextlib.nullcontext() if self.run is None else self.run.working(verb)

    def finish(self, report: Report, brief: bool = False) -> Report:
        """Shows the report, appends it to the run and writes it where --json asks."""
        if self.forced:
            report = msgspec.structs.replace(report, forced=True)
        if self.run is not None:
            report = self.run.with_losses(report)
            self.run.add(report)
        self.outlet.write(report)
        if brief:
            self.face.brief(report)
        elif not self.has_said_all:
            self.face.report(report)
        return report

    def leave_run(self, verb: str, error: BaseException) -> None:
        """Has nothing of a call in its run that changed nothing there.

        That is one that another engine of the run kept from beginning, and the refusal of a verb off the ladder in a
        run that was made for it: the refusal of a rung is evidence, and those above stand on it.
        """
        if self.run is None or not isinstance(error, Refused):
            return
        if not isinstance(error, Occupied) and (verb in LADDER or not self.run.is_new):
            return
        self.run.rest()
        self.run.close()
        self.run.discard()
        self.run = None

    def close(self) -> None:
        self.face.settle()
        if self.run is not None:
            self.run.close()

    def _to_events(self, event: ProgressEvent) -> None:
        assert self.run is not None
        self.run.events.put(event)


def refuse_unwritable(destination: str, option: str = "--json") -> None:
    """Refuses a place for a file that cannot be one, before the work that would fill it."""
    target, is_report = Path(destination), option == "--json"
    if (is_report and destination == "-") or (target.exists() and not target.is_dir()):
        return  # a file that may not be replaced is told when it is written: its folder decides
    folder = target.parent
    found = "a directory" if target.is_dir() else "no such folder" if not folder.is_dir() else None
    if found is None and not os.access(folder, os.W_OK):
        found = "a folder that may not be written"
    if found is not None:
        raise Refused(
            fatal(
                "not-found" if found == "no such folder" else "not-available",
                f"{option} {destination!r} cannot be written",
                file=destination,
                expected="a file in a folder that exists and may be written"
                + (", or - for standard output" if is_report else ""),
                found=found,
                next="name another file",
            )
        )
