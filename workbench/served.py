"""What here serves an operator that the reference's code asks torch for, and what that verdict rests on. No torch."""

from __future__ import annotations

import re
from collections.abc import Collection

import msgspec

FREE = frozenset(  # they move nothing
    """view _unsafe_view reshape t transpose permute expand unsqueeze squeeze alias detach slice split select
    split_with_sizes unbind chunk unfold""".split()
)
MOVES = frozenset(  # values go from one place to another; every operator here does so as well
    """clone _to_copy copy copy_ cat stack where masked_fill masked_fill_ constant_pad_nd index index_select gather
    scatter scatter_ scatter_add_ index_put index_put_ repeat flip roll arange full full_like zeros zeros_like ones
    ones_like empty empty_like empty_strided new_zeros new_ones new_full new_empty scalar_tensor lift_fresh fill fill_
    zero_ tril triu contiguous embedding""".split()
)
REDUCTIONS = frozenset(
    """sum mean amax amin max min prod cumsum cumprod logcumsumexp logsumexp _softmax _log_softmax softmax var std
    native_layer_norm native_group_norm topk sort argmax any all norm linalg_vector_norm""".split()
)
MASKS = "eq ne le lt ge gt logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not any all"
PRODUCTS = "mm addmm bmm baddbmm"
BENT = "silu gelu relu sigmoid tanh pow mul clamp clamp_min clamp_max"


class Kernel(msgspec.Struct, frozen=True):
    """An operator of kernels/: classes of modules it is for, what it is known by (one of these), what belongs to it."""

    name: str
    classes: str
    known_by: tuple[str, ...]
    parts: frozenset[str]

    def known(self, seen: Collection[str]) -> str | None:
        """Of what a module asks for, the operator that this one is known by."""
        return next((one for one in self.known_by if one in seen), None)


def _kernel(name: str, classes: str, known_by: str, parts: str = "") -> Kernel:
    marks = tuple(known_by.split())
    return Kernel(name, classes, marks, frozenset((*marks, *parts.split())))


SDPA = (
    "_softmax scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_attention_math _scaled_dot_product_fused_attention_overrideable"
)
KERNELS: tuple[Kernel, ...] = (  # of several for a class the first that is known by what was seen counts
    _kernel("rms_norm", r"RMSNorm|RmsNorm", "rsqrt rms_norm _fused_rms_norm", "pow square mean add add_ mul neg"),
    _kernel("torch", r"LayerNorm", "native_layer_norm rsqrt", "pow mean add mul sub var div"),
    _kernel("rotary", r"Rotary|Rope|RoPE", "cos", f"sin {PRODUCTS} mul add div reciprocal pow outer neg"),
    _kernel(
        "router_topk",
        r"TopK?Router|Router|MoEGate|Gate$|Gating",
        "topk",
        f"{PRODUCTS} {MASKS} _softmax sigmoid softplus sqrt add sub mul div sum sort clamp_min",
    ),
    _kernel(
        "moe",
        r"Experts?$|SparseMoe|MoE|Moe",
        "bmm _grouped_mm mm",
        f"{PRODUCTS} {BENT} {MASKS} sum index_add index_add_ add sub histc one_hot topk _softmax sort argsort div",
    ),
    _kernel(
        "linear_attention",
        r"GatedDelta|KimiDelta|Kda|Mamba|Mixer2|SSM|Lightning|LinearAttention",
        "exp softplus cumsum",
        f"{PRODUCTS} {BENT} {MASKS} add sub sum cumsum neg exp rsqrt div convolution linalg_solve_triangular",
    ),
    _kernel("causal_conv", r"Conv|Mamba|Mixer2|GatedDelta|KimiDelta|Kda", "convolution", "silu add mul sum"),
    _kernel("attention", r"Attention|Attn", SDPA, f"{PRODUCTS} {MASKS} add mul neg div sigmoid tanh"),
    _kernel(
        "gated_activation",
        r"MLP|Mlp|FeedForward|FFN|Ffn|Activation|^SiLU|^GELU|^ReLU",
        "silu gelu relu sigmoid mul",
        BENT,
    ),
    _kernel("attention", r"Model$|Decoder$", "le bitwise_and arange cumsum", f"{MASKS} add sub"),  # positions and masks
    _kernel("torch", r"Embedding|Embed", "embedding", "mul"),
    _kernel("linear", r"^Linear$|Conv1D$", "mm addmm"),
    _kernel("torch", r"^Conv[123]d$", "convolution"),
)
RESIDUAL = re.compile(r"(Layer|Block)$")


class Verdict(msgspec.Struct, frozen=True):
    """`native`, `fallback` or `missing`; the operator here that serves it; why."""

    status: str
    served_by: str
    evidence: str


def served(module: str, operator: str, namespace: str, seen: Collection[str]) -> Verdict:
    """What serves `operator` in modules of class `module`, which ask for all of `seen`."""
    if namespace not in ("aten", "prims"):
        return Verdict("missing", "", f"{namespace} is not torch's own: nothing here computes it")
    named = [kernel for kernel in KERNELS if re.search(kernel.classes, module)]
    known = [(kernel, mark) for kernel in named if (mark := kernel.known(seen)) is not None]
    for kernel, mark in known:
        if operator in kernel.parts or operator in MOVES:
            part = "" if operator == mark else f", of which {operator} is a part"
            return Verdict("native", kernel.name, f"{mark} seen in {module}{part}")
    if operator == "add" and RESIDUAL.search(module):
        return Verdict("native", "residual", f"a sum in {module}: the residual stream")
    if operator in MOVES and not named:
        return Verdict("fallback", "", f"{operator} moves values; no operator here is for modules like {module}")
    if known:
        return Verdict("fallback", "", f"{operator} in {module} is no part of {known[0][0].name} here")
    if named:
        marks = " or ".join(named[0].known_by[:2])
        return Verdict("fallback", "", f"{module} asks for no {marks}: it is no {named[0].name} as here")
    return Verdict("fallback", "", f"no operator here is for modules like {module}")
