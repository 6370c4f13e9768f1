"""DeepSeek-V2 and V2-Lite: latent attention, softmax-routed experts, of the best groups only where the file says so."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import DENSE, TRUNK, decoder, mlp
from firstlight.engine.model.families.deepseek_v3 import MLA_RULES, attention
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import MIXTURE, mixture, router, shared_expert, sparse_layers
from firstlight.engine.model.spec import ModelSpec, MoE


def _experts(config: Config) -> MoE:
    config.only("moe_layer_freq", 1, default=1)
    config.only("scoring_func", "softmax", default="softmax")
    config.only("norm_topk_prob", False, default=False)
    grouped = config.only("topk_method", "greedy", "group_limited_greedy", default="greedy") != "greedy"
    groups, best = config.get("n_group"), config.get("topk_group")
    chooses = router(
        config,
        normalize=False,
        scale=float(config.get("routed_scaling_factor", 1.0)),
        num_groups=int(groups) if grouped else 1,
        topk_groups=int(best) if grouped else 1,
        group_score="max",
        float32=True,
    )
    return mixture(config, chooses, shared=shared_expert(config, config.size("moe_intermediate_size")))


def spec(config: Config) -> ModelSpec:
    mixer, dense, moe, sparse = attention(config), mlp(config), _experts(config), sparse_layers(config)
    config.only("mlp_bias", False, default=False)
    return decoder(config, "deepseek_v2", mixer, lambda i: moe if sparse[i] else dense)


RULES = TRUNK + MLA_RULES + DENSE + MIXTURE
FAMILY = Family(
    name="deepseek_v2",
    model_types=("deepseek_v2",),
    spec=spec,
    rules=RULES,
    silent={"deepseek_v2": {"n_shared_experts": 2}},
)
