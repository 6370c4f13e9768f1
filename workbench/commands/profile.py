"""`firstlight profile`: where the time of a token goes, on every rank."""

from __future__ import annotations

import argparse

from firstlight.workbench.commands import options
from firstlight.workbench.report import Report
from firstlight.workbench.session import Session


def arguments(parser: argparse.ArgumentParser) -> None:
    options.checkpoint(parser)
    parser.add_argument(
        "--prompt-tokens", type=options.positive, metavar="N", help="tokens of the prefill (default 128, or what fits)"
    )
    parser.add_argument("--decode-steps", type=options.positive, metavar="N", default=16, help="steps that are timed")
    parser.add_argument("--batch", type=options.positive, metavar="N", default=1, help="sequences at once")
    parser.add_argument("--no-bandwidth", action="store_true", help="do not measure the memory's bandwidth")
    options.engine(parser)


def run(arguments: argparse.Namespace, session: Session) -> Report:
    engine_options = options.options_of(arguments)
    from firstlight.workbench.engines import open_engine
    from firstlight.workbench.profile import profile

    progress = session.progress("profile")
    with open_engine(engine_options, progress) as engine:
        return profile(
            engine,
            prompt_tokens=arguments.prompt_tokens,
            decode_steps=arguments.decode_steps,
            batch=arguments.batch,
            bandwidth=not arguments.no_bandwidth,
            progress=progress,
        )
