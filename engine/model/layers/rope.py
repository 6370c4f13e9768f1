"""Rotary position embedding: angles per token for every scaling method. Legend: T tokens, R rotated dims.

Frequencies: arXiv 2104.09864; linear: arXiv 2306.15595; dynamic NTK and YaRN: arXiv 2309.00071; llama3: the Llama 3.1
release; longrope: arXiv 2402.13753. Released configs follow transformers' reading of these, and so does this file.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from firstlight.engine.model.batch import ForwardBatch
from firstlight.engine.model.spec import Rope, RopeScaling


def angles(rope: Rope, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [T, R / 2] float32, for the tokens of a batch; computed once a step and kept in it."""
    if rope not in batch.rotary:
        batch.rotary[rope] = _angles(rope, batch)
    return batch.rotary[rope]


def angles_at(rope: Rope, positions_T: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [T, R / 2] float32, at any positions; for frequencies that no length changes."""
    assert rope.scaling is None or rope.scaling.kind not in ("dynamic", "longrope")
    angle_TR = torch.outer(positions_T.float(), frequencies(rope).to(positions_T.device))
    factor = attention_factor(rope)
    return angle_TR.cos() * factor, angle_TR.sin() * factor


def _angles(rope: Rope, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
    if rope.sections and batch.positions_3T is not None:
        return _by_axis(rope, batch.positions_3T)
    positions_T = batch.positions_T.float()
    kind = rope.scaling.kind if rope.scaling else "default"
    if kind in ("dynamic", "longrope"):
        inv_freq = torch.stack([frequencies(rope, length) for length in batch.rope_lens or batch.attention.kv_lens])
        repeats = torch.tensor(batch.attention.query_lens)
        angle_TR = positions_T[:, None] * inv_freq.repeat_interleave(repeats, dim=0).to(positions_T.device)
    else:
        angle_TR = torch.outer(positions_T, frequencies(rope).to(positions_T.device))
    factor = attention_factor(rope)
    cos_TR, sin_TR = angle_TR.cos(), angle_TR.sin()
    return (cos_TR, sin_TR) if factor == 1.0 else (cos_TR * factor, sin_TR * factor)


def _by_axis(rope: Rope, positions_3T: Tensor) -> tuple[Tensor, Tensor]:
    """Angles where each frequency uses the frame, row or column of a token (M-RoPE)."""
    axes = torch.tensor(rope.axes(), device=positions_3T.device)
    angle_TR = positions_3T[axes].T.float() * frequencies(rope).to(positions_3T.device)
    factor = attention_factor(rope)
    return angle_TR.cos() * factor, angle_TR.sin() * factor


@lru_cache(maxsize=256)
def frequencies(rope: Rope, length: int = 0) -> Tensor:
    """Inverse frequencies [R / 2] float32; `length` tokens of context matter to `dynamic` and `longrope` only."""
    exponent = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    inv_freq = 1.0 / (rope.theta**exponent)
    scaling = rope.scaling
    if scaling is None:
        return inv_freq
    if scaling.kind == "linear":
        return inv_freq / scaling.factor
    if scaling.kind == "dynamic":
        longest = max(length, rope.max_positions)
        stretch = scaling.factor * longest / rope.max_positions - (scaling.factor - 1)
        return 1.0 / ((rope.theta * stretch ** (rope.dim / (rope.dim - 2))) ** exponent)
    if scaling.kind == "llama3":
        return _llama3(inv_freq, scaling)
    if scaling.kind == "proportional":
        turns = torch.arange(rope.dim // 2) < int(scaling.share * rope.dim // 2)
        return torch.where(turns, inv_freq, 0.0) / scaling.factor
    if scaling.kind == "yarn":
        return _yarn(inv_freq, rope, scaling)
    assert scaling.kind == "longrope"
    chosen = scaling.long_factor if length > scaling.original_max_positions else scaling.short_factor
    return 1.0 / (torch.tensor(chosen, dtype=torch.float32) * rope.theta**exponent)


def _llama3(inv_freq: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between are blended."""
    wavelength = 2 * math.pi / inv_freq
    original = scaling.original_max_positions
    blend = (original / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - blend) * inv_freq / scaling.factor + blend * inv_freq
    stretched = torch.where(wavelength > original / scaling.low_freq_factor, inv_freq / scaling.factor, blended)
    return torch.where(wavelength < original / scaling.high_freq_factor, inv_freq, stretched)


def _yarn(inv_freq: Tensor, rope: Rope, scaling: RopeScaling) -> Tensor:
    """A linear ramp over dims between interpolated (slow) and kept (fast) frequencies."""

    def dim_of(rotations: float) -> float:
        original = scaling.original_max_positions
        return rope.dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_of(scaling.beta_fast), dim_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = ((torch.arange(rope.dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return inv_freq / scaling.factor * ramp + inv_freq * (1 - ramp)


def attention_factor(rope: Rope) -> float:
    """What cos and sin are multiplied by."""
    scaling = rope.scaling
    if scaling is None or scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.kind == "longrope":
        stretch, trained = scaling.factor, scaling.original_max_positions
        return 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(trained))
    if scaling.mscale and scaling.mscale_all_dim:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(scaling.factor, scaling.mscale_all_dim)
    return _mscale(scaling.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
