"""`firstlight verify`: the numbers against a golden file or against transformers, layer by layer."""

from __future__ import annotations

import argparse

from firstlight.workbench.commands import options
from firstlight.workbench.report import Report
from firstlight.workbench.session import Session


def arguments(parser: argparse.ArgumentParser) -> None:
    options.checkpoint(parser)
    against = parser.add_mutually_exclusive_group()
    against.add_argument("--golden", metavar="FILE", help="a safetensors file of inputs and what they give")
    against.add_argument("--reference", metavar="NAME", help="transformers (the default without --golden)")
    parser.add_argument("--layers", metavar="A:B", type=layers, help="compare layers A up to, not including, B")
    parser.add_argument(
        "--limit",
        metavar="X",
        type=options.tolerance,
        help="relative max-abs that passes (default: 0.001 in float32, sixteen roundings in a narrower dtype)",
    )
    parser.add_argument(
        "--streamed",
        action="store_true",
        default=None,
        help="run the reference layer by layer (default if it is large)",
    )
    options.prompt(parser)
    options.engine(parser)


def run(arguments: argparse.Namespace, session: Session) -> Report:
    engine_options = options.options_of(arguments)
    from firstlight.workbench.verify import verify

    report = verify(
        engine_options,
        arguments.golden,
        arguments.reference,
        layers=arguments.layers,
        limit=arguments.limit,
        prompt=arguments.prompt,
        pictures=arguments.image,
        trust_remote_code=arguments.trust_remote_code,
        streamed=arguments.streamed,
        progress=session.progress("verify"),
    )
    if arguments.golden is not None or arguments.layers is not None or not report.passed:
        return report
    from firstlight.workbench.infer import with_answers

    return with_answers(report, engine_options, session.progress("verify"))


def layers(text: str) -> tuple[int, int]:
    """`2:5` -> (2, 5)."""
    first, colon, last = text.partition(":")
    if not colon or not first.isdigit() or not last.isdigit() or int(first) >= int(last):
        raise argparse.ArgumentTypeError(f"{text!r} is not A:B with A less than B")
    return int(first), int(last)
