"""Readings that families with Mamba blocks share. No family stands here."""

from __future__ import annotations

import math
from typing import Any

from firstlight.engine.model.config import Config
from firstlight.engine.model.rules import WeightRule, ignored, rule
from firstlight.engine.model.spec import Mamba2

ENDLESS = 1 << 20  # positions: a state has no last one, and a context must end somewhere
OLDER_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}  # of kinds of layers


def limits(config: Config, key: str = "time_step_limit") -> tuple[float, float | None]:
    """The range of dt; without an upper end the file may say infinity in several ways."""
    low, high = config.get(key, (0.0, math.inf))
    above = math.inf if isinstance(high, dict) or high is None else float(high)
    return float(low), None if math.isinf(above) else above


def mamba2(config: Config, **fields: Any) -> Mamba2:
    """Mamba 2 from keys that begin with `mamba_`; `fields` overrides or adds."""
    config.only("hidden_act", "silu", default="silu")
    hidden, heads = config.size("hidden_size"), config.size("mamba_n_heads")
    width = int(config.get("mamba_d_ssm", int(config.get("mamba_expand", 2)) * hidden))
    dim = config.get("mamba_d_head", "auto")
    dim = width // heads if dim == "auto" else int(dim)
    if dim * heads != width:
        config.refuse("mamba_n_heads", heads, f"{width} channels in heads of mamba_d_head = {dim}")
    bias = bool(config.get("mamba_proj_bias", False))
    config.get("mamba_chunk_size")  # how prompts are cut, not what comes out
    values = {
        "num_heads": heads,
        "head_dim": dim,
        "state_dim": config.size("mamba_d_state"),
        "num_groups": int(config.get("mamba_n_groups", 1)),
        "eps": float(config.get("rms_norm_eps", 1e-5)),
        "conv": int(config.get("mamba_d_conv", 4)),
        "conv_bias": bool(config.get("mamba_conv_bias", True)),
        "bias": bias,
        "output_bias": bias,
        "dt_limits": limits(config),
    }
    return whole_groups(config, Mamba2(**{**values, **fields}))


def whole_groups(config: Config, spec: Mamba2) -> Mamba2:
    """Refuses heads that do not come in groups of the same size."""
    if spec.num_heads % spec.num_groups:
        config.refuse("n_groups", spec.num_groups, f"a divisor of {spec.num_heads} heads")
    return spec


def layer_kinds(config: Config, *known: str) -> list[str] | None:
    """What each layer is, by the names of transformers 5; None where the file does not list it."""
    kinds = config.get("layer_types", config.get("layers_block_type"))
    if kinds is None:
        return None
    kinds = [OLDER_NAMES.get(kind, kind) for kind in kinds]
    for kind in kinds:
        if kind not in known:
            config.unsupported("layer_types", kind, ", ".join(known))
    return kinds


_B = "(model.|backbone.|)layers.{i}.(mamba|mixer)."
_P = "layers.{i}.mixer."
MAMBA2_RULES: tuple[WeightRule, ...] = (
    *(
        rule(f"{_B}in_proj.{kind}", *(f"{_P}{part}.{kind}" for part in ("z", "x", "b", "c", "dt")))
        for kind in ("weight", "bias")
    ),
    *(rule(f"{_B}conv1d.{kind}", *(f"{_P}conv.{part}.{kind}" for part in "xbc")) for kind in ("weight", "bias")),
    rule(_B + "A_log", _P + "decay"),
    rule(_B + "D", _P + "d"),
    rule(_B + "dt_bias", _P + "dt_bias"),
    rule(_B + "norm.weight", _P + "norm.weight"),
    *(rule(f"{_B}out_proj.{kind}", f"{_P}o.{kind}") for kind in ("weight", "bias")),
)
MAMBA_RULES: tuple[WeightRule, ...] = (
    *(rule(f"{_B}in_proj.{kind}", f"{_P}x.{kind}", f"{_P}z.{kind}") for kind in ("weight", "bias")),
    *(rule(f"{_B}conv1d.{kind}", f"{_P}conv.{kind}") for kind in ("weight", "bias")),
    *(rule(f"{_B}dt_proj.{kind}", f"{_P}dt.{kind}") for kind in ("weight", "bias")),
    rule(_B + "x_proj.weight", _P + "select.weight"),
    *(rule(f"{_B}{part}_layernorm.weight", f"{_P}{part}_norm.weight") for part in ("dt", "b", "c")),
    rule(_B + "A_log", _P + "decay"),
    rule(_B + "D", _P + "d"),
    *(rule(f"{_B}out_proj.{kind}", f"{_P}o.{kind}") for kind in ("weight", "bias")),
)
BACKBONE: tuple[WeightRule, ...] = (  # names of the first Mamba releases
    rule("(backbone|model).(embeddings|embedding).weight", "embed.weight"),
    rule("(backbone|model).norm_f.weight", "norm.weight"),
    rule("lm_head.weight", "head.weight"),
    rule("(backbone|model).layers.{i}.norm.weight", "layers.{i}.mixer_norm.weight"),
    ignored("mtp.{*}", "multi-token-prediction layer, not used for inference"),
)
