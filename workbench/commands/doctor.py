"""`firstlight doctor`: what this machine has, and which operators would be chosen and why."""

from __future__ import annotations

import argparse

from firstlight.workbench.commands import options
from firstlight.workbench.report import Report
from firstlight.workbench.session import Session


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", metavar="CKPT", help="choose operators for the sizes of this checkpoint")
    parser.add_argument("--dtype", type=options.dtype, metavar="D", default="BF16", help="of the operators' inputs")
    parser.add_argument("--bandwidth", action="store_true", help="measure what the memory gives")


def run(arguments: argparse.Namespace, session: Session) -> Report:
    from firstlight.workbench.doctor import doctor

    dtype = "BF16" if arguments.dtype == "auto" else arguments.dtype
    return doctor(arguments.checkpoint, dtype, arguments.bandwidth, session.progress("doctor"))
