"""`firstlight up`: the whole ladder."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from firstlight.workbench.arguments import stated
from firstlight.workbench.commands import options
from firstlight.workbench.report import Report
from firstlight.workbench.runs import name_of
from firstlight.workbench.session import Session

if TYPE_CHECKING:
    from firstlight.engine.serving.options import EngineOptions

FIELDS = {"operator": "operators"}  # options whose value the engine knows by another name


def arguments(parser: argparse.ArgumentParser) -> None:
    options.checkpoint(parser)
    parser.add_argument("--golden", metavar="FILE", help="verify against this file (default: against transformers)")
    parser.add_argument("--cluster", metavar="C", help="plan for this cluster, not for this machine")
    parser.add_argument("--deep", action="store_true", help="hash every tensor in the scan")
    parser.add_argument(
        "--from", dest="adaptation", metavar="FILE", help="adaptation.yaml of an earlier run: use it, show what changed"
    )
    parser.add_argument("--detached", action="store_true", help="leave the engine running at the end")
    options.engine(parser)


def run(arguments: argparse.Namespace, session: Session) -> Report:
    options.refuse_absent_directory(arguments.checkpoint, "config.json")
    engine_options = options.options_of(arguments)
    _refuse_what_would_end_late(arguments, engine_options)
    from firstlight.workbench.bringup import Bringup
    from firstlight.workbench.ladder import climb

    adaptation = None
    if arguments.adaptation is not None:
        from firstlight.workbench.adaptation import Adaptation

        adaptation = Adaptation.read(arguments.adaptation)
        said = stated("up", arguments.words)
        fields = {"mesh"} if said & {*options.AXES, "attention"} else set()
        engine_options = adaptation.options(
            engine_options, frozenset(fields | {FIELDS.get(name, name) for name in said})
        )
    values = {name: getattr(engine_options, name) for name in engine_options.__struct_fields__}
    checkpoint, mesh = values.pop("checkpoint"), values.pop("mesh")
    given = session.run.directory if session.run is not None else None
    if session.run is not None:
        session.run.close()
        session.run = None  # the bring-up writes it
    with Bringup(
        checkpoint,
        mesh=mesh,
        run=given,
        force=session.force,
        detached=arguments.detached,
        listeners=(session.face.progress,),
        **values,
    ) as bringup:
        session.face.line(f"{name_of(checkpoint)} on {mesh.describe()}, run directory {bringup.run.directory}")
        report = climb(bringup, session.face, arguments.golden, arguments.deep, arguments.cluster, adaptation)
    session.has_said_all = True  # a line a rung as they ended; the reports are in the run directory
    return report


def _refuse_what_would_end_late(arguments: argparse.Namespace, engine_options: EngineOptions) -> None:
    """What a rung far up would refuse, before the first one begins: a golden file that is none, say."""
    from firstlight.workbench.start import refuse_detached

    if arguments.detached:
        refuse_detached(engine_options)
    if arguments.golden is not None:
        from firstlight.workbench.golden import Golden

        Golden.read(arguments.golden)
