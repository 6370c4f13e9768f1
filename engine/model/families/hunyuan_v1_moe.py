"""Hunyuan-A13B: queries and keys normed behind the rotation, softmax-routed experts beside a shared one."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import ATTENTION, TRUNK, activation, decoder, gqa, in_layers, rms
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import MIXTURE, mixture, router
from firstlight.engine.model.spec import MLP, ModelSpec


def _one(config: Config, key: str, default: object = None) -> object:
    """A number that some files repeat for every layer."""
    value = config.get(key, default)
    if isinstance(value, list):
        if len(set(value)) != 1:
            config.unsupported(key, value, "the same number for every layer")
        return value[0]
    return value


def spec(config: Config) -> ModelSpec:
    bias, norm = bool(config.get("attention_bias", False)), rms(config, 1e-5)
    config.get("eod_token_id")
    config.only("use_qk_norm", True, default=True)
    config.only("use_cla", False, default=False)
    config.only("use_mixed_mlp_moe", True, default=True)
    config.get("moe_intermediate_size")  # experts are as wide as the shared one; the tensors' shapes hold it
    config.only("num_shared_expert", 1, [1] * config.size("num_hidden_layers"), default=1)
    attention = gqa(config, qkv_bias=bias, output_bias=bias, qk_norm=norm, qk_norm_last=True)
    chooses = router(config, top_k=_one(config, "moe_topk", 1), float32=True, eps=0.0)
    moe = mixture(
        config,
        chooses,
        "intermediate_size",
        shared=MLP(intermediate=config.size("intermediate_size"), activation=activation(config)),
    )
    return decoder(config, "hunyuan_v1_moe", attention, moe, norm=norm)


QK_NORM = in_layers({"self_attn.query_layernorm": "mixer.q_norm", "self_attn.key_layernorm": "mixer.k_norm"})
RULES = TRUNK + ATTENTION + QK_NORM + MIXTURE
FAMILY = Family(name="hunyuan_v1_moe", model_types=("hunyuan_v1_moe",), spec=spec, rules=RULES)
