"""What a person at a terminal sees: reports and text on standard output, progress and refusals on standard error."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from firstlight.engine.findings import Finding, printable
from firstlight.workbench.events import ProgressEvent
from firstlight.workbench.progress import Pace
from firstlight.workbench.render import words
from firstlight.workbench.render.terminal import STYLES, finding_fields, print_report
from firstlight.workbench.report import Report

if TYPE_CHECKING:
    from rich.live import Live

NARROWEST = 40
LEAST_FIGURES = 16  # characters of a rung's figures that are worth a place beside its verdict
BELOW = 10  # where what belongs to a rung stands under its verdict
BAR_WIDTH = 16
MOST_PHASES = 6


@dataclass
class Face:
    """Where output goes; `quiet` leaves refusals and faults, `json_on_stdout` moves the rest to standard error."""

    quiet: bool = False
    json_on_stdout: bool = False
    _view: LiveView | None = field(default=None, repr=False)

    @property
    def out(self) -> TextIO:
        return sys.stderr if self.json_on_stdout else sys.stdout

    def report(self, report: Report) -> None:
        """Prints a report, unless quiet; one that was refused is said on standard error in any case."""
        self.settle()
        if report.status == "refused":
            say_refused(report.findings)
            return
        if self.quiet:
            if report.status == "failed" and not report.checks:  # it broke off before it could check anything
                say_refused(report.findings, lead="failed")
            return
        from rich.console import Console

        print_report(report, Console(file=self.out, highlight=False))

    def brief(self, report: Report) -> None:
        """What a verb that shows its own output leaves to say: what was refused, what did not pass, warnings."""
        self.settle()
        if report.status == "refused":
            say_refused(report.findings)
            return
        if report.status == "failed":
            say_refused(report.findings, lead="failed")
        elif not self.quiet:
            for finding in report.findings:
                if finding.severity == "warning":
                    print(printable(f"warning: {finding.message}"), file=sys.stderr)

    def text(self, text: str) -> None:
        """Prints a piece of a model's answer as it comes."""
        self.settle()
        if not self.quiet:
            self.out.write(words.harmless(text))
            self.out.flush()

    def aside(self, text: str) -> None:
        """A line beside the output proper, on standard error."""
        self.settle()
        if not self.quiet:
            print(words.harmless(text), file=sys.stderr)

    def verdict(self, status: str, verb: str, checks: str, duration: str, figures: str) -> None:
        """One rung in one line; figures that are too long for it go on below."""
        self.settle()
        if self.quiet:
            return
        from rich.console import Console
        from rich.text import Text

        console = Console(file=self.out, highlight=False)
        line = Text.assemble((f"{status:<7}", STYLES[status]), "  ", (f"{verb:<7}", "bold"))
        line.append(f"  {duration:>10}  {checks:>8}  ")
        beside = console.width - line.cell_len
        indent = line.cell_len if beside >= LEAST_FIGURES else BELOW  # on a narrow terminal all of them go on below
        lines = textwrap.wrap(printable(figures), max(LEAST_FIGURES, console.width - indent))
        first, others = (lines[:1], lines[1:]) if beside >= LEAST_FIGURES else ([], lines)
        line.append("".join(first), "dim")
        line.rstrip()
        console.print(line, no_wrap=True, overflow="ellipsis")
        for more in others:
            console.print(Text(" " * indent + more, "dim"), no_wrap=True, overflow="ellipsis")

    def line(self, text: str = "") -> None:
        self.text(text + "\n")

    def paragraph(self, text: str, indent: int) -> None:
        """Lines of words below an indent, within the width of the terminal."""
        space = " " * indent
        wide = max(NARROWEST, min(120, shutil.get_terminal_size((100, 24)).columns))
        for line in textwrap.wrap(printable(text), wide, initial_indent=space, subsequent_indent=space + "  "):
            self.line(line)

    def progress(self, event: ProgressEvent) -> None:
        """Shows progress while standard error is a terminal; elsewhere progress is in the run directory alone."""
        if self.quiet or not sys.stderr.isatty():
            return
        if self._view is None:
            self._view = LiveView()
        self._view.show(event)

    def settle(self) -> None:
        """Ends the live view, so that other output starts on a line of its own."""
        if self._view is not None:
            self._view.close()
            self._view = None


class LiveView:
    """The running phases of a rung: a bar where the total is known, rate and remaining time; gone when it ends."""

    def __init__(self) -> None:
        self._phases: dict[tuple[str, str], Pace] = {}
        self._live: Live | None = None

    def show(self, event: ProgressEvent) -> None:
        from rich.console import Console
        from rich.live import Live

        key = (event.rung, event.phase)
        pace = self._phases.get(key)
        self._phases[key] = Pace(pace.first if pace else event, event)
        if self._live is None:
            console = Console(file=sys.stderr, highlight=False)
            self._live = Live(console=console, transient=True, refresh_per_second=8, get_renderable=self._render)
            self._live.start()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _render(self) -> Any:
        """A line a phase, the running one last; what does not fit at the right is left off."""
        from rich.text import Text

        shown = list(self._phases.items())[-MOST_PHASES:]
        widest = max(len(phase) for (_, phase), _ in shown)
        lines = []
        for (rung, phase), pace in shown:
            line = Text.assemble((f"{rung:<8}", "bold"), f" {phase:<{widest}}  ")
            line.append(printable("  ".join(part for part in (*pace_words(pace), pace.last.detail) if part)))
            lines.append(line)
        return Text("\n", no_wrap=True, overflow="crop").join(lines)


def pace_words(pace: Pace) -> tuple[str, ...]:
    """What is known of a phase, the most wanted first: a bar and the time to go, the rate, the whole."""
    last, rate, remaining_s = pace.last, pace.rate, pace.remaining_s
    speed = words.quantity(rate, f"{last.unit}/s") if rate and last.unit else ""
    if not last.total:
        return (words.quantity(last.done, last.unit) if last.done else "", speed)
    share = min(1.0, last.done / last.total)
    filled = round(share * BAR_WIDTH)
    bar = f"{'━' * filled}{'─' * (BAR_WIDTH - filled)} {100 * share:3.0f} %"
    to_go = "done" if share == 1 else f"{words.seconds(remaining_s)} to go" if remaining_s is not None else ""
    return (bar, f"{to_go:<12}", speed, f"of {words.quantity(last.total, last.unit)}")


def say_refused(findings: Sequence[Finding], lead: str = "refused") -> None:
    """Says on standard error why nothing was done: the first fatal findings whole, the others counted."""
    fatal = [finding for finding in findings if finding.severity == "fatal"] or list(findings)
    width = max(NARROWEST, min(120, shutil.get_terminal_size((100, 24)).columns))
    lines: list[str] = []
    for finding in fatal[:5]:
        lines += textwrap.wrap(
            printable(f"{lead}: {finding.message}"), width, subsequent_indent="  ", break_on_hyphens=False
        )
        for name, value in (*finding_fields(finding), ("code", finding.code)):
            lines += textwrap.wrap(f"  {name:<10}{value}", width, subsequent_indent=" " * 12, break_on_hyphens=False)
    if len(fatal) > 5:
        lines.append(f"and {len(fatal) - 5} more; --json FILE writes all")
    print("\n".join(lines), file=sys.stderr)
