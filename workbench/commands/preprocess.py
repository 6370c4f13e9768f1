"""`firstlight preprocess`: what goes into the model, to a file."""

from __future__ import annotations

import argparse

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.workbench.commands import options
from firstlight.workbench.report import Report
from firstlight.workbench.session import Session, refuse_unwritable


def arguments(parser: argparse.ArgumentParser) -> None:
    options.checkpoint(parser)
    options.prompt(parser)
    parser.add_argument("--chat", action="store_true", help="the prompt is one user turn in the chat template")
    parser.add_argument("--out", metavar="FILE", help="the safetensors file to write")
    parser.add_argument("--no-exif", action="store_true", help="leave pictures as stored, whatever their EXIF says")


def run(arguments: argparse.Namespace, session: Session) -> Report:
    from firstlight.workbench.inputs_report import inputs_report
    from firstlight.workbench.preprocess import preprocess

    for name in ("prompt", "out"):
        if getattr(arguments, name) is None:
            raise Refused(
                fatal("usage", f"--{name} is missing", expected=f"--{name}", found="none", next=f"add --{name}")
            )
    refuse_unwritable(arguments.out, "--out")
    options.refuse_absent_directory(arguments.checkpoint, "tokenizer.json")
    options.refuse_absent_pictures(arguments.image)
    prepared = preprocess(
        arguments.checkpoint,
        arguments.prompt,
        arguments.image,
        chat=arguments.chat,
        out=arguments.out,
        apply_exif=not arguments.no_exif,
    )
    return inputs_report(arguments.checkpoint, prepared, arguments.out)
