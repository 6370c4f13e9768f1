"""`firstlight scan`: what a checkpoint is, and whether it is whole."""

from __future__ import annotations

import argparse

from firstlight.workbench.commands import options
from firstlight.workbench.report import Report
from firstlight.workbench.session import Session


def arguments(parser: argparse.ArgumentParser) -> None:
    options.checkpoint(parser)
    parser.add_argument("--deep", action="store_true", help="read every tensor: hash it and look for NaN and infinity")


def run(arguments: argparse.Namespace, session: Session) -> Report:
    from firstlight.workbench.scan import scan

    return scan(arguments.checkpoint, arguments.deep, session.progress("scan"))
