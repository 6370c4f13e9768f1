"""Cells whose long names are broken where their parts end: `model.layers.{0..3}.` and below it `mlp.up_proj.weight`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.measure import Measurement

_ENDS = re.compile(r"(?<=[ /_-])|(?<=\})(?=[^.])|(?<=\.)(?=[^\d.])")  # of parts; no number is broken


def broken(text: str, width: int) -> Iterator[str]:
    """Lines of at most `width` characters, broken behind spaces and marks; within a part only if it is longer."""
    line = ""
    for part in filter(None, _ENDS.split(text)):
        if len(line) + len(part.rstrip()) > width and line:
            yield line.rstrip()
            line = ""
        while len(part.rstrip()) > width:
            yield part[:width]
            part = part[width:]
        line += part
    yield line.rstrip()


class Cell:
    """A text for a column of any width."""

    def __init__(self, text: str, least: int) -> None:
        self.text = text
        self.least = least

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        return Measurement(min(self.least, len(self.text)), len(self.text))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        for line in broken(self.text, max(options.max_width, 1)):
            yield Text(line, no_wrap=True)
