"""`firstlight generate`: one answer, printed as it comes."""

from __future__ import annotations

import argparse

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.workbench.commands import options
from firstlight.workbench.report import Report
from firstlight.workbench.session import Session

SHOWS_ITSELF = True  # the answer is the output; the report goes where --json and --run say


def arguments(parser: argparse.ArgumentParser) -> None:
    options.checkpoint(parser)
    options.prompt(parser)
    parser.add_argument("--raw", action="store_true", help="give the prompt as it is, without the chat template")
    options.sampling(parser)
    options.engine(parser)
    parser.set_defaults(max_batch=1)  # one answer: memory for more would only be waited for


def run(arguments: argparse.Namespace, session: Session) -> Report:
    if not arguments.prompt:
        raise Refused(fatal("usage", "there is no prompt", expected="--prompt TEXT", found="none", next="add --prompt"))
    params, engine_options = options.params_of(arguments), options.options_of(arguments)
    options.refuse_absent_pictures(arguments.image)
    from firstlight.workbench.engines import open_engine
    from firstlight.workbench.environment import since_process_start_s
    from firstlight.workbench.generate import generate, refuse_early

    chat = False if arguments.raw else None
    refuse_early(arguments.checkpoint, arguments.prompt, arguments.image, chat)
    with open_engine(engine_options, session.progress("generate")) as engine:
        options.say_fallback(session, engine.info())
        report = generate(
            engine,
            arguments.prompt,
            arguments.image,
            params,
            chat=chat,
            tell=session.face.text,
            since_start_s=since_process_start_s,
        )
    session.face.line()
    session.face.aside(_summary(report))
    return report


def _summary(report: Report) -> str:
    from firstlight.workbench.render.words import quantity

    values = report.metrics
    rate = values["tokens_per_s"].value
    parts = [
        f"{quantity(values['prompt_tokens'].value, 'tokens')} in",
        f"{quantity(values['completion_tokens'].value, 'tokens')} out",
        f"first after {quantity(values['first_token_s'].value, 's')}",
        *([f"then {quantity(rate, 'tokens/s')}"] if rate is not None else []),
        f"ended by {report.tables['answer'][0]['finish']}",
    ]
    return ", ".join(parts)
