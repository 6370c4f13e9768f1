"""Qwen3-MoE: Qwen3's attention over softmax-routed experts; some layers may stay dense."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import LLAMA, QK_NORM, activation, decoder, experts, head_dim, mlp
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.qwen3 import attention
from firstlight.engine.model.spec import FeedForward, ModelSpec, MoE, Router


def spec(config: Config) -> ModelSpec:
    step, dense_layers = int(config.get("decoder_sparse_step", 1)), set(config.get("mlp_only_layers", []))
    window = config.get("sliding_window") if config.get("use_sliding_window", False) else None
    config.get("max_window_layers")
    num_experts = config.size("num_experts", "num_local_experts")
    moe = MoE(
        num_experts=num_experts,
        intermediate=config.size("moe_intermediate_size"),
        activation=activation(config),
        router=Router(top_k=config.size("num_experts_per_tok"), normalize=bool(config.get("norm_topk_prob", False))),
    )
    dense = mlp(config)

    def feed_forward(index: int) -> FeedForward:
        return dense if index in dense_layers or (index + 1) % step else moe

    mixer = attention(config, head_dim(config), window)
    return decoder(config, "qwen3_moe", mixer, feed_forward)


RULES = LLAMA + QK_NORM + experts("mlp", "gate_proj", "up_proj", "down_proj")
FAMILY = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe", "qwen3_vl_moe_text"),
    spec=spec,
    rules=RULES,
    silent={"qwen3_moe": {"num_key_value_heads": 4}},
)
