"""What a verb of the command line gets: its run, where output goes, and progress that reaches both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from firstlight.workbench.events import ProgressEvent
from firstlight.workbench.face import Face
from firstlight.workbench.progress import Progress
from firstlight.workbench.report import Report, write_atomically
from firstlight.workbench.runs import Run


@dataclass
class Session:
    """One call of a verb. `run` is None without --run; `forced` tells that an earlier rung did not pass."""

    face: Face
    run: Run | None = None
    force: bool = False
    forced: bool = False
    has_said_all: bool = False  # the verb has shown its report itself

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

    def finish(self, report: Report, json_file: str | None = None, brief: bool = False) -> Report:
        """Shows the report, appends it to the run and writes it where --json asks."""
        if self.forced:
            report = msgspec.structs.replace(report, forced=True)
        if self.run is not None:
            self.run.add(report)
        if json_file is not None:
            write_json(report, json_file)
        if brief:
            self.face.brief(report)
        elif not self.has_said_all:
            self.face.report(report)
        return report

    def close(self) -> None:
        self.face.settle()
        if self.run is not None:
            self.run.close()

    def _to_events(self, event: ProgressEvent) -> None:
        assert self.run is not None
        self.run.events.put(event)


def write_json(report: Report, destination: str) -> None:
    """Writes a report to a file, or to standard output for `-`."""
    if destination == "-":
        import sys

        sys.stdout.write(report.to_json().decode())
        sys.stdout.flush()
        return
    write_atomically(Path(destination), report.to_json())


def namespace_values(arguments: Any) -> dict[str, Any]:
    """Parsed arguments as a dict, for commands that hand them on."""
    return dict(vars(arguments))
