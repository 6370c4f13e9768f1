"""`firstlight serve`: an engine with the OpenAI routes, until interrupted; with `--stop`, the end of one."""

from __future__ import annotations

import argparse
import signal
import time
from pathlib import Path

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.workbench.commands import options
from firstlight.workbench.report import Report
from firstlight.workbench.runs import name_of
from firstlight.workbench.session import Session

LOOK_PERIOD_S = 0.5
DEADLINE_S = 10.0
ENGINE_FOLDER = "engine"  # of a run directory


def arguments(parser: argparse.ArgumentParser) -> None:
    options.checkpoint(parser, may_lack=True)
    parser.add_argument(
        "--stop",
        dest="ended_run",
        metavar="RUN",
        help="start nothing; end the engine of this run directory, which `up --detached` left running, say",
    )
    group = parser.add_argument_group("http")
    group.add_argument("--host", metavar="H", default="127.0.0.1", help="address to listen on")
    group.add_argument("--port", metavar="P", type=options.port, default=8000, help="0 takes any free one")
    group.add_argument("--token", metavar="T", help="bearer token that clients must send; needed beyond loopback")
    group.add_argument("--model-name", metavar="NAME", help="what /v1/models calls the model")
    group.add_argument(
        "--deadline",
        metavar="S",
        type=options.deadline,
        default=DEADLINE_S,
        help="seconds of silence after which a rank is lost",
    )
    options.engine(parser)


def run(arguments: argparse.Namespace, session: Session) -> Report:
    """Serves until SIGINT or SIGTERM, or until a rank is lost, which is a failure; or ends the engine of a run."""
    _refuse_subject(arguments)
    if arguments.ended_run is not None:
        return _stop(arguments.ended_run)
    return _serve(arguments, session)


def _refuse_subject(arguments: argparse.Namespace) -> None:
    """One of the two is named: what is served, or what is ended."""
    if (arguments.checkpoint is None) != (arguments.ended_run is None):
        return
    found = "neither" if arguments.checkpoint is None else f"{arguments.checkpoint} and --stop {arguments.ended_run}"
    raise Refused(
        fatal(
            "usage",
            "serve starts the engine of a checkpoint, or ends that of a run",
            expected="CKPT or --stop RUN",
            found=found,
            next="firstlight serve --help tells what there is",
        )
    )


def _serve(arguments: argparse.Namespace, session: Session) -> Report:
    from firstlight.engine.serving.options import HostOptions
    from firstlight.engine.serving.stream import EngineFailed
    from firstlight.workbench.start import lost, start_host, start_report, told_by

    http = HostOptions(
        host=arguments.host,
        port=arguments.port,
        token=arguments.token,
        model_name=arguments.model_name,
        deadline_s=arguments.deadline,
    )
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))  # under a launcher as well
    folder = session.run.directory / ENGINE_FOLDER if session.run is not None else None
    began_s = time.perf_counter()
    host = start_host(
        options.options_of(arguments), session.progress("start"), http=http, run_dir=folder, make_token=False
    )
    try:
        report = start_report(host.client(), time.perf_counter() - began_s, f"host in {host.run_dir}", host.url)
        session.outlet.write(msgspec.structs.replace(report, verb="serve"))  # the run has it as its rung `start`
        session.face.line(f"{host.url}  serves {name_of(arguments.checkpoint)} on {len(host.pids)} ranks")
        options.say_fallback(session, host.client().info())
        session.face.aside("the OpenAI routes are at /v1; interrupt to stop")
        if session.run is not None:
            session.run.add(report)
        while (health := host.health()).failure is None and health.status not in ("stopped", "failed"):
            time.sleep(LOOK_PERIOD_S)
        if (failure := health.failure) is not None:
            time.sleep(http.linger_s)  # as long as the host tells whoever asks for /health which rank it was
            raise lost(host, failure)
        return report
    except EngineFailed as error:
        raise told_by(host, error) from error
    finally:
        session.face.settle()
        host.stop()


def _stop(run: str) -> Report:
    """Ends the engine whose handle is in `run` or its folder `engine`, in order: requests, ranks, supervisor.

    Running requests are aborted. Raises `Refused` where no engine runs: not-found without a handle, else not-available.
    """
    from firstlight.engine.serving.host import Host
    from firstlight.engine.serving.waiting import running, until
    from firstlight.workbench.report import Draft

    inner = Path(run) / ENGINE_FOLDER
    try:
        host = Host.attach(inner if inner.is_dir() else run)
    except Refused as error:
        nothing = "name the run directory of an engine that runs; this one has none to end"
        raise Refused(msgspec.structs.replace(one, next=nothing) for one in error.findings) from error
    handle = host.handle
    model, where = name_of(handle.checkpoint), handle.url or "not listening yet"
    draft = Draft("serve", f"end of {model}, {handle.mesh.describe()}, at {where}")
    processes = running((handle.pid, *handle.pids))
    host.stop()
    until(lambda: not running(processes), DEADLINE_S)
    left = running(processes)
    draft.check(
        "every process of the engine has ended",
        not left,
        value=len(processes) - len(left),
        limit=len(processes),
        unit="processes",
        detail=f"still there: {', '.join(map(str, left))}" if left else "its ranks and what watched them",
    )
    draft.metric("run", str(host.run_dir), "", "whose engine it was")
    return draft.close()
