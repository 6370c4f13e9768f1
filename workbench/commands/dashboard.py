"""`firstlight dashboard`: not built yet, and it says so."""

from __future__ import annotations

import argparse

from firstlight.workbench.commands import options


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="RUN", nargs="?", help="a run directory")


run = options.not_built("dashboard", "reports of a run are in its reports/ folder; a notebook shows them")
