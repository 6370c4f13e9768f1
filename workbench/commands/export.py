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

    exported = Run.attach(arguments.directory)
    if session.run is not None and session.run.directory.samefile(exported.directory):
        exported = session.run
    session.run = session.run or exported  # the report of the export is part of the run, unless --run names another
    session.forced = exported.require("export", session.force)
    return export(exported, arguments.out)
