"""`firstlight stress`: many requests at once, and whether each still gets its own answer."""

from __future__ import annotations

import argparse

from firstlight.workbench.commands import options
from firstlight.workbench.report import Report
from firstlight.workbench.session import Session


def arguments(parser: argparse.ArgumentParser) -> None:
    options.checkpoint(parser)
    parser.add_argument("--requests", type=options.positive, metavar="N", default=64, help="requests in all")
    parser.add_argument("--concurrency", type=options.positive, metavar="N", default=16, help="requests at a time")
    parser.add_argument("--tokens", type=options.positive, metavar="N", default=24, help="tokens of each answer")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="another one makes other requests")
    options.engine(parser)


def run(arguments: argparse.Namespace, session: Session) -> Report:
    engine_options = options.options_of(arguments)
    from firstlight.workbench.start import started
    from firstlight.workbench.stress import stress

    progress = session.progress("stress")
    with started(engine_options, progress) as host:
        return stress(
            host.client(),
            requests=arguments.requests,
            concurrency=arguments.concurrency,
            tokens=arguments.tokens,
            seed=arguments.seed,
            progress=progress,
        )
