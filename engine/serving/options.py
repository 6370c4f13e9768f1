"""How an engine is to be started, as data that travels to every rank. No torch."""

from __future__ import annotations

import ipaddress

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.model.spec import ModelSpec
from firstlight.engine.parallel.kept import RESIDENCIES, WISHES, Residency, Wish
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.parallel.rows import EXCHANGES
from firstlight.engine.serving.scheduler import Limits

GPU_PAGE_SIZE = 64
MOST_THREADS = 1024  # beyond it systems refuse, each in its own words
DEFAULT_CONTEXT = {"cpu": 2048, "cuda": 32768}
DEFAULT_BUDGET = {"cpu": 512, "cuda": 8192}


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `Engine.start` and `Host.start` take; None means: chosen from model and device.

    `device`: auto, cpu or cuda. `dtype`: auto (the checkpoint's), BF16, F16 or F32. `max_context` counts prompt and
    answer of one sequence, `max_batch` sequences at once per replica, `token_budget` tokens of one step, `num_pages`
    pages of the cache per replica. `operators` forces implementations by operator. `threads`: CPU threads of all local
    ranks together. `residency`: all weights in memory, layers that are `streamed` through `weights_budget` bytes a rank
    (without one: read while the first pass runs), or `experts` that are read when tokens choose them. `packed`: whether
    quantized weights stay packed where an operator multiplies by them so: auto (`settled`), always or never.
    `fallback` names who provides models of architectures that no family knows (`module:function`), which run the
    checkpoint's own code only with `trust_remote_code`. `expert_exchange`: how tokens meet experts of other ranks
    (`engine/parallel/rows.py`): auto, reduce or all-to-all. `hosts`: nodes of a Ray cluster that ranks are placed on,
    or `auto`; none: this machine. `warm_up` computes one token, and one picture if the model sees, before the engine is
    ready.
    """

    checkpoint: str
    mesh: Mesh = Mesh()
    device: str = "auto"
    dtype: str = "auto"
    max_context: int | None = None
    max_batch: int = 8
    token_budget: int | None = None
    page_size: int | None = None
    num_pages: int | None = None
    operators: dict[str, str] = msgspec.field(default_factory=dict)
    threads: int | None = None
    load_threads: int | None = None
    residency: Residency = "resident"
    weights_budget: int | None = None
    packed: Wish = "auto"
    fallback: str = ""
    trust_remote_code: bool = False
    warm_up: bool = False
    comm_deadline_s: float = 120.0
    expert_exchange: str = "auto"
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu", "cuda"):
            raise _bad("device", "auto, cpu or cuda", self.device)
        if self.dtype not in ("auto", "BF16", "F16", "F32"):
            raise _bad("dtype", "auto, BF16, F16 or F32", self.dtype)
        if self.residency not in RESIDENCIES:
            raise _bad("residency", "resident, streamed or experts", self.residency)
        if self.expert_exchange not in EXCHANGES:
            raise _bad("expert_exchange", ", ".join(EXCHANGES), self.expert_exchange)
        if self.packed not in WISHES:
            raise _bad("packed", "auto, always or never", self.packed)
        if self.threads is not None and not 1 <= self.threads <= MOST_THREADS:
            raise _bad("threads", f"1 to {MOST_THREADS}", str(self.threads))
        if self.max_batch < 1:
            raise _bad("max_batch", "at least 1", str(self.max_batch))


class HostOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a host serves and how it is watched.

    `host` and `port` (0: any free one) are where HTTP listens; anything but loopback needs a `token`. `deadline_s`: how
    long a rank may be silent before it is lost; `stage_deadlines_s` changes those of a start's stages. After a failure
    rank 0 goes on to answer /health for `linger_s`, then everything ends. A client has `head_deadline_s` to send the
    head of a request and `body_deadline_s` for its body, longer where many bytes come. A trace may have
    `trace_limit_tokens` positions, padding included, and `trace_limit_bytes` of outcome.
    """

    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = None
    model_name: str | None = None
    body_limit_bytes: int = 64 << 20
    trace_limit_bytes: int = 4 << 30
    trace_limit_tokens: int = 1 << 16
    head_deadline_s: float = 10.0
    body_deadline_s: float = 30.0
    default_max_tokens: int = 512
    deadline_s: float = 10.0
    beat_period_s: float = 0.5
    step_deadline_s: float = 600.0
    stage_deadlines_s: dict[str, float] = msgspec.field(default_factory=dict)
    linger_s: float = 3.0

    def __post_init__(self) -> None:
        if not is_loopback(self.host) and not self.token:
            raise Refused(
                fatal(
                    "usage",
                    f"listening on {self.host} without a token would let anyone on the network use and stop the engine",
                    expected="a token, or a loopback address",
                    found=f"host {self.host}, no token",
                    next="give --token, or leave --host at 127.0.0.1",
                )
            )
        if self.token is not None and (not self.token or not self.token.isascii() or " " in self.token):
            raise _bad("token", "printable ASCII without spaces", "something else")


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def context_of(options: EngineOptions, spec: ModelSpec, device_type: str) -> int:
    """Tokens that one sequence may have; more than the model has positions for is `Refused`."""
    wanted = options.max_context or min(spec.max_positions, DEFAULT_CONTEXT.get(device_type, 32768))
    if wanted > spec.max_positions:
        raise Refused(
            fatal(
                "context-too-long",
                "the model has no positions for so long a context",
                expected=f"at most {spec.max_positions} tokens",
                found=f"max_context {wanted}",
                next="lower max_context",
            )
        )
    return wanted


def limits_of(options: EngineOptions, context: int, device_type: str, most_pages: int | None = None) -> Limits:
    """The scheduler's sizes. On a CPU a sequence has one page for its whole length, so that decode reads no gathers.

    `most_pages` is what the memory of the smallest rank holds; None: enough for `max_batch` sequences of full length.
    """
    page_size = options.page_size or (context if device_type == "cpu" else GPU_PAGE_SIZE)
    wanted = options.num_pages or options.max_batch * -(-context // page_size)
    budget = options.token_budget or max(DEFAULT_BUDGET.get(device_type, 8192), options.max_batch + 1)
    return Limits(
        max_batch=options.max_batch,
        token_budget=budget,
        page_size=page_size,
        num_pages=wanted if most_pages is None else min(wanted, most_pages),
        max_context=context,
        replicas=options.mesh.dp,
    )


def _bad(name: str, expected: str, found: str) -> Refused:
    return Refused(fatal("usage", f"{name} is not possible", expected=expected, found=found, next=f"correct {name}"))
