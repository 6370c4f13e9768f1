"""The choice among implementations of every operator, made once before an engine is built.

    ops = choose(torch.device("cpu"), torch.float32, {"head_dim": 64})
    ops.rms_norm(x, weight, 1e-5)        # the chosen function itself: nothing is decided per call
    ops.report()                         # what was chosen, and why the others were not

An implementation that says it serves a situation and then fails is an error. Nothing falls back in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from firstlight.kernels import operators, signatures
from firstlight.kernels.native import build
from firstlight.kernels.packed.kinds import FASTER
from firstlight.kernels.registry_types import Implementation, Situation, Verdict


class NotSupportedError(ValueError):
    """A wish for an implementation that does not exist or cannot serve the device, dtype and shapes."""


@dataclass(frozen=True, slots=True)
class Row:
    """One implementation in the report of a choice; `is_possible`: it could serve, chosen or not."""

    operator: str
    implementation: str
    chosen: bool
    reason: str
    is_possible: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen functions, one attribute per operator (see `signatures`), and the account of the choice."""

    rms_norm: signatures.RmsNorm
    add_rms_norm: signatures.AddRmsNorm
    rotary: signatures.Rotary
    gated_activation: signatures.GatedActivation
    write_cache: signatures.WriteCache
    attention: signatures.Attention
    selective_attention: signatures.SelectiveAttention
    causal_conv: signatures.CausalConv
    linear_attention: signatures.LinearAttention
    selective_scan: signatures.SelectiveScan
    router_topk: signatures.RouterTopk
    grouped_matmul: signatures.GroupedMatmul
    moe: signatures.Moe
    linear_packed: signatures.LinearPacked
    moe_packed: signatures.MoePacked
    sample: signatures.Sample
    linear: signatures.PrepareLinear
    situation: Situation
    rows: tuple[Row, ...]

    def report(self) -> tuple[Row, ...]:
        """List every implementation of every operator: chosen or not, and the reason."""
        return self.rows

    def make(self, cache_dir: Path) -> None:
        """Compile what of it must be into `cache_dir`, unless it is there, and load it; any thread may.

        Raises `BuildError` where the compiler fails.
        """
        compiled = any(row.chosen and row.implementation in ("native", "measured") for row in self.rows)
        if compiled and build.with_native(self.situation)[0]:
            build.load(cache_dir)

    def packs_faster(self) -> frozenset[str]:
        """Kinds of packed weights (`packed/kinds.py`) that the chosen product multiplies by faster than by plain ones.

        Known from measurements, not measured now: whoever asks twice is told the same.
        """
        is_native = self.record().get("linear_packed") == "native"
        return FASTER if is_native and build.has_bf16_dot() else frozenset()

    def record(self) -> dict[str, str]:
        """Name the chosen implementation of each operator; `choose(..., force=record)` makes the same choice again."""
        return {row.operator: row.implementation for row in self.rows if row.chosen}


def choose(
    device: torch.device | str,
    dtype: torch.dtype,
    shapes: Mapping[str, int] | None = None,
    *,
    force: Mapping[str, str] | str | None = None,
    interpret: bool = False,
    cache_dir: Path | None = None,
) -> Choice:
    """Choose one implementation of every operator: the first in the table that can serve, or the forced one.

    `shapes` as in `Situation`. `force` names an implementation per operator, or one for all operators ("reference").
    `interpret` says that Triton's interpreter is on (TRITON_INTERPRET=1 before triton was imported), which lets Triton
    kernels be chosen on a CPU. Operators that must be compiled are, into `cache_dir` at once or, without one, by
    `Choice.make` or, into the user's cache, when the first is called. An impossible `force` is a `NotSupportedError`
    with the reason.
    """
    situation = Situation(
        device_type=torch.device(device).type,
        dtype=dtype,
        shapes=dict(shapes or {}),
        has_triton=find_spec("triton") is not None,
        interpret=interpret,
    )
    forced = _forced(force)
    chosen: dict[str, object] = {}
    rows: list[Row] = []
    for operator in operator_names():
        candidates = implementations(operator)
        verdicts = {one.name: one.supports(situation) for one in candidates}
        taken, reasons = _pick(candidates, verdicts, forced.get(operator))
        chosen[operator] = taken.load()
        rows += [Row(operator, one.name, one is taken, reasons[one.name], verdicts[one.name][0]) for one in candidates]
    choice = Choice(**chosen, situation=situation, rows=tuple(rows))  # type: ignore[arg-type]
    if cache_dir is not None:
        choice.make(cache_dir)
    return choice


def operator_names() -> tuple[str, ...]:
    """Name the operators in the order of the table."""
    return tuple(dict.fromkeys(one.operator for one in operators.IMPLEMENTATIONS))


def implementations(operator: str) -> tuple[Implementation, ...]:
    """List the implementations of an operator, the preferred first."""
    return tuple(one for one in operators.IMPLEMENTATIONS if one.operator == operator)


def _forced(force: Mapping[str, str] | str | None) -> dict[str, str]:
    if force is None:
        return {}
    if isinstance(force, str):
        return dict.fromkeys(operator_names(), force)
    unknown = sorted(set(force) - set(operator_names()))
    if unknown:
        raise NotSupportedError(f"no operator is called {', '.join(unknown)}; there are {', '.join(operator_names())}")
    return dict(force)


def _pick(
    candidates: Sequence[Implementation], verdicts: Mapping[str, Verdict], forced: str | None
) -> tuple[Implementation, dict[str, str]]:
    """Choose one and give every candidate's reason."""
    operator = candidates[0].operator
    if forced is not None:
        if forced not in verdicts:
            raise NotSupportedError(f"{operator} has no implementation {forced}; there are {', '.join(verdicts)}")
        if not verdicts[forced][0]:
            raise NotSupportedError(f"{operator} by {forced} is not possible here: {verdicts[forced][1]}")
    taken = next((one for one in candidates if one.name == forced or (forced is None and verdicts[one.name][0])), None)
    if taken is None:
        detail = "; ".join(f"{name}: {reason}" for name, (_, reason) in verdicts.items())
        raise NotSupportedError(f"no implementation of {operator} serves this situation: {detail}")
    reasons = {
        name: reason if not possible else f"{taken.name} is preferred" for name, (possible, reason) in verdicts.items()
    }
    if forced is not None:
        reasons = {name: reason or f"{taken.name} was forced" for name, (_, reason) in verdicts.items()}
        reasons[taken.name] = "forced"
    else:
        others = [name for name, (possible, _) in verdicts.items() if possible and name != taken.name]
        reasons[taken.name] = f"preferred to {', '.join(others)}" if others else "the only one that serves here"
    return taken, reasons
