"""`firstlight load`: the weights of every rank, and nothing else."""

from __future__ import annotations

import argparse

from firstlight.workbench.commands import options
from firstlight.workbench.report import Report
from firstlight.workbench.session import Session


def arguments(parser: argparse.ArgumentParser) -> None:
    options.checkpoint(parser)
    options.engine(parser)


def run(arguments: argparse.Namespace, session: Session) -> Report:
    mesh = options.mesh_of(arguments)
    from firstlight.workbench.load import load

    return load(
        arguments.checkpoint,
        mesh,
        dtype=arguments.dtype,
        device=options.device_of(arguments),
        progress=session.progress("load"),
    )
