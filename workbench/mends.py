"""What transformers 5.24 does not get right by itself, put right in models that it has loaded."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.engine.errors import Refused
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.unpacked import Unpacked

DECAYS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")


def mend(model: Any, layers: Callable[[], Iterable[Any]]) -> None:
    """What a model of transformers needs behind loading; `layers` gives its decoder's, or raises `Refused`.

    Llama 4's forward asks the text's output for a field that it does not have. Decoders that may look ahead (PaliGemma)
    look ahead by fast attention wherever no mask is made, and by the plain one only where they are asked to. Under
    float16 alone DeepSeek-V4 keeps some projections in float32, and gives them halves all the same.
    """
    if model.dtype == torch.float16:
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) and module.weight.dtype == torch.float32:
                module.forward = functools.partial(_in_its_own_dtype, module)  # type: ignore[method-assign]
    if type(model).__name__ == "Llama4ForConditionalGeneration":
        model.language_model.register_forward_hook(_add_field)
    with contextlib.suppress(Refused):  # no list of layers
        modules = [module for layer in layers() for module in layer.modules()]
        if any(getattr(module, "is_causal", True) is False for module in modules):
            model.set_attn_implementation("eager")  # where others are given no mask they let a token see all of its row


def forget_lengths(model: Any) -> None:
    """Frequencies that lengthen with a row (`dynamic`) as they are before the first: a row longer than the trained
    length by nothing keeps those of the longest that was run before it."""
    for module in model.modules():
        if "dynamic" not in str(getattr(module, "rope_type", "")):
            continue
        for name in [*module._buffers, *vars(module)]:
            if name.endswith("original_inv_freq"):
                kind = name.removesuffix("original_inv_freq")
                module.register_buffer(f"{kind}inv_freq", getattr(module, name), persistent=False)
                setattr(module, f"{kind}max_seq_len_cached", module.original_max_seq_len)


def _in_its_own_dtype(linear: torch.nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x.to(linear.weight.dtype), linear.weight, linear.bias).to(x.dtype)


def refill(model: Any, directory: str | Path) -> None:
    """Youtu's row of the padding token as stored: transformers 5.24 loads it, and then sets it to zero."""
    for name, module in model.named_modules():
        row = getattr(module, "padding_idx", None) if isinstance(module, torch.nn.Embedding) else None
        if row is None or bool(module.weight[row].any()):
            continue
        weights = Unpacked(Checkpoint.open(directory))
        if f"{name}.weight" in weights.names:
            with torch.no_grad():
                module.weight[row] = weights.read(f"{name}.weight")[row].to(module.weight.dtype)


def sharpen(model: Any) -> None:
    """MiniMax's decays anew, in float32, where the checkpoint holds nothing but their rounding to a narrower dtype."""
    for module in model.modules():
        if not hasattr(module, "decay_factors"):
            continue
        rate = module.get_slope_rate()
        for name, exact in zip(DECAYS, (rate, *module.decay_factors(rate)), strict=True):
            held = getattr(module, name)
            if any(torch.equal(exact.to(dtype).float(), held) for dtype in (torch.bfloat16, torch.float16)):
                held.copy_(exact)


def _add_field(module: object, args: object, out: Any) -> None:
    out.image_outputs = None
