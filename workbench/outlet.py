"""Where the report of a call goes: a file, standard output, or nowhere. Imports next to nothing until it is used."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from firstlight.workbench.report import Report


class Outlet:
    """What `--json` asked for. Standard output gets one report whatever comes after it; a file holds the last one.

    An interrupt waits until a report is written whole (`interrupts.listening`). `title` is what the call is about, once
    that is known; `began_s` is when it began (`time.perf_counter`).
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.title = ""
        self.began_s = time.perf_counter()
        self._words = words
        self._has_spoken = False

    @cached_property
    def destination(self) -> str | None:
        """A file, `-` for standard output, or None; also of words that are wrong otherwise."""
        from firstlight.workbench.arguments import value_of

        return value_of("--json", self._words)

    @property
    def is_stdout(self) -> bool:
        return self.destination == "-"

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to be written: nothing was asked for, or it is there."""
        return self.destination is None or self._has_spoken

    def write(self, report: Report) -> None:
        """Writes the report where it is wanted. Raises `Refused` where that cannot be, `BrokenPipeError` unread."""
        if self.destination is None or (self.is_stdout and self._has_spoken):
            return
        self._has_spoken = True
        if not self.is_stdout:
            from firstlight.workbench.report import write_atomically

            write_atomically(self.destination, report.to_json())
            return
        try:
            _print_json(report.to_json())
        except BrokenPipeError:
            raise
        except OSError as error:
            leave_stdout()
            raise _full(error) from error


def _print_json(text: bytes) -> None:
    """JSON is UTF-8, whatever the terminal's encoding is; a notebook's output takes text alone."""
    stream = getattr(sys.stdout, "buffer", None)
    if stream is None:
        sys.stdout.write(text.decode())
    else:
        sys.stdout.flush()
        stream.write(text)
    sys.stdout.flush()


def leave_stdout() -> None:
    """Standard output takes no more: what is left for it goes nowhere, and Python's end does not complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _full(error: OSError) -> Exception:
    from firstlight.engine.errors import Refused
    from firstlight.engine.findings import fatal

    return Refused(
        fatal(
            "not-available",
            f"standard output cannot be written: {error.strerror}",
            expected="a place with room for the report",
            found=error.strerror or str(error),
            next="send it elsewhere, or name a file with --json FILE",
        )
    )
