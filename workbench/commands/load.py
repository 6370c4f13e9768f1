"""`firstlight load`: the weights of every rank, and nothing else."""

from __future__ import annotations

import argparse

from firstlight.workbench.commands import options
from firstlight.workbench.report import Report
from firstlight.workbench.session import Session


def arguments(parser: argparse.ArgumentParser) -> None:
    options.checkpoint(parser)
    options.engine(parser)
    group = parser.add_argument_group("loading")
    group.add_argument("--hash", action="store_true", help="also the SHA-256 of every parameter as it is in memory")
    group.add_argument("--reader", choices=("auto", "buffered", "direct"), default="auto", help="how files are read")
    group.add_argument("--load-threads", type=options.positive, metavar="N", help="reads in flight")
    group.add_argument("--no-limit", action="store_true", help="do not measure what the source gives at best")


def run(arguments: argparse.Namespace, session: Session) -> Report:
    mesh = options.mesh_of(arguments)
    from firstlight.workbench.load import load

    return load(
        arguments.checkpoint,
        mesh,
        dtype=arguments.dtype,
        device=options.device_of(arguments),
        threads=arguments.load_threads,
        reader=arguments.reader,
        hashes=arguments.hash,
        limit=not arguments.no_limit,
        progress=session.progress("load"),
    )
