"""Cases of operators: what the tests, the operator report and the benchmark all run.

A case is frozen data that makes its inputs from its own name, so that everyone who runs it sees the same numbers.
`check` runs one implementation on one case and compares it with the reference on the same inputs.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from firstlight.kernels.moe.rules import ExpertRules
from firstlight.kernels.packed.matrix import PackedMatrix
from firstlight.kernels.registry import implementations

TOLERANCES: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float64: 1e-10}
)
"""Largest difference, as a share of the reference's own root mean square plus its value at that place."""

SLACK: Mapping[str, float] = MappingProxyType({"moe": 2.0, "moe_packed": 2.0})
"""Factor on the tolerance where roundings follow one another (and Triton's interpreter cuts bfloat16 off)."""


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call; `outputs` are those that the operator writes."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class Work:
    """What a call must at least do, for rates: bytes read and written once, a multiply-add counted as two."""

    bytes: int
    flops: int


class Case(Protocol):
    """One set of inputs of one operator: a frozen dataclass in `<folder>/cases.py`."""

    @property
    def operator(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def benchmark(self) -> bool:
        """Whether the case is large enough for its speed to mean something (and too large for an interpreter)."""

    @property
    def shapes(self) -> Mapping[str, int]:
        """The sizes that a choice among implementations may look at."""

    def make(self, device: torch.device, dtype: torch.dtype) -> Call: ...
    def work(self, dtype: torch.dtype) -> Work: ...
    def distance(self, got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
        """How far the outputs are from the reference's, in the unit of `TOLERANCES`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One implementation on one case in one dtype."""

    operator: str
    implementation: str
    case: str
    dtype: str
    passed: bool
    distance: float
    limit: float
    detail: str = ""


FOLDERS: Mapping[str, str] = MappingProxyType(
    {
        "rms_norm": "rms_norm",
        "add_rms_norm": "rms_norm",
        "rotary": "rotary",
        "gated_activation": "gated_activation",
        "write_cache": "attention",
        "attention": "attention",
        "causal_conv": "causal_conv",
        "linear_attention": "linear_attention",
        "selective_scan": "selective_scan",
        "router_topk": "router_topk",
        "grouped_matmul": "moe",
        "moe": "moe",
        "linear_packed": "packed",
        "moe_packed": "packed",
        "sample": "sample",
    }
)
"""Where the cases of an operator are. `linear` is not here: its implementations are classes with tests of their own."""


IN_FLOAT32 = frozenset({"router_topk", "sample"})
"""Operators whose inputs are float32 whatever the model's dtype is: one dtype is all there is to check."""


def cases(operator: str) -> tuple[Case, ...]:
    """List the cases of an operator."""
    module = import_module(f"firstlight.kernels.{FOLDERS[operator]}.cases")
    return tuple(case for case in module.CASES if case.operator == operator)


def generator(case: Case, dtype: torch.dtype) -> torch.Generator:
    """Make the source of a case's random numbers: always the CPU's, seeded by its name."""
    return torch.Generator().manual_seed(zlib.crc32(f"{case.operator} {case.name} {dtype}".encode()))


def distance(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
    """Give the largest |got - want| / (rms(want) + |want|) of all outputs; infinity for NaN, a wrong shape or dtype."""
    worst = 0.0
    for one, reference in zip(got, want, strict=True):
        if one.shape != reference.shape or one.dtype != reference.dtype:
            return float("inf")
        if reference.numel() == 0:
            continue
        if not reference.is_floating_point():
            worst = max(worst, 0.0 if torch.equal(one, reference) else float("inf"))
            continue
        a, b = one.double(), reference.double()
        if not torch.isfinite(a).all():
            return float("inf")
        scale = b.square().mean().sqrt() + b.abs()
        worst = max(worst, float(((a - b).abs() / scale.clamp_min(1e-30)).max()))
    return worst


def check(
    operator: str,
    implementation: str,
    case: Case,
    device: torch.device,
    dtype: torch.dtype,
    *,
    limit: float | None = None,
) -> Outcome:
    """Run one implementation on one case, in memory that starts as NaN, and compare it with the reference.

    An argument that was changed, other than the declared outputs, is a failure too.
    """
    functions = {one.name: one for one in implementations(operator)}
    want = run(functions["reference"].load(), case.make(device, dtype))
    call = case.make(device, dtype)
    before = [one.clone() for one in _tensors(call)]
    with nan_filled():
        got = run(functions[implementation].load(), call)
    limit = TOLERANCES[dtype] * SLACK.get(operator, 1.0) if limit is None else limit
    measured = case.distance(got, want)
    written = {id(one) for one in call.outputs}
    changed = [
        i
        for i, (old, new) in enumerate(zip(before, _tensors(call), strict=True))
        if id(new) not in written and not torch.equal(old, new)
    ]
    detail = f"tensor arguments {changed} were changed" if changed else ""
    passed = measured <= limit and not changed
    return Outcome(
        operator, implementation, case.name, str(dtype).removeprefix("torch."), passed, measured, limit, detail
    )


def run(function: Callable[..., Any], call: Call) -> tuple[Tensor, ...]:
    """Make the call and return what it returns and what it writes as a tuple."""
    result = function(*call.args, **call.kwargs)
    returned = result if isinstance(result, tuple) else () if result is None else (result,)
    return (*returned, *call.outputs)


def _tensors(call: Call) -> list[Tensor]:
    found: list[Tensor] = []
    for one in (*call.args, *call.kwargs.values()):
        if isinstance(one, PackedMatrix):
            found += one.parts
        elif isinstance(one, ExpertRules):
            found += [bias for bias in (one.gate_up_bias_E2F, one.down_bias_EH) if bias is not None]
        elif isinstance(one, Tensor):
            found.append(one)
    return found


class _NanFilled(TorchFunctionMode):
    """Fills what `torch.empty` and its kin return with NaN, or with the smallest integer."""

    _CREATORS = frozenset(
        {torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided}
    )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._CREATORS:
            if result.is_floating_point():
                result.fill_(float("nan"))
            elif result.dtype != torch.bool:
                result.fill_(torch.iinfo(result.dtype).min)
        return result


@contextmanager
def nan_filled() -> Iterator[None]:
    """Make memory that was never written show itself, on any device."""
    with _NanFilled():
        yield
