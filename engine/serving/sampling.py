"""From logits to tokens: one choice per row that depends on that row, its seed and its place in the answer alone.

Legend: R rows, V vocabulary, C columns of the table that goes to rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from firstlight.engine.serving.steps import Draw, Sampled
from firstlight.kernels.sample.reference import uniforms

if TYPE_CHECKING:
    from firstlight.kernels.registry import Choice

NO_TOKEN = -1


def choose_tokens(
    logits_RV: Tensor, draws: Sequence[Draw], steps: Sequence[int], ops: Choice, may_mask: bool = False
) -> Tensor:
    """One token per row: ids [R] int64; rows with temperature 0 take the largest logit (the lowest id among equals).

    A row with a number that is a fault gets `NO_TOKEN`, whatever its other numbers are: what broke one may have bent
    the rest, and a token is never made of such. NaN and +infinity are always a fault. So is -infinity: nothing here
    masks logits (rows that pad the vocabulary are cut off before), so it comes of a weight or of a sum that left its
    range. A model of another's making may mask tokens with it (`may_mask`), so long as one is left.
    """
    ids_R = _largest(logits_RV) if all(draw.temperature <= 0 for draw in draws) else _draw(logits_RV, draws, steps, ops)
    return ids_R.masked_fill(~_are_sound(logits_RV, may_mask), NO_TOKEN)


def _are_sound(logits_RV: Tensor, may_mask: bool) -> Tensor:
    """Which rows hold nothing but numbers, and -infinity where it may be: bool [R].

    On a CPU a sum shows what is not finite a hundred times as fast as a look at each number; where it does, each is
    looked at, since a sum of large numbers may leave its range as well. (A GPU looks fast, and must not be waited for.)
    """
    if logits_RV.device.type == "cpu" and bool((sums_R := logits_RV.sum(dim=-1)).isfinite().all()):
        return torch.ones_like(sums_R, dtype=torch.bool)
    if may_mask:
        return (logits_RV < torch.inf).all(dim=-1) & (logits_RV > -torch.inf).any(dim=-1)  # NaN is less than nothing
    return logits_RV.isfinite().all(dim=-1)


def _largest(logits_RV: Tensor) -> Tensor:
    if logits_RV.device.type == "cpu":  # numpy's search is a hundred times as fast as torch's over several rows
        return torch.from_numpy(logits_RV.numpy().argmax(axis=-1))
    return logits_RV.argmax(dim=-1)


def _draw(logits_RV: Tensor, draws: Sequence[Draw], steps: Sequence[int], ops: Choice) -> Tensor:
    device = logits_RV.device

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return ops.sample(
        logits_RV,
        column([draw.temperature for draw in draws]),
        column([draw.top_p for draw in draws]),
        torch.tensor([draw.top_k for draw in draws], dtype=torch.int64, device=device),
        column(uniforms([draw.seed for draw in draws], steps)),
    )


def table_width(draws: Sequence[Draw]) -> int:
    """Columns that `table` needs for these rows: 1 where no log probability is wanted."""
    most = max((draw.logprobs for draw in draws), default=-1)
    return 1 if most < 0 else 2 + 2 * most


def table(logits_RV: Tensor, ids_R: Tensor, draws: Sequence[Draw]) -> Tensor:
    """What rank 0 needs, as one tensor [R, C] float64: id, log probability, then the likeliest ids and theirs.

    float64 holds ids exactly. Log probabilities are those of the model (temperature 1, no limits).
    """
    width = table_width(draws)
    if width == 1:
        return ids_R.double().unsqueeze(1)
    logprobs_RV = logits_RV.float().log_softmax(dim=-1)
    count = min((width - 2) // 2, logprobs_RV.shape[1])
    columns = [ids_R.double().unsqueeze(1), logprobs_RV.gather(1, ids_R.clamp(min=0).unsqueeze(1)).double()]
    if count:
        values_RK, ids_RK = logprobs_RV.topk(count, dim=-1)
        columns += [ids_RK.double(), values_RK.double()]
    found_RC = torch.cat(columns, dim=1)
    padding = width - found_RC.shape[1]
    return torch.nn.functional.pad(found_RC, (0, padding), value=-1.0) if padding else found_RC


def read_table(table_RC: Tensor, numbers: Sequence[int], draws: Sequence[Draw]) -> tuple[Sampled, ...]:
    """The rows of `table` as data; the one place of a step where the host waits for the device."""
    if table_RC.shape[1] == 1:
        ids = table_RC.flatten().tolist()
        return tuple(Sampled(number, int(token)) for number, token in zip(numbers, ids, strict=True))
    most = (table_RC.shape[1] - 2) // 2
    return tuple(
        _sampled(number, draw, row, most) for number, draw, row in zip(numbers, draws, table_RC.tolist(), strict=True)
    )


def _sampled(number: int, draw: Draw, row: list[float], most: int) -> Sampled:
    if draw.logprobs < 0:
        return Sampled(number, int(row[0]))
    top_ids, top_values = row[2 : 2 + most], row[2 + most :]
    top = tuple((int(token), value) for token, value in zip(top_ids, top_values, strict=True) if token >= 0)
    return Sampled(number, int(row[0]), row[1], top[: draw.logprobs])
