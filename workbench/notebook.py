"""A bring-up in a notebook: rungs show their progress while they work, and figures show what they found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from firstlight.engine.errors import FirstlightError, Refused
from firstlight.engine.findings import fatal
from firstlight.engine.serving.request import SamplingParams
from firstlight.workbench import figures
from firstlight.workbench.bringup import Bringup
from firstlight.workbench.events import ProgressEvent
from firstlight.workbench.figures import View
from firstlight.workbench.progress import Progress
from firstlight.workbench.report import Report
from firstlight.workbench.widgets import AskBox, ProgressView, Stepper


class RungFailed(FirstlightError):
    """A rung did not pass in a notebook that is to stop there; `report` says why."""

    def __init__(self, report: Report) -> None:
        self.report = report
        failed = [check.name for check in report.checks if check.status == "failed"]
        wrong = [finding.message for finding in report.findings if finding.severity == "fatal"]
        super().__init__(f"{report.verb} {report.status}: {'; '.join((*failed, *wrong))[:300]}")


class NotebookBringup(Bringup):
    """`Bringup` whose rungs draw themselves. Live views leave static twins, so that a saved notebook keeps the figures.

    `memory_map`, `layer_times`, `step_split` and `errors` draw the latest report of their rung; `box` is for asking.
    """

    _view: ProgressView | None = None
    stepper: Stepper | None = None
    """Pause, next layer and go on of the load that is running."""
    stop: bool = False
    """Whether a rung that does not pass ends the notebook (`RungFailed`), as in a runbook that runs by itself."""

    def load(self, step: bool = False) -> Report:
        """See `Bringup.load`. Buttons pause it and let it go on, layer by layer; with `step` it begins paused.

        A load that was held says so in its report, and claims no rate.
        """
        self.stepper = Stepper(paused=step).show()
        try:
            return super().load()
        finally:
            stepper, self.stepper = self.stepper, None
            stepper.close()

    def memory_map(self) -> View:
        """What each rank of the running engine holds, by role."""
        return figures.memory_map(self._table("start", "memory"))

    def layer_times(self, phase: str = "decode") -> View:
        """Time per layer of a prefill or a decode step."""
        return figures.layer_times(self._table("profile", "layers"), phase)

    def step_split(self) -> View:
        """Computing, communicating and waiting, by rank."""
        return figures.step_split(self._table("profile", "steps"))

    def timeline(self, phase: str = "decode") -> View:
        """One step as it went, rank by rank: blocks, and the collectives within them."""
        return figures.timeline(self._table("profile", "timeline"), phase)

    def errors(self, prefix: str = "") -> View:
        """Error per layer of the last verification; `prefix` picks a case where there are several."""
        report = self._report("verify")
        names = [name for name in report.tables if name.startswith(prefix) and name.endswith("layers")]
        return figures.errors_by_layer(report.tables[names[0]] if names else [])

    def box(self, pictures: Sequence[str | Path] = (), question: str = "", max_new_tokens: int = 64) -> AskBox:
        """A text box and a picture drop for the running engine; `pictures` can be picked from a list."""

        def answer(text: str, picture: bytes | None) -> Iterator[str]:
            params = SamplingParams(max_new_tokens=max_new_tokens)
            for delta in self.engine.generate(text, [picture] if picture else [], params):
                yield delta.text

        return AskBox(answer, pictures, question).show()

    def _table(self, verb: str, table: str) -> list[dict[str, object]]:
        return self._report(verb).tables.get(table, [])

    def _report(self, verb: str) -> Report:
        report = self.run.latest(verb)
        if report is None:
            raise Refused(
                fatal(
                    "not-available",
                    f"the rung {verb} has not run in this bring-up",
                    expected=f"a report of {verb}",
                    found="none",
                    next=f"call {verb}()",
                )
            )
        return report

    def _rung(self, verb: str, work: Callable[[Progress], Report]) -> Report:
        self._view, report = ProgressView().show(), None
        try:
            report = super()._rung(verb, _with_every_event(work) if self.stepper is not None else work)
        finally:
            view, self._view = self._view, None
            view.close(is_over=report is not None and bool(report.passed or report.checks))  # it came to its end
        if self.stop and not report.passed:
            from IPython.display import display

            display(report)
            raise RungFailed(report)
        return report

    def _keep(self, event: ProgressEvent) -> None:
        super()._keep(event)
        if self._view is not None:
            self._view(event)
        if self.stepper is not None and event.unit == "B":
            self.stepper(event)


def _with_every_event(work: Callable[[Progress], Report]) -> Callable[[Progress], Report]:
    """The work of a rung without leaving out events that come fast: whoever goes layer by layer wants to see each."""
    return lambda progress: work(Progress(progress.rung, progress.listeners, 0.0))
