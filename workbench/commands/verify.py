"""`firstlight verify`: compare with a golden file or with the reference, layer by layer."""

from __future__ import annotations

import argparse

from firstlight.workbench.commands import options
from firstlight.workbench.report import Report
from firstlight.workbench.session import Session


def arguments(parser: argparse.ArgumentParser) -> None:
    options.checkpoint(parser)
    against = parser.add_mutually_exclusive_group()
    against.add_argument("--golden", metavar="FILE", help="a safetensors file of the reference's inputs and outputs")
    against.add_argument(
        "--reference", choices=("transformers",), help="run the reference here (default without --golden)"
    )
    parser.add_argument("--layers", metavar="A:B", type=layer_range, help="compare layers A to B - 1 only")
    parser.add_argument(
        "--limit", type=float, metavar="X", help="relative max-abs that passes (default 1e-3, more in narrow dtypes)"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="let the reference run the checkpoint's code")
    options.prompt(parser)
    options.engine(parser)


def run(arguments: argparse.Namespace, session: Session) -> Report:
    from firstlight.workbench.verify import verify

    return verify(
        options.options_of(arguments),
        arguments.golden,
        arguments.reference,
        layers=arguments.layers,
        limit=arguments.limit,
        prompt=arguments.prompt,
        pictures=arguments.image,
        trust_remote_code=arguments.trust_remote_code,
        progress=session.progress("verify"),
    )


def layer_range(text: str) -> tuple[int, int]:
    """`A:B` as numbers."""
    first, colon, last = text.partition(":")
    if not colon or not first.isdecimal() or not last.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not A:B, two whole numbers")
    return int(first), int(last)
