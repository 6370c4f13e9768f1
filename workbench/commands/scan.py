"""`firstlight scan`: what a checkpoint is, and whether it is whole."""

from __future__ import annotations

import argparse

from firstlight.workbench.commands import options
from firstlight.workbench.report import Report
from firstlight.workbench.session import Session


def arguments(parser: argparse.ArgumentParser) -> None:
    options.checkpoint(parser)
    parser.add_argument("--deep", action="store_true", help="read every tensor: hash it, look for NaN and odd scales")
    parser.add_argument("--strict", action="store_true", help="a warning fails the scan as well")
    parser.add_argument(
        "--manifest", metavar="FILE", help="write the hash of every tensor and side file (implies --deep)"
    )
    parser.add_argument("--against", metavar="FILE", help="compare with such a file, of any machine (implies --deep)")
    parser.add_argument(
        "--operators", action="store_true", help="what the reference computes, operator by operator, and what we have"
    )
    parser.add_argument("--propose", metavar="FILE", help="write a draft family file for an unknown architecture")


def run(arguments: argparse.Namespace, session: Session) -> Report:
    if arguments.propose is not None:
        from firstlight.workbench.propose import propose

        return propose(arguments.checkpoint, arguments.propose)
    from firstlight.workbench.scan import scan

    return scan(
        arguments.checkpoint,
        arguments.deep,
        session.progress("scan"),
        strict=arguments.strict,
        manifest=arguments.manifest,
        against=arguments.against,
        operators=arguments.operators,
        trust_remote_code=arguments.trust_remote_code,
        keep=session.run.directory if session.run is not None else None,
    )
