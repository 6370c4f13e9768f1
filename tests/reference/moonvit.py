"""MoonViT with its projector in plain float32 torch, from the published formulas: Kimi K3's, and Kimi K2.5's.

They differ by what the configuration and the tensors say: RMSNorm without biases or LayerNorm with biases, a width of
queries other than the tower's, bilinear or bicubic positions, a norm before the projector or behind it.

Sources: Kimi-VL (arXiv 2504.07491), section 2.1; NaViT (arXiv 2307.06304) for pictures of any size in one batch.

Legend: T patches of all pictures, t frames, h rows and w columns of a picture's grid, H width, N heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FLOAT_EPS = torch.finfo(torch.float32).eps  # torch's own default for an RMSNorm that names none


def image_features(tensors: Mapping[str, Tensor], config: Mapping[str, Any], pixels: Tensor, grids: Tensor) -> Tensor:
    """Patches [T, 3, size, size] of pictures with grids [pictures, 3] (frames, rows, columns) -> [features, width]."""
    x_TH = _affine(tensors, "vision_tower.patch_embed.proj", pixels.float().flatten(1))
    table = tensors["vision_tower.patch_embed.pos_emb.weight"].float()
    shapes = [tuple(int(size) for size in grid) for grid in grids]
    mode = config.get("pos_emb_interpolation_mode", "bicubic")
    x_TH = x_TH + torch.cat([positions(table, shape, mode) for shape in shapes])
    angles_TA = torch.cat([rotations(shape, _head_dim(tensors, config)) for shape in shapes])
    lengths = [frames * rows * columns for frames, rows, columns in shapes]
    for index in range(config["vt_num_hidden_layers"]):
        x_TH = block(tensors, f"vision_tower.encoder.blocks.{index}", config, x_TH, angles_TA, lengths)
    x_TH = _norm(tensors, "vision_tower.encoder.final_layernorm", x_TH)
    merged = [
        merge(part, shape, config["merge_kernel_size"]) for part, shape in zip(x_TH.split(lengths), shapes, strict=True)
    ]
    return project(tensors, config, torch.cat(merged))


def positions(table_YXH: Tensor, shape: tuple[int, int, int], mode: str) -> Tensor:
    """The learned grid stretched to the picture's, and for more than one frame a sine and cosine of its number."""
    frames, rows, columns = shape
    grid_HYX = table_YXH.permute(2, 0, 1)
    if grid_HYX.shape[1:] != (rows, columns):
        grid_HYX = F.interpolate(grid_HYX.unsqueeze(0), size=(rows, columns), mode=mode).squeeze(0)
    space_YXH = grid_HYX.permute(1, 2, 0).expand(frames, rows, columns, -1)
    if frames > 1:
        width = table_YXH.shape[-1]
        frequencies = 10000.0 ** (-torch.arange(width // 2) / (width / 2))
        turns = torch.arange(frames).unsqueeze(1) * frequencies
        space_YXH = space_YXH + torch.cat((turns.sin(), turns.cos()), 1).view(frames, 1, 1, width)
    return space_YXH.flatten(0, 2)


def rotations(shape: tuple[int, int, int], head_dim: int) -> Tensor:
    """Angles [T, D / 2] of the neighbouring pairs of a head: even pairs turn by the column, odd ones by the row."""
    frames, rows, columns = shape
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 4) / head_dim)
    across = torch.arange(columns).repeat(rows).unsqueeze(1) * frequencies
    down = torch.arange(rows).repeat_interleave(columns).unsqueeze(1) * frequencies
    return torch.stack((across, down), -1).flatten(1).repeat(frames, 1)


def rotate(x_TND: Tensor, angles_TA: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x_TND.unflatten(-1, (-1, 2)).contiguous())
    turned = pairs * torch.polar(torch.ones_like(angles_TA), angles_TA).unsqueeze(1)
    return torch.view_as_real(turned).flatten(-2)


def block(
    tensors: Mapping[str, Tensor],
    prefix: str,
    config: Mapping[str, Any],
    x_TH: Tensor,
    angles_TA: Tensor,
    lengths: list[int],
) -> Tensor:
    """One encoder block; every patch sees all patches of its own picture and none of the others."""
    heads = config["vt_num_attention_heads"]
    qkv = _affine(tensors, f"{prefix}.wqkv", _norm(tensors, f"{prefix}.norm0", x_TH))
    q_TND, k_TND, v_TND = qkv.unflatten(-1, (3, heads, -1)).unbind(1)
    q_TND, k_TND = rotate(q_TND, angles_TA), rotate(k_TND, angles_TA)
    mixed = []
    for q, k, v in zip(q_TND.split(lengths), k_TND.split(lengths), v_TND.split(lengths), strict=True):
        scores = torch.einsum("tnd,snd->nts", q, k) * q.shape[-1] ** -0.5
        mixed.append(torch.einsum("nts,snd->tnd", scores.softmax(-1), v).flatten(1))
    x_TH = x_TH + _affine(tensors, f"{prefix}.wo", torch.cat(mixed))
    inner = _affine(tensors, f"{prefix}.mlp.fc0", _norm(tensors, f"{prefix}.norm1", x_TH))
    return x_TH + _affine(tensors, f"{prefix}.mlp.fc1", F.gelu(inner, approximate="tanh"))


def merge(x_TH: Tensor, shape: tuple[int, int, int], kernel: tuple[int, int]) -> Tensor:
    """The mean over frames, then the patches of each kernel side by side: [rows / k * columns / k, k * k, H]."""
    frames, rows, columns = shape
    down, across = kernel
    grid = x_TH.view(frames, rows // down, down, columns // across, across, -1).mean(0)
    return grid.permute(0, 2, 1, 3, 4).flatten(0, 1).flatten(1, 2)


def project(tensors: Mapping[str, Tensor], config: Mapping[str, Any], merged: Tensor) -> Tensor:
    eps = config.get("projector_ln_eps", 1e-5)
    if "mm_projector.pre_norm.weight" in tensors:
        merged = _norm(tensors, "mm_projector.pre_norm", merged, eps)
    inner = F.gelu(_affine(tensors, "mm_projector.proj.0", merged.flatten(1)))
    out = _affine(tensors, "mm_projector.proj.2", inner)
    return _norm(tensors, "mm_projector.post_norm", out, eps) if "mm_projector.post_norm.weight" in tensors else out


def _head_dim(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> int:
    rows = tensors["vision_tower.encoder.blocks.0.wqkv.weight"].shape[0]
    return rows // 3 // int(config["vt_num_attention_heads"])


def _affine(tensors: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    bias = tensors.get(f"{name}.bias")
    out = x @ tensors[f"{name}.weight"].float().flatten(1).T
    return out if bias is None else out + bias.float()


def _norm(tensors: Mapping[str, Tensor], name: str, x: Tensor, eps: float | None = None) -> Tensor:
    """LayerNorm where there is a bias, RMSNorm where there is none."""
    weight, bias = tensors[f"{name}.weight"].float(), tensors.get(f"{name}.bias")
    if bias is None:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + (FLOAT_EPS if eps is None else eps)) * weight
    return F.layer_norm(x, weight.shape, weight, bias.float(), 1e-5 if eps is None else eps)
