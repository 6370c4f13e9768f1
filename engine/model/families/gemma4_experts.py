"""The experts that stand beside the dense feed-forward of some Gemma 4 models. No family stands here."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import in_layers
from firstlight.engine.model.rules import rule
from firstlight.engine.model.spec import MoE, Norm, Router


def experts(config: Config, norm: Norm, act: str) -> MoE | None:
    """Experts beside the dense feed-forward; their router norms what it reads by weights of its own."""
    keys = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if not config.get("enable_moe_block", False):
        for key in keys:
            config.get(key)  # without effect
        return None
    count, chosen, width = (config.size(key) for key in keys)
    if chosen > count:
        config.refuse("top_k_experts", chosen, f"at most num_experts {count}")
    router = Router(top_k=chosen, eps=0.0, norm=norm, logit_scale=config.size("hidden_size") ** -0.5, expert_scale=True)
    return MoE(num_experts=count, intermediate=width, activation=act, router=router)


_L = "(model.|)layers.{i}."
_F = "layers.{i}.ffn."
_NORMS = {
    "pre_feedforward_layernorm": "dense_norm",
    "post_feedforward_layernorm_1": "dense_post_norm",
    "pre_feedforward_layernorm_2": "experts_norm",
    "post_feedforward_layernorm_2": "experts_post_norm",
}
BESIDE = (  # where there are experts
    *in_layers({theirs: f"ffn.{ours}" for theirs, ours in _NORMS.items()}),
    *in_layers({f"mlp.{part}_proj": f"ffn.dense.{part}" for part in ("gate", "up", "down")}),
    rule(_L + "router.proj.weight", _F + "routed.router.weight"),
    rule(_L + "router.scale", _F + "routed.router.norm.weight"),
    rule(_L + "router.per_expert_scale", _F + "routed.router.expert_scale"),
    rule(
        _L + "experts.gate_up_proj",
        *(_F + f"routed.experts.{{e}}.{part}.weight" for part in ("gate", "up")),
        stacked=True,
    ),
    rule(_L + "experts.down_proj", _F + "routed.experts.{e}.down.weight", stacked=True),
)
