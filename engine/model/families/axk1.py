"""A.X K1: DeepSeek-V3's blocks with one more norm behind the experts."""

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import DENSE, TRUNK, decoder, in_layers, mlp, rms
from firstlight.engine.model.families.deepseek_v3 import MLA_RULES, attention
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import MIXTURE, mixture, shared_expert, sigmoid_router, sparse_layers
from firstlight.engine.model.spec import ModelSpec


def spec(config: Config) -> ModelSpec:
    config.only("moe_layer_freq", 1, default=1)
    mixer, sparse = attention(config), sparse_layers(config, 1)
    width = config.size("moe_intermediate_size")
    moe, dense = mixture(config, sigmoid_router(config), shared=shared_expert(config, width)), mlp(config)
    plain = decoder(config, "axk1", mixer, lambda i: moe if sparse[i] else dense)
    layers = tuple(
        msgspec.structs.replace(layer, post_ffn_norm=rms(config)) if has_experts else layer
        for layer, has_experts in zip(plain.layers, sparse, strict=True)
    )
    return msgspec.structs.replace(plain, layers=layers)


RULES = TRUNK + MLA_RULES + DENSE + MIXTURE + in_layers({"(mlp.|)post_mlp_layernorm": "post_ffn_norm"})
FAMILY = Family(
    name="axk1",
    model_types=("axk1",),
    spec=spec,
    rules=RULES,
    silent={"axk1": {"n_group": 8, "topk_group": 4, "n_shared_experts": 1, "routed_scaling_factor": 2.5}},
)
