"""The command line: one verb a call. Only the chosen verb's module is imported, so help and scan answer at once."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import argparse

    from firstlight.workbench.outlet import Outlet
    from firstlight.workbench.report import Report
    from firstlight.workbench.session import Session

VERBS: dict[str, str] = {
    "up": "the whole ladder, with a live progress view",
    "scan": "architecture, tensors, formats, operators, gaps, integrity; reads headers only",
    "plan": "does it fit, on how many devices, and what decides",
    "load": "read the weights alone: rate, ledger, memory by role",
    "generate": "one answer to a prompt and pictures, as it comes",
    "preprocess": "what goes into the model: token ids and pixel tensors, to a file",
    "verify": "compare with a golden file or with the reference, layer by layer",
    "profile": "where the time of a token goes, on every rank",
    "stress": "many requests at once",
    "serve": "an engine with the OpenAI routes, until interrupted",
    "runbook": "execute a notebook on a checkpoint",
    "export": "a run as one archive, with card.yaml and adaptation.yaml",
    "dashboard": "look at runs and a live engine in a browser",
    "lab": "open the notebooks",
    "doctor": "what this machine has, and which operators would be chosen and why",
}

ABOUT = "From a directory of weights to verified text and image answers, with the evidence written down."
EPILOG = (
    "firstlight VERB --help tells about one verb. Exit status: 0 passed, 1 a check failed, 2 refused, 130 interrupted."
)


class Command(Protocol):
    """What a module `firstlight.workbench.commands.<verb>` provides."""

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the verb's own options."""

    def run(self, arguments: argparse.Namespace, session: Session) -> Report:
        """Does it. Raises `Refused`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    from firstlight.workbench.interrupts import listening
    from firstlight.workbench.outlet import Outlet, leave_stdout

    outlet = Outlet(words)
    _print_in_any_encoding()
    try:
        with listening():
            return _main(words, outlet)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        _write_interrupted(words, outlet)
        if argv is None:
            _leave_others_behind()
        return 130
    except BrokenPipeError:  # whoever read our output has gone
        leave_stdout()
        return 1
    except Exception as error:  # noqa: BLE001 - the outermost boundary: a fault of ours is told as one, in a sentence
        return _last_resort(words, outlet, error)


def _print_in_any_encoding() -> None:
    """A character that the terminal's encoding lacks is printed as `?`, and ends nothing."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _last_resort(words: list[str], outlet: Outlet, error: Exception) -> int:
    """What went wrong outside of any verb, or while it was told: standard output that takes no more, say."""
    from firstlight.workbench.face import say_refused
    from firstlight.workbench.faults import report_of
    from firstlight.workbench.outlet import leave_stdout

    report = report_of(words[0] if words else "", "", error)
    say_refused(report.findings, lead=report.status)
    if isinstance(error, OSError):
        leave_stdout()
    else:
        _write(report, outlet)
    return report.exit_status


def _write_interrupted(words: list[str], outlet: Outlet) -> None:
    """The report of a verb that was interrupted before it had one."""
    if outlet.is_done:
        return
    from firstlight.workbench.report import interruption, since

    _write(since(interruption(words[0], outlet.title), outlet.began_s), outlet)


def _write(report: Report, outlet: Outlet) -> None:
    from firstlight.engine.errors import Refused

    with contextlib.suppress(Refused, BrokenPipeError):  # one message is enough
        outlet.write(report)


def _leave_others_behind() -> None:
    """Ends the process where threads still work, or wait for a server: Python itself would wait for them."""
    import threading

    if any(not thread.daemon and thread is not threading.current_thread() for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)


def overview() -> str:
    """What `firstlight --help` prints, within the width of the terminal."""
    import shutil
    import textwrap

    width, room = max(map(len, VERBS)), min(120, shutil.get_terminal_size((100, 24)).columns)
    rows = (f"  {verb:<{width}}  {summary}" for verb, summary in VERBS.items())
    return "\n".join(
        [
            "usage: firstlight VERB [arguments]",
            "",
            textwrap.fill(ABOUT, room),
            "",
            *(textwrap.fill(row, room, subsequent_indent=" " * (width + 4)) for row in rows),
            "",
            textwrap.fill(EPILOG, room),
        ]
    )


def _main(words: list[str], outlet: Outlet) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if words[0] == "--version":
        from importlib.metadata import version

        print(f"firstlight {version('firstlight')}")
        return 0
    from firstlight.engine.errors import Refused
    from firstlight.engine.settings import is_one_of_many, wait_briefly
    from firstlight.workbench.face import say_refused

    wait_briefly()
    try:
        if is_one_of_many():
            return _run_launched(words[0], words[1:], outlet)
        return _run_verb(words[0], words[1:], outlet)
    except Refused as refused:  # before the verb's own report could be made
        from firstlight.workbench.report import refusal

        say_refused(refused.findings)
        _write(refusal(words[0], "", refused), outlet)
        return 2


def _run_verb(verb: str, words: list[str], outlet: Outlet) -> int:
    from firstlight.engine.errors import FirstlightError
    from firstlight.workbench import arguments as parsing
    from firstlight.workbench.face import Face
    from firstlight.workbench.faults import report_of
    from firstlight.workbench.report import since
    from firstlight.workbench.session import Session, refuse_unwritable

    command = load_command(verb)
    parsed = parsing.parse(verb, command, words)
    outlet.title = _title(parsed)
    session = Session(Face(parsed.quiet, outlet.is_stdout), force=parsed.force, outlet=outlet)
    if parsed.json is not None:
        refuse_unwritable(parsed.json)
    try:
        try:
            _mirror(parsed)
            _fall_back(parsed)
            session.run = _run_directory(parsed)
            session.require(verb)
            with session.working(verb):
                report = command.run(parsed, session)
        except (FirstlightError, OSError, MemoryError) as error:
            report = since(report_of(verb, outlet.title, error), outlet.began_s)
            session.leave_run(verb, error)
        except Exception as error:  # noqa: BLE001 - the outermost boundary: a fault of ours is told as one
            report = since(report_of(verb, outlet.title, error, session.run), outlet.began_s)
        brief = getattr(command, "SHOWS_ITSELF", False)
        return session.finish(report, brief).exit_status
    finally:
        session.close()
        _fall_back(None)


def _run_launched(verb: str, words: list[str], outlet: Outlet) -> int:
    """One of several processes that a launcher started: rank 0 runs the verb, the others are its ranks."""
    from firstlight.engine.errors import RankFailure
    from firstlight.engine.parallel.cluster import launched
    from firstlight.engine.serving.launched import leading, obey
    from firstlight.workbench import arguments as parsing

    place = launched()
    assert place is not None
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a launcher means it at once, in the middle of a collective too
    try:
        if place.rank == 0:
            with leading(place):
                status = _run_verb(verb, words, outlet)
        else:
            parsed = parsing.parse(verb, load_command(verb), words)
            _mirror(parsed)
            status = obey(place, getattr(parsed, "checkpoint", None))
    except RankFailure as error:  # of what the ranks meet at, so there is nobody to report to
        print(f"firstlight: {error}", file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a thread may still wait for a rank that is lost


def load_command(verb: str) -> Command:
    """The module of a verb; an unknown one is refused with the nearest name."""
    if verb not in VERBS:
        from firstlight.workbench.arguments import refuse_unknown

        what, known = ("option", ("--help", "--version")) if verb.startswith("-") else ("verb", VERBS)
        refuse_unknown(what, verb, known, "firstlight --help lists the verbs")
    module: Any = importlib.import_module(f"firstlight.workbench.commands.{verb}")
    return module


def _run_directory(parsed: argparse.Namespace) -> Any:
    if parsed.run is None:
        return None
    from firstlight.workbench.runs import Run

    return Run.at(parsed.run, _title(parsed), getattr(parsed, "checkpoint", None) or "")


def _mirror(parsed: argparse.Namespace) -> None:
    """A checkpoint at a URL becomes the directory that mirrors it."""
    source = getattr(parsed, "checkpoint", None)
    if source and "://" in source:
        from firstlight.engine.weights.sources.mirror import mirror

        keep, patience_s = getattr(parsed, "keep", False), getattr(parsed, "patience", None)
        parsed.checkpoint = str(mirror(source, keep=keep, patience_s=patience_s))


def _fall_back(parsed: argparse.Namespace | None) -> None:
    """What no family knows is computed by the reference, as asked for; None: no longer."""
    mode = getattr(parsed, "fallback", None)
    if mode is None and parsed is not None:
        return
    from firstlight.workbench.fallback import refuse_unused_trust, use

    trusts = bool(getattr(parsed, "trust_remote_code", False))
    refuse_unused_trust(trusts, mode or "auto")
    use(mode or "never", getattr(parsed, "checkpoint", None) or "", trusts)


def _title(parsed: argparse.Namespace) -> str:
    """What a report is about: the name of the checkpoint or the run, or nothing."""
    from firstlight.workbench.runs import name_of

    subject = getattr(parsed, "checkpoint", None) or getattr(parsed, "directory", None)
    return name_of(subject) if subject else ""
