"""`firstlight runbook`: not built yet, and it says so."""

from __future__ import annotations

import argparse

from firstlight.workbench.commands import options


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("notebook", metavar="NOTEBOOK", help="the notebook to execute")
    options.checkpoint(parser)
    parser.add_argument("--set", metavar="K=V", action="append", default=[], help="a parameter of the notebook")


run = options.not_built("runbook", "make notebooks executes the notebooks and writes them as HTML")
