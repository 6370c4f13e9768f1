"""`firstlight export`: a run as one archive."""

from __future__ import annotations

import argparse

from firstlight.workbench.report import Report
from firstlight.workbench.runs import Run
from firstlight.workbench.session import Session


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="RUN", help="a run directory")
    parser.add_argument("--out", metavar="FILE", help="the archive, .tar.gz or .zip (default: RUN.tar.gz)")


def run(arguments: argparse.Namespace, session: Session) -> Report:
    from firstlight.workbench.export import export

    exported = session.run or Run.attach(arguments.directory)
    session.run = exported  # the report of the export is part of the run
    session.require("export")
    return export(exported, arguments.out)
