"""Readings that mixtures of experts share: the usual keys under their several names, and the usual tensors."""

from __future__ import annotations

from typing import Any

from firstlight.engine.model.config import SHARED_EXPERTS, Config
from firstlight.engine.model.families.common import activation, one_a_layer
from firstlight.engine.model.rules import WeightRule, rule
from firstlight.engine.model.spec import MLP, MoE, Router

EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k")


def router(config: Config, **fields: Any) -> Router:
    """A router from the usual keys; `fields` overrides or adds."""
    return Router(**{"top_k": fields.get("top_k") or config.size(*CHOSEN), **fields})


def sigmoid_router(config: Config, scale: str = "routed_scaling_factor", **fields: Any) -> Router:
    """DeepSeek-V3's router: sigmoid scores, a bias that only chooses, groups by their two best, float32 throughout.

    `scale` names the key of the factor on the weights.
    """
    values: dict[str, Any] = {
        "scoring": "sigmoid",
        "normalize": bool(config.get("norm_topk_prob", True)),
        "scale": float(config.get(scale, 1.0)),
        "correction_bias": True,
        "num_groups": int(config.get("n_group", 1)),
        "topk_groups": int(config.get("topk_group", 1)),
        "group_score": "top2_sum",
        "float32": True,
    }
    return router(config, **{**values, **fields})


def mixture(config: Config, chooses: Router, width: str = "moe_intermediate_size", **fields: Any) -> MoE:
    """A mixture from the usual keys; `width` names the key of an expert's channels, `fields` overrides or adds."""
    values = {
        "num_experts": config.size(*EXPERTS),
        "intermediate": config.size(width),
        "router": chooses,
    }
    fields = fields if "activation" in fields else {"activation": activation(config), **fields}
    moe = MoE(**{**values, **fields})
    for key in (*EXPERTS, *CHOSEN):
        config.get(key)  # one number under two names in some files
    groups = chooses.num_groups
    if groups > 1 and (moe.num_experts % groups or chooses.topk_groups > groups):
        config.refuse("n_group", groups, f"a divisor of {moe.num_experts} experts, and at least topk_group")
    reachable = moe.num_experts // groups * chooses.topk_groups + moe.zero_experts
    if chooses.top_k > reachable:
        config.refuse("num_experts_per_tok", chooses.top_k, f"at most the {reachable} experts that can be chosen")
    return moe


def shared_expert(config: Config, width: int, **fields: Any) -> MLP | None:
    """The shared expert as wide as so many routed ones of `width`; None without any."""
    count = next((int(config.get(key)) for key in SHARED_EXPERTS if key in config), 0)
    return MLP(intermediate=width * count, activation=activation(config), **fields) if count else None


def sparse_layers(config: Config, first_dense: int = 0, key: str = "first_k_dense_replace") -> list[bool]:
    """Which layers have experts: `mlp_layer_types` decides where present, else all behind the first `key` layers."""
    count = config.size("num_hidden_layers")
    start = int(config.get(key, first_dense))
    kinds = config.get("mlp_layer_types", ["dense" if index < start else "sparse" for index in range(count)])
    return [kind == "sparse" for kind in one_a_layer(config, "mlp_layer_types", kinds, "dense", "sparse")]


_B = "(model.|)layers.{i}.(mlp|block_sparse_moe)."
_F = "layers.{i}.ffn."
_E = _F + "experts.{e}."
_PARTS = {"gate": "(gate_proj|w1)", "up": "(up_proj|w3)", "down": "(down_proj|w2)"}
_SHARED = "(model.|)layers.{i}.(mlp.|block_sparse_moe.|)(shared_experts|shared_expert|shared_mlp)."

ROUTER: tuple[WeightRule, ...] = (
    rule(_B + "(gate|router|gate.wg|router.gate|router.layer|router.classifier).weight", _F + "router.weight"),
    rule(_B + "(gate|router|router.classifier).bias", _F + "router.bias"),
    rule(
        _B + "(gate.|router.|experts.|)(e_score_correction_bias|expert_bias|e_score_correction.bias)",
        _F + "router.correction_bias",
    ),
    rule(_B + "(gate.|)moe_statics.e_score_correction_bias", _F + "router.correction_bias", stacked=True),
)
ONE_BY_ONE: tuple[WeightRule, ...] = tuple(
    rule(f"{_B}experts.{{e}}.{theirs}.weight", f"{_E}{ours}.weight") for ours, theirs in _PARTS.items()
)
STACKED: tuple[WeightRule, ...] = (  # [experts, out, in], gate above up
    rule(_B + "(experts.gate_up_proj|input_linear.weight)", _E + "gate.weight", _E + "up.weight", stacked=True),
    rule(_B + "(experts.down_proj|output_linear.weight)", _E + "down.weight", stacked=True),
)
SHARED_EXPERT: tuple[WeightRule, ...] = (
    *(
        rule(f"{_SHARED}{part}_proj.{kind}", f"{_F}shared.{part}.{kind}")
        for part in ("gate", "up", "down")
        for kind in ("weight", "bias")
    ),
    rule(_SHARED + "input_linear.weight", _F + "shared.gate.weight", _F + "shared.up.weight"),
    rule(_SHARED + "output_linear.weight", _F + "shared.down.weight"),
    rule("(model.|)layers.{i}.mlp.shared_expert_gate.weight", _F + "shared_gate.weight"),
)
MIXTURE = ROUTER + ONE_BY_ONE + STACKED + SHARED_EXPERT
