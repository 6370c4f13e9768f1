"""The implementations of the linear operator, the preferred ones first."""

from __future__ import annotations

import torch

from firstlight.kernels.linear.measured import MeasuredLinear
from firstlight.kernels.native.build import available, with_native
from firstlight.kernels.registry_types import Implementation, Situation, Verdict


def anywhere(situation: Situation) -> Verdict:
    """The reference runs wherever torch does."""
    return True, ""


def with_onednn(situation: Situation) -> Verdict:
    """oneDNN rearranges weights for CPUs; float32 stays torch's own product, which verification relies on."""
    if situation.device_type != "cpu" or situation.dtype != torch.bfloat16:
        return (
            False,
            f"made for bfloat16 on cpu, not {str(situation.dtype).removeprefix('torch.')} on {situation.device_type}",
        )
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False, "oneDNN does not compute in bfloat16 on this CPU"
    return True, ""


def to_be_measured(situation: Situation) -> Verdict:
    """Measuring is for bfloat16 on CPUs, where the candidates differ by a factor of three and the order by shape."""
    native = with_native(situation)
    return native if native[0] else with_onednn(situation)


def measured() -> MeasuredLinear:
    """A chooser among what this machine has; oneDNN, which copies every weight, only where native is missing."""
    return MeasuredLinear(("native", "reference") if available()[0] else ("reference", "onednn"))


LINEAR: tuple[Implementation, ...] = (
    Implementation(
        "linear", "measured", "firstlight.kernels.linear.table", "measured", to_be_measured, per_choice=True
    ),
    Implementation("linear", "native", "firstlight.kernels.linear.native", "prepare", with_native),
    Implementation("linear", "onednn", "firstlight.kernels.linear.onednn", "prepare", with_onednn),
    Implementation("linear", "reference", "firstlight.kernels.linear.reference", "prepare", anywhere),
)
