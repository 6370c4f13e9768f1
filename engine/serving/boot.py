"""How a rank comes up: ledger, weights, model, cache, first token; each a stage that its pulse shows."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal, note
from firstlight.engine.model.build import Model
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.model.foreign import ForeignModel, ForeignSpec, provider_of
from firstlight.engine.model.rules import Matcher
from firstlight.engine.model.spec import MLA, MLP, Attention, CacheSpec, ModelSpec, MoE
from firstlight.engine.parallel.comm import Comms
from firstlight.engine.parallel.constraints import refuse_impossible
from firstlight.engine.parallel.kept import Keep, Room, settled
from firstlight.engine.parallel.mesh import HEADS, Mesh
from firstlight.engine.parallel.pieces import RankPieces, rank_pieces
from firstlight.engine.parallel.plan import room_here
from firstlight.engine.serving.cache import KVCache, cache_bytes_per_token, state_bytes_per_sequence
from firstlight.engine.serving.choices import Choices
from firstlight.engine.serving.health import Pulse
from firstlight.engine.serving.options import EngineOptions, context_of, limits_of
from firstlight.engine.serving.same_files import refuse_other_files
from firstlight.engine.serving.scheduler import Limits
from firstlight.engine.settings import Settings, read_settings
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.ledger import Ledger, account
from firstlight.engine.weights.loader import TORCH_DTYPES, Weights
from firstlight.engine.weights.loading.hold import hold, least_budget
from firstlight.kernels.registry import Choice, NotSupportedError, choose

CACHE_SHARE = 0.9  # of the device memory that is free once the weights are there


@dataclass(frozen=True, slots=True)
class Rank:
    """Everything a rank has once it is up; `load_s` is the time from the first byte to the last weight in place."""

    options: EngineOptions
    rank: int
    mesh: Mesh
    checkpoint: Checkpoint
    spec: ModelSpec
    ledger: Ledger
    weights: Weights
    model: Model | ForeignModel
    cache: KVCache
    limits: Limits
    ops: Choice
    comms: Comms
    device: torch.device
    dtype: str
    findings: tuple[Finding, ...]
    choices: Choices | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a rank comes up, and what it is to be."""

    options: EngineOptions
    comms: Comms
    pulse: Pulse
    device: torch.device
    local_ranks: int
    settings: Settings

    @property
    def rank(self) -> int:
        return self.comms.world.ranks[self.comms.world.index]

    def dtype(self, spec: ModelSpec) -> str:
        return spec.dtype if self.options.dtype == "auto" else self.options.dtype

    def context(self, spec: ModelSpec) -> int:
        return context_of(self.options, spec, self.device.type)


class _Making:
    """Compiles the native operators of a choice, where that was not done before, while weights are read."""

    def __init__(self, ops: Choice, cache_dir: Path) -> None:
        self._ops = ops
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._make, args=(cache_dir,), name="operators", daemon=True)
        self._thread.start()

    def made(self) -> Choice:
        """The choice, once what it takes is there; raises what compiling it raised."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._ops

    def _make(self, cache_dir: Path) -> None:
        try:
            self._ops.make(cache_dir)
        except BaseException as error:  # noqa: BLE001 - handed to whoever needs the operators
            self._failure = error


def bring_up(
    options: EngineOptions,
    comms: Comms,
    pulse: Pulse,
    local_rank: int = 0,
    local_ranks: int = 1,
    meet: Callable[[], None] | None = None,
) -> Rank:
    """Brings up this rank in a world that `comms` has joined. Raises `Refused` with what does not fit or is missing.

    `meet` returns when every rank has called it: loads differ by more than a collective may take.
    """
    at = _Place(options, comms, pulse, device_of(options.device, local_rank), local_ranks, read_settings())
    if at.device.type == "cpu":
        torch.set_num_threads(max(1, (options.threads or at.settings.threads) // local_ranks))
    pulse.enter("ledger")
    checkpoint, spec, matcher = _opened(options, comms, local_ranks)
    if isinstance(spec, ForeignSpec):
        return _bring_up_foreign(at, checkpoint, spec)
    ledger = account(checkpoint, spec, matcher)
    ledger.refuse_if_incomplete()
    ops = operators_of(options, spec, at.device, at.dtype(spec), at.context(spec), at.settings)
    making = _Making(ops, at.settings.cache_dir)
    pulse.enter("load")
    keep = _kept(at, checkpoint, spec, ledger, making)
    weights = _loaded(at, checkpoint, spec, ledger, keep)
    pulse.enter("build")
    making.made()
    choices = Choices(ops, at.settings.cache_dir)
    model = _built(spec, weights, ops, choices, comms, pulse, meet)
    pulse.enter("cache")
    cache, limits = _cache(at, model)
    return Rank(
        options=options,
        rank=at.rank,
        mesh=options.mesh,
        checkpoint=checkpoint,
        spec=spec,
        ledger=ledger,
        weights=weights,
        model=model,
        cache=cache,
        limits=limits,
        ops=ops,
        comms=comms,
        device=at.device,
        dtype=at.dtype(spec),
        findings=(*checkpoint.findings, *spec.findings, *ledger.findings, *_how_kept(weights.pieces, keep)),
        choices=choices,
    )


def _loaded(at: _Place, checkpoint: Checkpoint, spec: ModelSpec, ledger: Ledger, keep: Keep) -> Weights:
    """This rank's weights, in their places or on the way there; its pulse tells how many."""
    options, pulse, dtype = at.options, at.pulse, at.dtype(spec)
    pieces = rank_pieces(spec, options.mesh, at.rank, dtype, ledger, keep_packed=keep.roles, kinds=keep.kinds)
    weights = hold(
        checkpoint,
        pieces,
        at.device,
        options.residency,
        options.weights_budget,
        options.load_threads,
        partial(_largest, at.comms),
        lambda _: pulse.alive(),
        progress=lambda now: pulse.progress(now.bytes_done, now.bytes_total),
    )
    if weights.stream is not None:
        pulse.say(weights.stream.start)
    return weights


def _cache(at: _Place, model: Model) -> tuple[KVCache, Limits]:
    """Memory for what layers keep of sequences, and how many there may be."""
    options, device = at.options, at.device
    specs, heads, dtype = model.cache_specs, options.mesh.size(HEADS), TORCH_DTYPES[at.dtype(model.spec)]
    pages = most_pages(options, specs, device, dtype, at.comms)
    limits = limits_of(options, at.context(model.spec), device.type, pages)
    return KVCache(specs, limits.num_pages, limits.page_size, limits.max_batch, heads, dtype, device), limits


def _kept(at: _Place, checkpoint: Checkpoint, spec: ModelSpec, ledger: Ledger, making: _Making) -> Keep:
    """What stays packed where it can, on all ranks alike: what has room for all weights here and, by the budget, for
    what must be there at a time. So weights that come and go are kept as resident ones are, wherever they can be.
    """
    options, device, dtype = at.options, at.device, at.dtype(spec)
    is_plain = all(source.packed is None for source in ledger.sources.values())
    faster = making.made().packs_faster() if device.type == "cpu" and not is_plain else frozenset()
    settle = partial(settled, options.packed, device.type, faster, everyone=partial(_of_all, at.comms))

    def pieces_of(keep: Keep) -> RankPieces:
        return rank_pieces(spec, options.mesh, at.rank, dtype, ledger, keep.roles, keep.kinds)

    def least_of(keep: Keep) -> int:
        return least_budget(checkpoint, pieces_of(keep), device, options.residency)

    keep = settle(nbytes_of=lambda keep: pieces_of(keep).nbytes, room=Room(room_here(at.local_ranks)))
    if options.weights_budget is None or keep.is_all or is_plain:
        return keep
    return settle(nbytes_of=least_of, room=Room(options.weights_budget, is_budget=True))


def _how_kept(pieces: RankPieces, keep: Keep) -> Iterator[Finding]:
    """What stays packed of a quantized release, and why; nothing of a plain one."""
    if pieces.packings or pieces.unpacked:
        packed = sum(piece.role == "codes" for piece in pieces.pieces)
        yield note(
            "unpacked-weights",
            f"of rank {pieces.rank}'s quantized weights {packed:,} stay packed, {len(pieces.unpacked):,} do not: "
            + keep.why,
            next="nothing, or --packed always or never",
        )


def _of_all(comms: Comms, numbers: tuple[int, ...]) -> list[list[int]]:
    """What every rank says, all of them at once."""
    found: list[list[int]] = comms.control.all_gather(torch.tensor([numbers], dtype=torch.int64), 0).tolist()
    return found


def _largest(comms: Comms, number: int) -> int:
    """The largest of what every rank says, all of them at once."""
    return int(comms.control.all_gather(torch.tensor([number], dtype=torch.int64), 0).max())


def _opened(options: EngineOptions, comms: Comms, local_ranks: int) -> tuple[Checkpoint, ModelSpec, Matcher]:
    """The checkpoint, the same on all machines, and what it is; refused where this mesh cannot run it."""
    if options.fallback:
        FAMILIES.fall_back(provider_of(options.fallback, options.checkpoint, options.trust_remote_code))
    checkpoint = Checkpoint.open(options.checkpoint)
    checkpoint.refuse_if_broken()
    if local_ranks < options.mesh.world_size:
        refuse_other_files(checkpoint, comms.control)
    spec, matcher = FAMILIES.describe(checkpoint.config)
    refuse_impossible(spec, options.mesh, options.expert_exchange)
    return checkpoint, spec, matcher


def _built(
    spec: ModelSpec,
    weights: Weights,
    ops: Choice,
    choices: Choices,
    comms: Comms,
    pulse: Pulse,
    meet: Callable[[], None] | None,
) -> Model:
    """The model, with operators that every rank chose alike: it is built again where they did not at first."""
    choices.recall()
    model = Model(spec, weights, ops)
    if meet is not None:
        pulse.enter("meet")
        meet()
    if choices.agree(comms.control):
        model = Model(spec, weights, ops)
    choices.keep()
    return model


def _bring_up_foreign(at: _Place, checkpoint: Checkpoint, spec: ForeignSpec) -> Rank:
    """A rank whose model is another's; it is accounted for as it is loaded, by who loads it."""
    options, device, dtype, context = at.options, at.device, at.dtype(spec), at.context(spec)
    ops = operators_of(options, spec, device, dtype, context, at.settings)
    ops.make(at.settings.cache_dir)
    at.pulse.enter("load")
    assert FAMILIES.foreign is not None
    model = FAMILIES.foreign.load(checkpoint, spec, dtype, device)
    at.pulse.enter("cache")
    limits = limits_of(options, context, device.type, None)
    cache = KVCache(model.cache_specs, limits.num_pages, limits.page_size, limits.max_batch, 1, model.dtype, device)
    return Rank(
        options=options,
        rank=at.rank,
        mesh=options.mesh,
        checkpoint=checkpoint,
        spec=model.spec,
        ledger=model.ledger,
        weights=model.weights,
        model=model,
        cache=cache,
        limits=limits,
        ops=ops,
        comms=at.comms,
        device=at.device,
        dtype=dtype,
        findings=(*checkpoint.findings, *model.spec.findings, *model.ledger.findings),
    )


def device_of(kind: str, local_rank: int) -> torch.device:
    """The device of a rank by its number on this machine."""
    has_cuda = kind != "cpu" and torch.cuda.is_available()
    if kind == "cpu" or (kind == "auto" and not has_cuda):
        return torch.device("cpu")
    count = torch.cuda.device_count() if has_cuda else 0
    if local_rank >= count:
        raise Refused(
            fatal(
                "not-available",
                f"rank {local_rank} of this machine has no CUDA device",
                expected=f"at least {local_rank + 1} devices",
                found=f"{count} devices",
                next="use a smaller mesh, or --device cpu",
            )
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def operators_of(
    options: EngineOptions, spec: ModelSpec, device: torch.device, dtype: str, context: int, settings: Settings
) -> Choice:
    """The choice among implementations, made once; a forced one that is not possible is `Refused`."""
    shapes = shapes_of(spec, options.page_size or (context if device.type == "cpu" else 64))
    wants_triton = settings.triton_interpret and "triton" in options.operators.values()
    choice = partial(choose, device, TORCH_DTYPES[dtype], shapes, interpret=wants_triton)
    forced = dict(options.operators)
    if options.residency == "streamed" and options.weights_budget is not None:  # no copies of weights that come and go
        for name in ("native", "reference"):
            with contextlib.suppress(NotSupportedError):
                return choice(force={"linear": name, **forced})
    try:
        return choice(force=forced or None)
    except NotSupportedError as error:
        raise Refused(
            fatal("usage", str(error), next="run `firstlight doctor` for what this machine can use")
        ) from None


def shapes_of(spec: ModelSpec, page_size: int) -> dict[str, int]:
    """Sizes of the model that an operator's choice may depend on."""
    shapes = {"hidden": spec.hidden, "vocabulary": spec.vocab_size, "page_size": page_size}
    for layer in (part for whole in spec.layers for part in whole.whole):  # the last that says something counts
        match layer.mixer:
            case Attention(num_heads=heads, num_kv_heads=kv_heads, head_dim=size):
                shapes |= {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": size, "value_dim": size}
            case MLA(num_heads=heads, kv_lora_rank=rank, rope_dim=rotated):
                shapes |= {"num_heads": heads, "num_kv_heads": 1, "head_dim": rank + rotated, "value_dim": rank}
        match layer.experts or layer.ffn:
            case MLP(intermediate=width):
                shapes |= {"intermediate": width}
            case MoE(intermediate=width, num_experts=count, router=router):
                shapes |= {"intermediate": width, "num_experts": count, "top_k": router.top_k}
    return shapes


def most_pages(
    options: EngineOptions, specs: tuple[CacheSpec, ...], device: torch.device, dtype: torch.dtype, comms: Comms
) -> int | None:
    """Pages that fit the free memory of the rank with the least, so that all ranks agree; None on CPUs."""
    if device.type == "cpu":
        return None
    page_size = options.page_size or 64
    free_bytes, _ = torch.cuda.mem_get_info(device)
    a_page = cache_bytes_per_token(specs, options.mesh.size(HEADS), dtype.itemsize) * page_size
    states = state_bytes_per_sequence(specs, options.mesh.size(HEADS), dtype.itemsize) * options.max_batch
    mine = max(0, int(free_bytes * CACHE_SHARE) - states) // max(1, a_page)
    return int(comms.control.all_gather(torch.tensor([mine], dtype=torch.int64), 0).min())


def ping(comms: Comms, device: torch.device) -> float:
    """One all-reduce over every axis, named group and the world; seconds.

    A wrong sum is an error of the network, and said so.
    """
    started_s = time.perf_counter()
    for comm in (comms.tp, comms.sp, comms.ep, comms.pp, comms.dp, *comms.named.values(), comms.world):
        total = comm.all_reduce(torch.full((4,), float(comm.index + 1), device=device))
        expected = comm.size * (comm.size + 1) / 2
        if comm.size > 1 and total.tolist() != [expected] * 4:
            raise Refused(
                fatal(
                    "engine-failed",
                    f"an all-reduce over axis {comm.axis} gave a wrong sum",
                    expected=str(expected),
                    found=str(total.tolist()),
                    next="check the network between these ranks",
                )
            )
    return time.perf_counter() - started_s
