"""ERNIE 4.5 MoE: heads rotated in neighbouring pairs, softmax scores with a bias that only chooses."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import LLAMA, decoder, gqa, head_dim, mlp, rms, rope
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import MIXTURE, mixture, router, shared_expert
from firstlight.engine.model.spec import FeedForward, ModelSpec


def spec(config: Config) -> ModelSpec:
    bias = bool(config.get("use_bias", False))
    attention = gqa(
        config,
        rope=rope(config, head_dim(config), 500000.0, interleaved=True),
        qkv_bias=bias,
        output_bias=bias,
    )
    first, last = int(config.get("moe_layer_start_index", 1)), int(config.get("moe_layer_end_index", -1))
    last = config.size("num_hidden_layers") - 1 if last == -1 else last
    interval = int(config.get("moe_layer_interval", 1))
    chooses = router(
        config, correction_bias=True, float32=True, eps=0.0, floor=float(config.get("moe_norm_min", 1e-12))
    )
    width = config.size("moe_intermediate_size")
    dense = mlp(config, bias=bias)
    moe = mixture(config, chooses, shared=shared_expert(config, width, bias=bias))

    def feed_forward(index: int) -> FeedForward:
        return moe if first <= index <= last and (index + 1) % interval == 0 else dense

    return decoder(
        config,
        "ernie4_5_moe",
        attention,
        feed_forward,
        norm=rms(config, 1e-5),
        tie_default=True,
        head_bias=bias,
    )


RULES = LLAMA + MIXTURE
FAMILY = Family(
    name="ernie4_5_moe",
    model_types=("ernie4_5_moe",),
    spec=spec,
    rules=RULES,
    silent={"ernie4_5_moe": {"num_key_value_heads": 4, "moe_num_shared_experts": 2}},
)
