"""Mixtral: Mistral's attention, every feed-forward a softmax-routed mixture of gated experts."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import (
    ATTENTION,
    TRUNK,
    activation,
    decoder,
    experts,
    gqa,
    head_dim,
    rms,
    rope,
)
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.spec import ModelSpec, MoE, Router


def spec(config: Config) -> ModelSpec:
    attention = gqa(config, rope=rope(config, head_dim(config), 1000000.0), window=config.get("sliding_window"))
    moe = MoE(
        num_experts=config.size("num_local_experts", "num_experts"),
        intermediate=config.size("intermediate_size"),
        activation=activation(config),
        router=Router(top_k=config.size("num_experts_per_tok")),
    )
    return decoder(config, "mixtral", attention, moe, norm=rms(config, 1e-5))


RULES = (
    TRUNK
    + ATTENTION
    + experts("block_sparse_moe", "w1", "w3", "w2")
    + experts("mlp", "gate_proj", "up_proj", "down_proj")
)
FAMILY = Family(
    name="mixtral", model_types=("mixtral",), spec=spec, rules=RULES, silent={"mixtral": {"num_key_value_heads": 8}}
)
