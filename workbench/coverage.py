"""Operator coverage: what the reference's own modelling code computes, operator by operator, and what we have for it.

The reference is built of fake tensors (shapes without memory) and runs once; every operator that torch is asked for
is recorded with shapes, dtypes and the module that asked. Rows are ordered by their share of FLOPs and of bytes.
`native`: a module of this kind has an operator here. `fallback`: torch itself computes it, inside the reference's
module. `missing`: an operator that is not torch's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from firstlight.workbench.reference import without_memory
from firstlight.workbench.report import Draft

TOKENS = 64
NATIVE: tuple[tuple[str, str], ...] = (  # what a module's class is called -> the operator of kernels/ that serves it
    (r"RMSNorm|RmsNorm", "rms_norm"),
    (r"LayerNorm", "torch"),
    (r"Rotary|RotaryEmbedding|Rope", "rotary"),
    (r"TopK?Router|Router|MoEGate|Gate$", "router_topk"),
    (r"Experts|SparseMoe|MoE|Moe", "moe"),
    (r"GatedDelta|KimiDelta|Kda", "linear_attention"),
    (r"Mamba|Mixer2|SSM", "linear_attention"),
    (r"Lightning|LinearAttention", "linear_attention"),
    (r"Attention|Attn", "attention"),
    (r"MLP|Mlp|FeedForward|Activation|^SiLU|^GELU", "gated_activation"),
    (r"Embedding|Embed", "torch"),
    (r"^Linear$|Conv1D$", "linear"),
    (r"Conv[123]d|DepthwiseConv", "causal_conv"),
)
FREE = frozenset(  # they move nothing
    """view _unsafe_view reshape t transpose permute expand unsqueeze squeeze alias detach slice split select
    split_with_sizes unbind chunk""".split()  # noqa: SIM905 - a wall of words reads better
)


class _Recorder(TorchDispatchMode):
    """Counts what torch is asked for, by the module that asks."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[tuple[str, str, str], list[float]] = {}
        self.shapes: dict[tuple[str, str, str], str] = {}
        self.stack: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.").rpartition(".")[0]
        if name in FREE or func.namespace == "prim":  # views, and questions about a tensor
            return out
        tensors = list(_tensors((args, kwargs, out)))
        packet = getattr(func, "_overloadpacket", None)
        flops = 0
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        elif "scaled_dot_product" in name:  # the counter knows those of GPUs alone
            q, k, v = args[:3]
            flops = 2 * q.numel() * k.shape[-2] + 2 * q.numel() // q.shape[-1] * k.shape[-2] * v.shape[-1]
        key = self.stack[-1] if self.stack else "the model itself", name, str(func.namespace)
        found = self.rows.setdefault(key, [0, 0.0, 0.0])
        found[0] += 1
        found[1] += flops
        found[2] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.shapes.setdefault(key, "; ".join(map(_form, tensors[:3])))
        return out


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
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = without_memory(directory, trust_remote_code=trust_remote_code)
        trace(draft, model)


def trace(draft: Draft, model: Any) -> None:
    """The same for a module of fake tensors that takes `input_ids` [1, tokens]; called where these are the mode."""
    recorder = _Recorder()
    handles = []
    for module in model.modules():
        name = type(module).__name__
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: recorder.stack.append(name)))
        handles.append(module.register_forward_hook(lambda *_: (recorder.stack.pop(), None)[1]))
    try:
        with torch.no_grad(), recorder:  # inference mode would hand operators on before they are seen
            model(input_ids=torch.zeros(1, TOKENS, dtype=torch.int64), use_cache=False)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        draft.check("the reference can be traced without memory", False, detail=str(error).splitlines()[0][:200])
        return
    finally:
        for handle in handles:
            handle.remove()
    rows = list(_rows(recorder))
    missing = [row["operator"] for row in rows if row["status"] == "missing"]
    native = sum(row["share_of_flops"] for row in rows if row["status"] == "native")
    said = ", ".join(missing[:6])
    draft.check("no operator is missing", not missing, value=len(missing), limit=0, unit="operators", detail=said)
    draft.metric("native_flops", native, "%", f"of one pass over {TOKENS} tokens; the rest runs in torch")
    draft.table("operator_coverage", rows)


def _rows(recorder: _Recorder) -> Iterator[dict[str, Any]]:
    """By module class and operator, the dearest first."""
    flops = sum(found[1] for found in recorder.rows.values()) or 1.0
    moved = sum(found[2] for found in recorder.rows.values()) or 1.0
    ordered = sorted(recorder.rows.items(), key=lambda item: (-item[1][1], -item[1][2]))
    for (module, operator, namespace), (calls, cost, nbytes) in ordered:
        ours = next((kernel for pattern, kernel in NATIVE if re.search(pattern, module)), None)
        status = "missing" if namespace not in ("aten", "prims") else "native" if ours else "fallback"
        yield {
            "module": module,
            "operator": operator,
            "status": status,
            "served_by": ours or "",
            "calls": int(calls),
            "share_of_flops": 100 * cost / flops,
            "share_of_bytes": 100 * nbytes / moved,
            "first_shapes": recorder.shapes[module, operator, namespace],
        }
