"""Operator coverage: what the reference's own modelling code computes, operator by operator, and what we have for it.

The reference is built of fake tensors (shapes without memory) and runs once; every operator that torch is asked for
is recorded with shapes, dtypes, the kind of layer and the module that asked. Rows are ordered by their share of FLOPs
and of bytes. `native`: an operator here is for modules of this kind, what it is known by was seen in the module, and
the row's operator belongs to it. `fallback`: torch itself computes it, inside the reference's module. `missing`: an
operator that is not torch's own. Each row says what its verdict rests on. A name alone proves nothing.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from firstlight.workbench.reference import quiet, without_memory
from firstlight.workbench.report import Draft
from firstlight.workbench.served import FREE, MOVES, REDUCTIONS, served

TOKENS = 64
OUTSIDE = "outside the layers"
UNSEEN = "the vision tower's operators are not among these"
UNTRACEABLE = (  # what modelling code raises that needs values, or other inputs than these
    RuntimeError,
    NotImplementedError,
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)


@dataclass(slots=True)
class _Row:
    """One operator in modules of one class in layers of one kind."""

    calls: int = 0
    flops: float = 0.0
    nbytes: float = 0.0
    shapes: str = ""


@dataclass(frozen=True, slots=True, order=True)
class _Key:
    layers: str
    module: str
    operator: str
    namespace: str


@dataclass(slots=True)
class _Asking:
    """Who asks torch for operators at the moment, innermost last."""

    stack: list[tuple[str, str]] = field(default_factory=list)

    @property
    def now(self) -> tuple[str, str]:
        return self.stack[-1] if self.stack else (OUTSIDE, "the model itself")


class _Recorder(TorchDispatchMode):
    """Counts what torch is asked for, by the module that asks."""

    def __init__(self, asking: _Asking) -> None:
        super().__init__()
        self.rows: dict[_Key, _Row] = {}
        self._asking = asking

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.").rpartition(".")[0]
        if name in FREE or func.namespace == "prim":  # views, and questions about a tensor
            return out
        tensors = list(_tensors((args, kwargs, out)))
        row = self.rows.setdefault(_Key(*self._asking.now, name, str(func.namespace)), _Row())
        row.calls += 1
        row.flops += _flops(func, name, args, kwargs or {}, out, tensors)
        row.nbytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        row.shapes = row.shapes or "; ".join(map(_form, tensors[:3]))
        return out


def _flops(func: Any, name: str, args: Any, kwargs: Any, out: Any, tensors: list[torch.Tensor]) -> float:
    """Products as torch counts them; of other arithmetic one a value."""
    packet = getattr(func, "_overloadpacket", None)
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=out))
    if "scaled_dot_product" in name:  # the counter knows those of GPUs alone
        q, k, v = args[:3]
        return float(2 * q.numel() * k.shape[-2] + 2 * q.numel() // q.shape[-1] * k.shape[-2] * v.shape[-1])
    counts = name in REDUCTIONS or (torch.Tag.pointwise in func.tags and name not in MOVES)
    return float(max((tensor.numel() for tensor in tensors), default=0)) if counts else 0.0


def _form(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)


def coverage(draft: Draft, directory: str, trust_remote_code: bool = False) -> None:
    """Adds the table `operator_coverage` of a checkpoint's architecture as transformers has it, and its checks.

    Raises `Refused` where transformers does not know the architecture either.
    """
    said: list[str] = []
    for dtype in (torch.bfloat16, torch.float32):  # some code computes in float32 alone
        with FakeTensorMode(allow_non_fake_inputs=True), quiet(), _unsaid("torch._subclasses.fake_tensor"):
            model = without_memory(directory, trust_remote_code=trust_remote_code, dtype=dtype)
            recorded = record(model, said)
        if recorded is not None:
            _tell(draft, recorded, said)
            return
    draft.check("the reference can be traced without memory", False, detail=said[0])


@contextlib.contextmanager
def _unsaid(name: str) -> Iterator[None]:
    """Nothing from a logger that also prints what is raised."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def record(model: Any, said: list[str]) -> _Recorder | None:
    """What a module of fake tensors that takes `input_ids` [1, tokens] asks torch for; called where these are the mode.

    None where it cannot be traced; then, and where pictures could not be, the reason is added to `said`.
    """
    asking = _Asking()
    recorder = _Recorder(asking)
    kinds = _layer_kinds(model)
    handles = []
    for name, module in model.named_modules():
        who = next((label for prefix, label in kinds.items() if f"{name}.".startswith(prefix)), OUTSIDE)
        pair = who, type(module).__name__
        handles.append(module.register_forward_pre_hook(lambda *_, pair=pair: asking.stack.append(pair)))
        handles.append(module.register_forward_hook(lambda *_: (asking.stack.pop(), None)[1]))
    ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    look, pixels, reason = _blank_picture(model)
    try:
        with torch.no_grad(), recorder:  # inference mode would hand operators on before they are seen
            model.eval()(input_ids=ids, use_cache=False)
            reason = reason if pixels is None else _look(look, pixels)
    except UNTRACEABLE as error:
        said.append(_first_line(error))
        return None
    finally:
        for handle in handles:
            handle.remove()
    said += [reason] if reason else []
    return recorder


def _layer_kinds(model: Any) -> dict[str, str]:
    """Prefixes of layers -> the layers of the same kind: those whose modules are of the same classes, in order."""
    lists = [name for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    outer = [name for name in outer if len(model.get_submodule(name)) > 1] or outer
    found: dict[str, str] = {}
    for name in outer:
        kinds: dict[tuple[str, ...], list[int]] = {}
        for index, layer in enumerate(model.get_submodule(name)):
            kinds.setdefault(tuple(type(part).__name__ for part in layer.modules()), []).append(index)
        for indices in kinds.values():
            label = f"{name}.{_numbers(indices)}"
            found |= {f"{name}.{index}.": label for index in indices}
    return found


def _numbers(indices: list[int]) -> str:
    """`0`, `{0..3}`, `{0,2,5}`, or of many with gaps `{12 of 0..20}`."""
    first, last = indices[0], indices[-1]
    if len(indices) == 1:
        return str(first)
    if len(indices) == last - first + 1:
        return f"{{{first}..{last}}}"
    listed = ",".join(map(str, indices))
    return f"{{{listed}}}" if len(indices) <= 4 else f"{{{len(indices)} of {first}..{last}}}"


def _blank_picture(model: Any) -> tuple[Any, torch.Tensor | None, str]:
    """(what looks at pictures, a blank one, why there is none); nothing of these for a model that does not see."""
    config = getattr(getattr(model, "config", None), "vision_config", None)
    if config is None:
        return None, None, ""
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
    inner = getattr(model, "model", None)
    look = getattr(model, "get_image_features", None) or getattr(inner, "get_image_features", None)
    if look is None or not isinstance(size, int | list | tuple):
        return None, None, f"{UNSEEN}: it takes pictures of no fixed size"
    rows, columns = (size, size) if isinstance(size, int) else size
    return look, torch.zeros(1, channels, rows, columns, dtype=model.dtype), ""


def _look(look: Any, pixels: torch.Tensor) -> str:
    """One picture through the vision tower; why that could not be done."""
    try:
        look(pixel_values=pixels)
    except UNTRACEABLE as error:
        return f"{UNSEEN}: {_first_line(error)}"
    return ""


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]


def _tell(draft: Draft, recorder: _Recorder, said: list[str]) -> None:
    rows = list(_rows(recorder))
    missing = list(dict.fromkeys(row["operator"] for row in rows if row["status"] == "missing"))
    draft.check(
        "no operator is missing",
        not missing,
        value=len(missing),
        limit=0,
        unit="operators",
        detail=", ".join(missing[:6]),
    )
    for reason in said:
        if reason.startswith(UNSEEN):
            draft.check("pictures are traced as well", None, detail=reason)
    for name, what, words in (("native_flops", "flops", "arithmetic"), ("native_bytes_moved", "bytes", "bytes moved")):
        native = 100 * sum(row[f"share_of_{what}"] for row in rows if row["status"] == "native")
        draft.metric(name, native, "%", f"of the {words} of one pass over {TOKENS} tokens; the rest runs in torch")
    gaps = dict.fromkeys(f"{row['operator']} in {row['module']}" for row in rows if row["status"] == "fallback")
    draft.metric("gaps", len(gaps), "operators", f"in torch alone: {', '.join(list(gaps)[:4])}" if gaps else "")
    draft.table("operator_coverage", rows)


def trace(draft: Draft, model: Any) -> None:
    """The table for a module of fake tensors; called where these are the mode."""
    said: list[str] = []
    recorder = record(model, said)
    if recorder is None:
        draft.check("the reference can be traced without memory", False, detail=said[0])
    else:
        _tell(draft, recorder, said)


def _rows(recorder: _Recorder) -> Iterator[dict[str, Any]]:
    """By kind of layer, module class and operator, the dearest first."""
    flops = sum(row.flops for row in recorder.rows.values()) or 1.0
    moved = sum(row.nbytes for row in recorder.rows.values()) or 1.0
    seen: dict[tuple[str, str], set[str]] = {}
    for key in recorder.rows:
        seen.setdefault((key.layers, key.module), set()).add(key.operator)
    for key, row in sorted(recorder.rows.items(), key=lambda item: (-item[1].flops, -item[1].nbytes)):
        verdict = served(key.module, key.operator, key.namespace, seen[key.layers, key.module])
        yield {
            "layers": key.layers,
            "module": key.module,
            "operator": key.operator,
            "status": verdict.status,
            "served_by": verdict.served_by,
            "evidence": verdict.evidence,
            "calls": row.calls,
            "share_of_flops": row.flops / flops,
            "share_of_bytes": row.nbytes / moved,
            "first_shapes": row.shapes,
        }
