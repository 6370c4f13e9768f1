"""`firstlight serve`: an engine with the OpenAI routes, until interrupted."""

from __future__ import annotations

import argparse
import signal
import time
from pathlib import Path

import msgspec

from firstlight.workbench.commands import options
from firstlight.workbench.report import Report
from firstlight.workbench.session import Session

LOOK_PERIOD_S = 0.5
DEADLINE_S = 10.0


def arguments(parser: argparse.ArgumentParser) -> None:
    options.checkpoint(parser)
    group = parser.add_argument_group("http")
    group.add_argument("--host", metavar="H", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    group.add_argument(
        "--port", metavar="P", type=options.port, default=8000, help="0 takes any free one (default 8000)"
    )
    group.add_argument("--token", metavar="T", help="bearer token that clients must send; needed beyond loopback")
    group.add_argument("--model-name", metavar="NAME", help="what /v1/models calls the model")
    group.add_argument(
        "--deadline", metavar="S", type=options.deadline, default=DEADLINE_S, help="silence after which a rank is lost"
    )
    options.engine(parser)


def run(arguments: argparse.Namespace, session: Session) -> Report:
    """Serves until SIGINT or SIGTERM, or until a rank is lost, which is a failure."""
    from firstlight.engine.errors import RankFailure
    from firstlight.engine.serving.options import HostOptions
    from firstlight.engine.serving.stream import EngineFailed
    from firstlight.workbench.start import start_host, start_report, told_by

    http = HostOptions(
        host=arguments.host,
        port=arguments.port,
        token=arguments.token,
        model_name=arguments.model_name,
        deadline_s=arguments.deadline,
    )
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))  # under a launcher as well
    folder = session.run.directory / "engine" if session.run is not None else None
    began_s = time.perf_counter()
    host = start_host(
        options.options_of(arguments), session.progress("start"), http=http, run_dir=folder, make_token=False
    )
    try:
        report = start_report(host.client(), time.perf_counter() - began_s, f"host in {host.run_dir}", host.url)
        session.outlet.write(msgspec.structs.replace(report, verb="serve"))  # the run has it as its rung `start`
        session.face.line(f"{host.url}  serves {Path(arguments.checkpoint).name} on {len(host.pids)} ranks")
        options.say_fallback(session, host.client().info())
        session.face.aside("the OpenAI routes are at /v1; interrupt to stop")
        if session.run is not None:
            session.run.add(report)
        while (health := host.health()).failure is None and health.status not in ("stopped", "failed"):
            time.sleep(LOOK_PERIOD_S)
        if (failure := health.failure) is not None:
            time.sleep(http.linger_s)  # as long as the host tells whoever asks for /health which rank it was
            raise RankFailure(failure.rank, failure.phase, failure.reason)
        return report
    except EngineFailed as error:
        raise told_by(host, error) from error
    finally:
        session.face.settle()
        host.stop()
