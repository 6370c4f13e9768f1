"""A bring-up as an object: the rungs as methods on one run directory, with one engine from start to profile.

with Bringup("data/samples/menagerie", tp=2) as up:
    up.scan(); up.plan(); up.load(); up.start()
    up.ask("What animal is this?", "cat.png")
    up.infer(); up.verify(); up.profile(); up.stress(); up.export()
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from firstlight.engine.errors import FirstlightError, Occupied, Refused
from firstlight.engine.findings import fatal
from firstlight.engine.parallel.cluster import launched
from firstlight.engine.parallel.hardware import CPU, Cluster, parse_cluster
from firstlight.engine.parallel.mesh import AXES, Attention, Mesh
from firstlight.engine.serving.client import EngineClient
from firstlight.engine.serving.host import Host, refuse_too_many
from firstlight.engine.serving.options import DEFAULT_CONTEXT, EngineOptions
from firstlight.engine.serving.request import SamplingParams, Usage
from firstlight.engine.settings import wait_briefly
from firstlight.engine.weights.sources.mirror import is_url, mirror
from firstlight.workbench.events import ProgressEvent
from firstlight.workbench.fallback import mode_of, use
from firstlight.workbench.faults import report_of
from firstlight.workbench.progress import Listener, Progress
from firstlight.workbench.render import words
from firstlight.workbench.report import Report, since
from firstlight.workbench.runs import Run, name_of

if TYPE_CHECKING:
    from firstlight.workbench.start import AnyHost
    from firstlight.workbench.telemetry.sampler import Sampler

ENGINE_FOLDER = "engine"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What `ask` returns; shown as its text, or in figures alone when the text was streamed already."""

    text: str
    usage: Usage
    finish: str
    was_shown: bool = False

    def __repr__(self) -> str:
        return self.figures if self.was_shown else self.text

    @property
    def figures(self) -> str:
        """`12 tokens in, 5 out, first after 0.12 s`."""
        first = self.usage.first_token_s
        wait = f", first after {words.seconds(first)}" if first is not None else ""
        return f"{self.usage.prompt_tokens} tokens in, {self.usage.completion_tokens} out{wait}"


class Bringup:
    """One bring-up of one checkpoint. Every rung returns its `Report`, which is also in the run directory.

    `run`: the run directory (default: a new one in `root`). `mesh`, or its fields by name, and `options` (those of
    `EngineOptions`: dtype, device, max_context, ...) say what engine is started. `force`: rungs go on above one that
    did not pass, which their reports show. `fallback` (never, auto, always): when the reference's own modules compute.
    `detached`: the engine outlives this process; `Bringup.attach(run)` finds it. `telemetry_hz`: readings of machine
    and engine a second, from `load` on (0: none). `listeners` get every progress event. Closing stops the engine unless
    it is detached.
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike[str],
        *,
        run: str | os.PathLike[str] | None = None,
        root: str | os.PathLike[str] = "runs",
        mesh: Mesh | None = None,
        tp: int = 1,
        pp: int = 1,
        ep: int = 1,
        sp: int = 1,
        dp: int = 1,
        attention: Attention = "divided",
        cluster: str | Cluster | None = None,
        force: bool = False,
        detached: bool = False,
        telemetry_hz: float = 1.0,
        listeners: Iterable[Listener] = (),
        **options: Any,
    ) -> None:
        wait_briefly()
        source = os.fspath(checkpoint)
        if is_url(source):
            source = str(mirror(source))
        mesh = mesh or Mesh(tp=tp, pp=pp, ep=ep, sp=sp, dp=dp, attention=attention)
        self.options = _options(source, mesh, options)
        name = name_of(source)
        self.run = Run.at(run, name, source) if run is not None else Run.create(name, source, root)
        if not _lives(self.run.directory / ENGINE_FOLDER):  # else what it was started with stays on record
            self._keep_options()
        self.force = force
        self.detached = detached
        self.host: AnyHost | None = None
        self._telemetry_hz = telemetry_hz
        self._sampler: Sampler | None = None
        self.accepted: Sequence[Mapping[str, Any]] | None = None  # answers that `validate` compares with
        self._cluster = parse_cluster(cluster) if isinstance(cluster, str) else cluster
        self._listeners = (*listeners, self._keep)

    @classmethod
    def attach(cls, run: str | os.PathLike[str], **settings: Any) -> Bringup:
        """The bring-up of a run directory again, with its engine if that still runs."""
        record = Run.attach(run).record
        saved = dict((record.engine or {}).get("options", {}))
        saved.pop("checkpoint", None)
        mesh = msgspec.convert(saved.pop("mesh", {}), Mesh)
        again = cls(record.checkpoint, run=run, mesh=mesh, **{**saved, **settings})
        folder = again.run.directory / ENGINE_FOLDER
        if (folder / "host.json").exists():
            try:
                again.host = Host.attach(folder)
                again.detached = again.host.handle.detached
            except Refused:
                again.host = None  # it has ended; `start` starts another
        return again

    # The rungs

    def scan(self, deep: bool = False) -> Report:
        """Architecture, tensors, formats, gaps, integrity; `deep` hashes every tensor."""
        from firstlight.workbench.scan import scan

        return self._rung("scan", lambda progress: scan(self.checkpoint, deep, progress, keep=self.run.directory))

    def plan(
        self, cluster: str | Cluster | None = None, context: int | None = None, concurrency: int | None = None
    ) -> Report:
        """Whether the mesh fits this machine, with what `start` will reserve of it, or another cluster."""
        from firstlight.workbench.here import this_cluster
        from firstlight.workbench.plan import plan

        wanted = parse_cluster(cluster) if isinstance(cluster, str) else cluster or self._cluster
        here = wanted or this_cluster(self.options.mesh.world_size, self.options.device)
        usual = DEFAULT_CONTEXT["cpu" if here.device.name == CPU else "cuda"]

        def layout(_: Progress) -> Report:
            if wanted is None and not self.options.hosts and launched() is None:
                refuse_too_many(self.options.mesh)
            return plan(
                self.checkpoint,
                here,
                self.options.mesh,
                context=context or self.options.max_context,
                concurrency=concurrency or self.options.max_batch,
                full_window=True,
                usual_context=usual,
            )

        return self._rung("plan", layout)

    def load(self) -> Report:
        """Every rank's weights, one after the other in this process: ledger, bytes, rate."""

        def load_them(progress: Progress) -> Report:
            from firstlight.workbench.load import load

            self._watch()

            options = self.options
            return load(self.checkpoint, options.mesh, dtype=options.dtype, device=options.device, progress=progress)

        return self._rung("load", load_them)

    def start(self, streaming: bool = False) -> Report:
        """The engine host, ready to answer.

        `streaming`: before that, one whose layers run while others are read is started up to its first token, so that
        the report has both times.
        """
        return self._rung("start", lambda progress: self._start(progress, streaming))

    def infer(self, questions: Sequence[Any] | None = None) -> Report:
        """Text and picture answers, and whether they are sound."""
        from firstlight.workbench.infer import infer

        return self._rung(
            "infer", lambda progress: infer(self.engine, questions, progress=progress, record=self.run.events.put)
        )

    def verify(
        self,
        golden: str | os.PathLike[str] | None = None,
        reference: str | None = None,
        running: bool | None = None,
        **settings: Any,
    ) -> Report:
        """The mathematics against a golden file or against transformers, layer by layer, under the same mesh.

        `running` True: the engine that runs, in its dtype; False: another one for the time being, in float32 on the
        CPU. None: the running one where it computes in float32 or on GPUs.
        """

        def compare(progress: Progress) -> Report:
            from firstlight.workbench.verify import verify

            file = None if golden is None else os.fspath(golden)
            return verify(
                self.options, file, reference, engine=self._for_verify(running), progress=progress, **settings
            )

        return self._rung("verify", compare)

    def profile(self, **settings: Any) -> Report:
        """Where the time of a token goes, on every rank."""
        from firstlight.workbench.profile import profile

        return self._rung("profile", lambda progress: profile(self.engine, progress=progress, **settings))

    def stress(self, **settings: Any) -> Report:
        """Many requests at once; `settings` as those of `workbench.stress.stress`."""
        from firstlight.workbench.stress import stress

        return self._rung("stress", lambda progress: stress(self.engine, progress=progress, **settings))

    def validate(self, accepted: Sequence[Mapping[str, Any]] | None = None) -> Report:
        """The validation set, compared with `accepted` or with the run that this one was begun from, if any."""
        from firstlight.workbench.validation import validate

        before = accepted if accepted is not None else self.accepted
        return self._rung("validate", lambda progress: validate(self.engine, before, progress=progress))

    def export(self, out: str | os.PathLike[str] | None = None) -> Report:
        """The run as one archive, with card.yaml and adaptation.yaml."""
        from firstlight.workbench.export import export

        return self._rung("export", lambda _: export(self.run, None if out is None else Path(out)))

    # The engine

    @property
    def checkpoint(self) -> str:
        return self.options.checkpoint

    @property
    def engine(self) -> EngineClient:
        """The running engine; refused before `start`."""
        if self.host is None:
            raise Refused(
                fatal(
                    "not-available",
                    "no engine runs in this bring-up",
                    expected="a started engine",
                    found="none",
                    next="call start()",
                )
            )
        return self.host.client()

    def ask(
        self,
        text: str,
        image: str | Path | bytes | Sequence[str | Path | bytes] | None = None,
        stream: bool = True,
        **params: Any,
    ) -> Answer:
        """Asks the engine; with `stream` the answer is printed as it comes. `params` as in `SamplingParams`.

        An interrupt ends the request, there and here, and leaves the engine.
        """
        from firstlight.engine.serving.stream import EngineFailed
        from firstlight.workbench.side_files import has_chat_template

        images = [] if image is None else [image] if isinstance(image, str | Path | bytes) else list(image)
        pieces: list[str] = []
        chat = has_chat_template(self.checkpoint)
        deltas = self.engine.generate(text, images, SamplingParams(**params), chat)
        try:
            for delta in deltas:
                pieces.append(delta.text)
                if stream and delta.text:
                    print(words.harmless(delta.text), end="", flush=True)
                if delta.finish == "error":
                    raise EngineFailed(delta.error or "the engine failed")
                if delta.finish is not None and delta.usage is not None:
                    if stream:
                        print(flush=True)
                    return Answer(text="".join(pieces), usage=delta.usage, finish=delta.finish, was_shown=stream)
        except KeyboardInterrupt:  # without what the connection was in the middle of
            raise KeyboardInterrupt("the request was ended; the engine goes on") from None
        finally:
            deltas.close()  # type: ignore[attr-defined]
        raise EngineFailed("the answer broke off")

    def close(self) -> None:
        """Stops the engine, unless it was started detached, and ends the event writer."""
        host, self.host = self.host, None
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            sampler.close()
        try:
            if isinstance(host, Host) and self.detached:
                host.release()
            elif host is not None:
                host.stop()
        finally:
            self.run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        done = ", ".join(f"{rung.verb} {rung.status}" for rung in self.run.record.rungs) or "nothing yet"
        return f"Bringup({self.checkpoint!r}, {self.options.mesh.describe()}, {self.run.directory}: {done})"

    def _for_verify(self, running: bool | None) -> EngineClient | None:
        if running is None:
            info = self.engine.info()
            running = info.dtype == "F32" or "cpu" not in info.device
        return self.engine if running else None

    def _watch(self) -> None:
        """Begins to take readings, once."""
        if self._sampler is None and self._telemetry_hz > 0:
            from firstlight.workbench.telemetry.sampler import Sampler

            self._sampler = Sampler(self.run.events.put, self._client, 1 / self._telemetry_hz).start()

    def _client(self) -> EngineClient | None:
        """The engine, once it answers."""
        return self.host.client() if self.host is not None else None

    # What every rung does

    def _start(self, progress: Progress, streaming: bool) -> Report:
        from firstlight.workbench import first_token
        from firstlight.workbench.start import start_host, start_report

        if self.host is not None:
            self.host.stop()
            self.host = None
        other = first_token.streamed(self.options, progress) if streaming else None
        started_s = time.perf_counter()
        folder = self.run.directory / ENGINE_FOLDER
        self._watch()
        self.host = start_host(self.options, progress, run_dir=folder, detached=self.detached)
        self._keep_options()
        duration_s = time.perf_counter() - started_s
        report = start_report(self.host.client(), duration_s, f"host in {folder}", self.host.url, other)
        return msgspec.structs.replace(report, duration_s=duration_s)

    def _rung(self, verb: str, work: Callable[[Progress], Report]) -> Report:
        """Does the work if the rungs below allow it, and appends its report, whatever came of it.

        Only a start beside an engine that runs here already is no rung of this run: nothing about it has changed.
        """
        forced, began_s = False, time.perf_counter()
        try:
            forced = self.run.require(verb, self.force)
            with self.run.working(verb):
                report = work(Progress(verb, self._listeners))
        except Occupied as error:  # this run's engine goes on, and what its start reported holds
            self.run.rest()
            return report_of(verb, self.run.record.model, error)
        except FirstlightError as error:
            report = since(report_of(verb, self.run.record.model, self._told(error)), began_s)
        if forced:
            report = msgspec.structs.replace(report, forced=True)
        report = self.run.with_losses(report)
        self.run.add(report)
        return report

    def _told(self, error: FirstlightError) -> FirstlightError:
        """An engine that does not answer, by the rank that was lost where its host knows one."""
        from firstlight.engine.serving.stream import EngineFailed
        from firstlight.workbench.start import told_by

        return told_by(self.host, error) if isinstance(error, EngineFailed) and self.host is not None else error

    def _keep_options(self) -> None:
        """What the engine of this run is started with, for `attach`."""
        self.run.update(engine={**(self.run.record.engine or {}), "options": msgspec.to_builtins(self.options)})

    def _keep(self, event: ProgressEvent) -> None:
        self.run.events.put(event)


def _lives(folder: Path) -> bool:
    """Whether an engine runs whose handle is in this folder."""
    try:
        return (folder / "host.json").exists() and Host.attach(folder).is_alive()
    except Refused:
        return False


def _options(source: str, mesh: Mesh, options: dict[str, Any]) -> EngineOptions:
    """Refuses an option that does not exist with the nearest name."""
    known = set(EngineOptions.__struct_fields__) - {"checkpoint", "mesh"}
    for name in options:
        if name not in known:
            from firstlight.workbench.arguments import refuse_unknown

            refuse_unknown(
                "option", name, sorted(known | {*AXES, "attention"}), "see firstlight.engine.serving.options"
            )
    fallback = use(mode_of(options.get("fallback", "auto")), source, bool(options.get("trust_remote_code")))
    values: dict[str, Any] = {  # a run's record has lists in the place of tuples
        name: tuple(value) if isinstance(value, list) else value for name, value in options.items()
    }
    values["fallback"] = fallback
    return EngineOptions(checkpoint=source, mesh=mesh, **values)
