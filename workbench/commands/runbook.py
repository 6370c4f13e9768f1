"""`firstlight runbook`: a notebook executed against a real engine, kept as the record of the bring-up."""

from __future__ import annotations

import argparse

from firstlight.workbench.commands import options
from firstlight.workbench.report import Report
from firstlight.workbench.session import Session


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("notebook", metavar="NOTEBOOK", help="the notebook to execute")
    options.checkpoint(parser)
    parser.add_argument(
        "--set",
        metavar="K=V",
        action="append",
        default=[],
        type=setting,
        help="a parameter of the notebook, such as tp=2; repeatable",
    )
    parser.add_argument("--go-on", action="store_true", help="do not stop at the first failed check")


def setting(text: str) -> tuple[str, object]:
    """A parameter, its value as YAML reads it."""
    from firstlight.workbench.runbook import parse_setting

    try:
        return parse_setting(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run(arguments: argparse.Namespace, session: Session) -> Report:
    from pathlib import Path

    from firstlight.engine.weights.checkpoint import Checkpoint
    from firstlight.workbench.runbook import runbook, settings_for
    from firstlight.workbench.runs import Run, name_of

    values = settings_for(Path(arguments.notebook), arguments.set)  # before a run directory is made for it
    Checkpoint.open(arguments.checkpoint)  # what is none is refused, not left to fail in a cell
    name = name_of(arguments.checkpoint)
    kept = session.run or Run.create(name, arguments.checkpoint)
    session.face.line(f"{arguments.notebook} on {name}, run directory {kept.directory}")
    report = runbook(
        arguments.notebook,
        arguments.checkpoint,
        kept,
        values,
        go_on=arguments.go_on or session.force,
        progress=session.progress("runbook"),
        listener=session.face.progress,
    )
    session.run = Run.attach(kept.directory)
    session.run.write_page()
    return report
