"""The runbook: a notebook executed with parameters against a real engine, kept with its page, card and adaptation file.

The notebook gets `CHECKPOINT`, `RUN` (the run directory) and what `--set` says; it drives a `NotebookBringup`, whose
reports and events are the run's. A rung that fails ends it, unless told otherwise.
"""

from __future__ import annotations

import difflib
import itertools
import json
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal, what_is
from firstlight.workbench.events import ProgressEvent
from firstlight.workbench.export import adaptation, card, latest, write_yaml
from firstlight.workbench.page import notebook_page
from firstlight.workbench.progress import Progress
from firstlight.workbench.report import Draft, Report, write_atomically
from firstlight.workbench.runbook_cover import cover
from firstlight.workbench.runs import Run, RungRecord

GIVEN = ("CHECKPOINT", "RUN", "STOP")  # parameters that every runbook has, set from the command line
FOLLOW_S = 0.2


def runbook(
    notebook: str | Path,
    checkpoint: str,
    run: Run,
    values: Mapping[str, Any] | None = None,
    *,
    go_on: bool = False,
    progress: Progress | None = None,
    listener: Callable[[ProgressEvent], None] | None = None,
) -> Report:
    """Executes `notebook` with papermill; leaves runbook.ipynb, runbook.html, card.yaml and adaptation.yaml in `run`.

    `values` are parameters of the notebook; one it does not have is `Refused`. `go_on`: rungs go on above one that
    failed. `listener` gets what the rungs tell while they work. An earlier runbook of the run is kept under a number.
    """
    progress = progress or Progress("runbook")
    source, target = Path(notebook), run.directory / "runbook.ipynb"
    parameters = {"CHECKPOINT": checkpoint, "RUN": str(run.directory.resolve()), "STOP": not go_on}
    parameters |= settings_for(source, (values or {}).items())
    _keep_earlier(run.directory)
    draft = Draft("runbook", f"{source.name}, {run.record.model}")
    run.close()  # the notebook's kernel writes it
    before = len(run.record.rungs)
    try:
        with _Following(run, listener):
            progress("execute", 0, None)
            broken = _execute(source, target, parameters)
    except KeyboardInterrupt:  # what there is by then is kept as any record is
        if target.is_file():
            _leave(run, before, draft, "interrupted", target)
        raise
    return _leave(run, before, draft, broken, target)


def _leave(run: Run, before: int, draft: Draft, broken: str, target: Path) -> Report:
    """Judges what was executed into `target`, which ended at `broken` if at all, and writes page, card, adaptation."""
    run = Run.attach(run.directory)
    _judge(draft, run.record.rungs[before:], broken, target)
    last = latest(run.reports())
    said = card(run, last) if last else _nothing_of(run)
    rungs = {verb: one for verb, one in last.items() if verb != "runbook"}  # of an earlier one, in this run
    page = _with_cover(notebook_page(target), cover(said, rungs, draft.checks))
    write_atomically(run.directory / "runbook.html", page.encode())
    if last:
        write_yaml(run.directory / "card.yaml", said)
        write_yaml(run.directory / "adaptation.yaml", adaptation(run, last))
    draft.metric("notebook", str(target), "")
    draft.metric("page", str(run.directory / "runbook.html"), "", f"{len(page.encode()):,} bytes, opens offline")
    return draft.close()


def _execute(source: Path, target: Path, parameters: Mapping[str, Any]) -> str:
    """Executes the notebook `source` into `target`; returns at what it broke off, or nothing."""
    import papermill
    from papermill.exceptions import PapermillExecutionError

    try:
        papermill.execute_notebook(
            _literally(source),
            _literally(target),
            parameters=dict(parameters),
            kernel_name="python3",
            progress_bar=False,
            log_output=False,
            cwd=str(Path.cwd()),
            config=_encrypted(),
            extra_arguments=["--log-level=CRITICAL"],  # a kernel that is stopped in the middle complains of it
        )
    except PapermillExecutionError as error:
        return f"cell {error.exec_count}: {error.ename}: {error.evalue}"
    except RuntimeError as error:  # the kernel's process has ended, or never began
        return f"the notebook's kernel ended by itself: {error}"
    return ""


def _nothing_of(run: Run) -> dict[str, Any]:
    """The card of a run that took no rung."""
    record = run.record
    named = {"model": record.model, "checkpoint": record.source, "created": record.created}
    return {**named, "command": record.command, "not_verified": [], "warnings": []}


def _with_cover(page: str, front: str) -> str:
    """The page of the notebook with the verdict before everything else."""
    return re.sub(r"<body[^>]*>", lambda found: found[0] + front, page, count=1)


def _literally(path: Path) -> str:
    """A path in which papermill fills nothing in."""
    return str(path).replace("{", "{{").replace("}", "}}")


def _keep_earlier(directory: Path) -> None:
    """Moves an earlier runbook of a run aside, to the first number that is free."""
    if not (directory / "runbook.ipynb").exists():
        return
    number = next(n for n in itertools.count(1) if not (directory / f"runbook-{n}.ipynb").exists())
    for kind in ("ipynb", "html"):
        if (directory / f"runbook.{kind}").exists():
            (directory / f"runbook.{kind}").rename(directory / f"runbook-{number}.{kind}")


def _encrypted() -> Any:
    """What has the kernel talk to this process encrypted, where both can; it warns of plain TCP otherwise."""
    import zmq
    from traitlets.config import Config

    return Config({"KernelManager": {"transport_encryption": "auto"}} if zmq.has("curve") else {})


def _judge(draft: Draft, rungs: Sequence[RungRecord], broken: str, target: Path) -> None:
    """The notebook ran to its end, and every rung it took passed; what the run held before is not its doing."""
    cells = [cell for cell in json.loads(target.read_text())["cells"] if cell["cell_type"] == "code"]
    done = sum(cell.get("execution_count") is not None for cell in cells)
    draft.check(
        "the notebook ran to its end", not broken, value=done, limit=len(cells), unit="cells", detail=broken[:300]
    )
    last = {rung.verb: rung for rung in rungs}
    draft.check("the notebook took at least one rung", bool(last), value=len(last), unit="rungs")
    for verb, rung in last.items():
        draft.check(verb, rung.status == "passed", value=rung.status, detail=rung.file)


def parameters_of(notebook: Path) -> dict[str, Any]:
    """The notebook's parameters by name, as papermill finds them; `Refused` for what is no runbook."""
    import nbformat
    import papermill

    if (what := what_is(notebook)) != "a file" or notebook.suffix != ".ipynb":
        raise Refused(
            fatal(
                "not-found",
                f"{notebook} is no notebook",
                file=str(notebook),
                expected="a file .ipynb",
                found=what if what != "a file" else "a file of another kind",
                next="notebooks/runbook_template.ipynb is one to begin with",
            )
        )
    try:
        with warnings.catch_warnings():  # of cells without an id, which older notebooks have
            warnings.simplefilter("ignore")
            nbformat.validate(nbformat.read(str(notebook), as_version=4))
            found: dict[str, Any] = papermill.inspect_notebook(_literally(notebook))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, nbformat.ValidationError) as error:
        raise Refused(
            fatal(
                "usage",
                f"{notebook} cannot be read: {str(error).partition(chr(10))[0][:200]}",
                file=str(notebook),
                expected="a Jupyter notebook",
                next="name another; notebooks/runbook_template.ipynb is one to begin with",
            )
        ) from error
    missing = [name for name in GIVEN if name not in found]
    if missing:
        raise Refused(
            fatal(
                "usage",
                f"{notebook} has no parameters {', '.join(missing)}",
                file=str(notebook),
                expected=f"a cell tagged `parameters` that sets {', '.join(GIVEN)}",
                found=", ".join(found) or "no such cell",
                next="begin with notebooks/runbook_template.ipynb",
            )
        )
    return found


def settings_for(notebook: Path, values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Parameters by the notebook's own names; `tp` stands for `TP`. `Refused`: no runbook, or none of its names."""
    known, found = parameters_of(notebook), dict[str, Any]()
    for name, value in values:
        right = name if name in known else name.upper()
        if right not in known or right in GIVEN:
            near = difflib.get_close_matches(right, [n for n in known if n not in GIVEN], n=1)
            raise Refused(
                fatal(
                    "usage",
                    f"{notebook.name} has no parameter {name!r} to set",
                    file=str(notebook),
                    expected=", ".join(n for n in known if n not in GIVEN),
                    found=name,
                    next=f"perhaps --set {near[0]}=..." if near else "correct --set",
                )
            )
        if right in found:
            raise Refused(
                fatal(
                    "usage",
                    f"the parameter {right} is set twice",
                    expected="one value",
                    found=f"{found[right]!r} and {value!r}",
                    next="leave one --set out",
                )
            )
        found[right] = value
    return found


def parse_setting(text: str) -> tuple[str, Any]:
    """`tp=2` -> ("tp", 2): the value as YAML reads it. Raises `ValueError` for anything else."""
    name, sign, value = text.partition("=")
    if not sign or not name.isidentifier():
        raise ValueError(f"{text!r} is not NAME=VALUE")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ValueError(f"{text!r}: the value cannot be read") from error


class _Following:
    """Hands on what the notebook's rungs tell, from the run's events, while it runs."""

    def __init__(self, run: Run, listener: Callable[[ProgressEvent], None] | None) -> None:
        self._reader = run.read_events()
        self._listener = listener
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, name="follow", daemon=True)

    def __enter__(self) -> None:
        if self._listener is not None:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _work(self) -> None:
        assert self._listener is not None
        seen, since_s = 0, time.time()
        while True:
            self._reader.watch()
            for identifier, event in self._reader.progress(seen):
                seen = identifier
                if event.time_s >= since_s:
                    self._listener(event)
            if self._end.wait(FOLLOW_S):
                return
