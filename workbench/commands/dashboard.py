"""`firstlight dashboard`: pages over the runs of a folder and the engines that belong to them."""

from __future__ import annotations

import argparse
import signal
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal, what_is
from firstlight.workbench.commands import options
from firstlight.workbench.report import Draft
from firstlight.workbench.session import Session


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        metavar="RUN",
        nargs="?",
        default="runs",
        help="a run directory, or a folder of them (default runs)",
    )
    parser.add_argument("--host", metavar="H", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", metavar="P", type=options.port, default=5006, help="port to listen on")
    parser.add_argument("--token", metavar="T", help="token that a browser must bring; needed beyond loopback")


def run(arguments: argparse.Namespace, session: Session) -> NoReturn:
    """Serves until interrupted."""
    folder = Path(arguments.directory)
    if (what := what_is(folder)) != "a directory":
        raise Refused(
            fatal(
                "not-found",
                f"{arguments.directory} is not a folder of runs",
                file=arguments.directory,
                expected="a run directory, or a folder of run directories",
                found=what,
                next="firstlight up CKPT makes runs/<time>-<model>",
            )
        )
    try:
        serve = import_module("firstlight.dashboards.app").serve  # named here, as a program is: it builds on us
    except ModuleNotFoundError as error:
        raise Refused(
            fatal(
                "not-available",
                f"the dashboard needs {error.name}",
                expected="the packages of the extra `dashboard`",
                found=f"no {error.name}",
                next="pip install 'firstlight[dashboard]'",
            )
        ) from error
    is_run = (folder / "run.json").is_file()
    root, name = (folder.resolve().parent, folder.resolve().name) if is_run else (folder, None)
    server, address = serve(root, name, arguments.host, arguments.port, arguments.token)
    session.face.line(f"{address}  shows {folder}; interrupt to stop")
    draft = Draft("dashboard", str(folder))
    draft.metric("url", address, "")
    session.outlet.write(draft.close())
    loop = server.io_loop
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # the server's own way prints, and fails where nobody reads
        loop.asyncio_loop.add_signal_handler(number, loop.stop)
    try:
        server.start()
        loop.start()
    finally:
        server.stop()
    raise KeyboardInterrupt  # a signal is the only end
