"""The table of operators and their implementations, the preferred ones first: a new one is a line here.

Modules are named, not imported, so that a machine without Triton, or a device that has no use for it, never loads it.
"""

from __future__ import annotations

from collections.abc import Callable

from firstlight.kernels.linear.table import LINEAR
from firstlight.kernels.native.build import with_native
from firstlight.kernels.registry_types import Implementation, Situation, Verdict

YES: Verdict = (True, "")


def anywhere(situation: Situation) -> Verdict:
    """References run wherever torch does."""
    return YES


def on_cpu(situation: Situation) -> Verdict:
    """Implementations whose gain is fewer or fused calls of torch's CPU kernels."""
    return YES if situation.device_type == "cpu" else (False, f"made for cpu, not {situation.device_type}")


def with_triton(situation: Situation) -> Verdict:
    """Triton compiles for CUDA devices; on a CPU only its interpreter runs, which is for tests."""
    if not situation.has_triton:
        return False, "triton is not installed"
    if situation.device_type != "cuda" and not situation.interpret:
        return False, f"triton does not compile for {situation.device_type}, and its interpreter is for tests"
    return YES


def _implementation(
    operator: str, name: str, supports: Callable[[Situation], Verdict], folder: str | None = None
) -> Implementation:
    module = f"firstlight.kernels.{folder or operator}.{name}"
    return Implementation(operator, name, module, operator, supports)


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    _implementation("rms_norm", "native", with_native),
    _implementation("rms_norm", "cpu", on_cpu),
    _implementation("rms_norm", "triton", with_triton),
    _implementation("rms_norm", "reference", anywhere),
    _implementation("add_rms_norm", "native", with_native, folder="rms_norm"),
    _implementation("add_rms_norm", "cpu", on_cpu, folder="rms_norm"),
    _implementation("add_rms_norm", "triton", with_triton, folder="rms_norm"),
    _implementation("add_rms_norm", "reference", anywhere, folder="rms_norm"),
    _implementation("rotary", "native", with_native),
    _implementation("rotary", "cpu", on_cpu),
    _implementation("rotary", "triton", with_triton),
    _implementation("rotary", "reference", anywhere),
    _implementation("gated_activation", "native", with_native),
    _implementation("gated_activation", "cpu", on_cpu),
    _implementation("gated_activation", "triton", with_triton),
    _implementation("gated_activation", "reference", anywhere),
    _implementation("write_cache", "native", with_native, folder="attention"),
    _implementation("write_cache", "triton", with_triton, folder="attention"),
    _implementation("write_cache", "reference", anywhere, folder="attention"),
    _implementation("attention", "native", with_native),
    _implementation("attention", "sdpa", on_cpu),
    _implementation("attention", "triton", with_triton),
    _implementation("attention", "reference", anywhere),
    _implementation("selective_attention", "reference", anywhere, folder="attention"),
    _implementation("causal_conv", "triton", with_triton),
    _implementation("causal_conv", "batched", anywhere),
    _implementation("causal_conv", "reference", anywhere),
    _implementation("linear_attention", "triton", with_triton),
    _implementation("linear_attention", "chunked", anywhere),
    _implementation("linear_attention", "reference", anywhere),
    _implementation("selective_scan", "triton", with_triton),
    _implementation("selective_scan", "batched", anywhere),
    _implementation("selective_scan", "reference", anywhere),
    _implementation("router_topk", "triton", with_triton),
    _implementation("router_topk", "reference", anywhere),
    _implementation("grouped_matmul", "cpu", on_cpu, folder="moe"),
    _implementation("grouped_matmul", "triton", with_triton, folder="moe"),
    _implementation("grouped_matmul", "reference", anywhere, folder="moe"),
    _implementation("moe", "cpu", on_cpu),
    _implementation("moe", "triton", with_triton),
    _implementation("moe", "reference", anywhere),
    *(
        _implementation(operator, name, supports, folder="packed")
        for operator in ("linear_packed", "moe_packed")
        for name, supports in (
            ("native", with_native),
            ("cpu", on_cpu),
            ("triton", with_triton),
            ("reference", anywhere),
        )
    ),
    _implementation("sample", "cpu", on_cpu),
    _implementation("sample", "reference", anywhere),
    *LINEAR,
)
