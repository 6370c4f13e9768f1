"""`firstlight lab`: Jupyter on the notebooks."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.workbench.commands import options
from firstlight.workbench.report import Draft
from firstlight.workbench.session import Session


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--port", type=options.port, metavar="P", help="port of the notebook server (default: its own choice)"
    )
    parser.add_argument("--no-browser", action="store_true", help="print the address and open no browser")


def run(arguments: argparse.Namespace, session: Session) -> NoReturn:
    """Becomes `jupyter lab notebooks/`."""
    if find_spec("jupyterlab") is None:
        raise Refused(
            fatal(
                "not-available",
                "JupyterLab is not installed",
                expected="the extra `notebook`",
                found="no jupyterlab",
                next="pip install 'firstlight[notebook]'",
            )
        )
    folder = next((p for p in (Path("notebooks"), Path(__file__).parents[1] / "notebooks") if p.is_dir()), Path())
    command = [sys.executable, "-m", "jupyterlab", str(folder)]
    if arguments.port is not None:
        command += ["--port", str(arguments.port)]
    if arguments.no_browser:
        command.append("--no-browser")
    if os.geteuid() == 0:  # in a container, say: Jupyter would not start without being told so
        command.append("--allow-root")
    draft = Draft("lab", str(folder))
    draft.metric("notebooks", str(folder), "")
    session.outlet.write(draft.close())
    session.close()
    os.execv(sys.executable, command)
