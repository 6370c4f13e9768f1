"""A model of transformers in float64: its own formulas, every float32 in them widened, as the truth for rounding."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Widened(TorchFunctionMode):
    """What asks for float32 is given float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if one is torch.float32 else one for one in args)
        given = {name: torch.float64 if one is torch.float32 else one for name, one in (kwargs or {}).items()}
        return func(*args, **given)


@contextmanager
def _by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def run(model: Any, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`hidden.0` ... `hidden.L` and `logits` in float64; positions are counted from each row's first token."""
    wide = copy.deepcopy(model).double()
    positions = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with _by_default(), Widened(), torch.inference_mode():
        out = wide(**given, position_ids=positions, output_hidden_states=True, use_cache=False)
    found = {f"hidden.{i}": state for i, state in enumerate(out.hidden_states)} | {"logits": out.logits}
    assert all(value.dtype == torch.float64 for value in found.values())
    return found
