"""Phi-3.5-MoE: LayerNorms, biases throughout, two experts a token chosen one after the other (sparsemixer)."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import ATTENTION, TRUNK, decoder, gqa, head_dim, rope
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import MIXTURE, mixture, router
from firstlight.engine.model.spec import ModelSpec, Norm


def spec(config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    norm = Norm(kind="layer", eps=config.positive("rms_norm_eps", config.get("rms_norm_eps", 1e-5)), bias=True)
    attention = gqa(
        config,
        rope=rope(config, head_dim(config), 1000000.0),
        window=config.get("sliding_window"),
        qkv_bias=bias,
        output_bias=bias,
    )
    config.only("num_experts_per_tok", 2, default=2)
    config.get("input_jitter_noise")  # in training alone
    chooses = router(config, top_k=2, scoring="sparsemixer", jitter=float(config.get("router_jitter_noise", 0.01)))
    moe = mixture(config, chooses, "intermediate_size")
    head_bias = bool(config.get("lm_head_bias", False))
    return decoder(config, "phimoe", attention, moe, norm=norm, head_bias=head_bias)


RULES = TRUNK + ATTENTION + MIXTURE
FAMILY = Family(
    name="phimoe", model_types=("phimoe",), spec=spec, rules=RULES, silent={"phimoe": {"num_key_value_heads": 8}}
)
