"""What went wrong while a verb ran, as a report: refusals, lost ranks, the system's refusals, and faults of our own."""

from __future__ import annotations

from pathlib import Path

from firstlight.engine.errors import ABSENT, FULL, FirstlightError, RankFailure, Refused
from firstlight.engine.findings import Finding, fatal
from firstlight.workbench.report import Draft, Report, failure, refusal
from firstlight.workbench.runs import Run


def report_of(verb: str, title: str, error: BaseException, run: Run | None = None) -> Report:
    """The report of a verb that ended in `error`; a fault of ours leaves its traceback in a file, which is named."""
    if isinstance(error, Refused):
        return refusal(verb, title, error)
    if isinstance(error, RankFailure):
        return failure(verb, title, error)
    if isinstance(error, FirstlightError):
        return _engine_failed(verb, title, error)
    if isinstance(error, OSError):
        return refusal(verb, title, Refused(_of_the_system(error)))
    if isinstance(error, MemoryError):
        finding = fatal(
            "does-not-fit", "the memory of this machine was used up", next="use a smaller model or more ranks"
        )
        return refusal(verb, title, Refused(finding))
    draft = Draft(verb, title)
    draft.find(fault_of(error, run))
    return draft.close("failed")


def _engine_failed(verb: str, title: str, error: FirstlightError) -> Report:
    """An engine that stopped: with rank and phase where they are known."""
    known = getattr(error, "failure", None)
    is_rank = known.rank is not None if known is not None else str(error).startswith("rank ")
    draft = Draft(verb, title)
    if known is not None:
        draft.find(known.findings)
    draft.find(
        fatal(
            "rank-lost" if is_rank else "engine-failed",
            str(error),
            found=known.place if known is not None else None,
            next="look at the ranks' logs in the host's directory; start again",
        )
    )
    return draft.close("failed")


def _of_the_system(error: OSError) -> Finding:
    name = error.filename if isinstance(error.filename, str) else None
    is_full, is_absent = error.errno in FULL, error.errno in ABSENT
    return fatal(
        "not-found" if is_absent else "read-failed" if name and not is_full else "not-available",
        f"the system refused: {error.strerror or error}" + (f": {name}" if name else ""),
        file=name,
        found=error.strerror or str(error),
        next="make room there, or name a place on another disk"
        if is_full
        else "check that the path exists and may be used",
    )


def fault_of(error: BaseException, run: Run | None = None) -> Finding:
    """A fault of ours as a finding; the traceback goes to a file, which is named."""
    import tempfile
    import traceback

    folder = run.directory if run is not None else Path(tempfile.gettempdir())
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix="fault-", suffix=".txt", delete=False) as stream:
        traceback.print_exception(error, file=stream)
    return fatal(
        "internal-fault",
        f"a fault of Firstlight itself: {type(error).__name__}: {error}",
        file=stream.name,
        next=f"report it with the traceback in {stream.name}",
    )
