"""What a person at a terminal sees: reports and text on standard output, progress and refusals on standard error."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from firstlight.engine.findings import Finding
from firstlight.workbench.events import ProgressEvent
from firstlight.workbench.progress import Pace
from firstlight.workbench.render import words
from firstlight.workbench.render.terminal import STYLES, finding_fields, print_report
from firstlight.workbench.report import Report

if TYPE_CHECKING:
    from rich.live import Live

NARROWEST = 40
BAR_WIDTH = 20


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
                    print(f"warning: {finding.message}", file=sys.stderr)

    def text(self, text: str) -> None:
        """Prints a piece of a model's answer as it comes."""
        self.settle()
        if not self.quiet:
            self.out.write(text)
            self.out.flush()

    def aside(self, text: str) -> None:
        """A line beside the output proper, on standard error."""
        self.settle()
        if not self.quiet:
            print(text, file=sys.stderr)

    def verdict(self, status: str, verb: str, checks: str, duration: str, figures: str) -> None:
        """One rung in one line."""
        self.settle()
        if self.quiet:
            return
        from rich.console import Console
        from rich.text import Text

        line = Text.assemble((f"{status:<7}", STYLES[status]), "  ", (f"{verb:<7}", "bold"))
        line.append(f"  {duration:>10}  {checks:>8}  ").append(figures, "dim")
        Console(file=self.out, highlight=False).print(line, no_wrap=True, overflow="ellipsis")

    def line(self, text: str = "") -> None:
        self.text(text + "\n")

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
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2, 0, 0))
        for justify in ("left", "left", "left", "right", "right", "right"):
            grid.add_column(justify=justify, no_wrap=True)
        for (rung, phase), pace in list(self._phases.items())[-6:]:
            last = pace.last
            grid.add_row(Text(rung, "bold"), Text(phase), *(Text(part) for part in pace_words(pace)), Text(last.detail))
        return grid


def pace_words(pace: Pace) -> tuple[str, str, str]:
    """A bar or the count, the rate, and the time to go."""
    last, rate, remaining_s = pace.last, pace.rate, pace.remaining_s
    if last.total:
        share = min(1.0, last.done / last.total)
        filled = round(share * BAR_WIDTH)
        amount = f"{'━' * filled}{'─' * (BAR_WIDTH - filled)} {share:4.0%} of {words.quantity(last.total, last.unit)}"
    else:
        amount = words.quantity(last.done, last.unit) if last.done else ""
    speed = words.quantity(rate, f"{last.unit}/s") if rate and last.unit else ""
    if last.total and last.done >= last.total:
        return amount, speed, "done"
    return amount, speed, f"{words.seconds(remaining_s)} to go" if remaining_s is not None else ""


def say_refused(findings: Sequence[Finding], lead: str = "refused") -> None:
    """Says on standard error why nothing was done: the first fatal findings whole, the others counted."""
    fatal = [finding for finding in findings if finding.severity == "fatal"] or list(findings)
    width = max(NARROWEST, min(120, shutil.get_terminal_size((100, 24)).columns))
    lines: list[str] = []
    for finding in fatal[:5]:
        lines += textwrap.wrap(f"{lead}: {finding.message}", width, subsequent_indent="  ", break_on_hyphens=False)
        for name, value in (*finding_fields(finding), ("code", finding.code)):
            lines += textwrap.wrap(f"  {name:<10}{value}", width, subsequent_indent=" " * 12, break_on_hyphens=False)
    if len(fatal) > 5:
        lines.append(f"and {len(fatal) - 5} more; --json FILE writes all")
    print("\n".join(lines), file=sys.stderr)
