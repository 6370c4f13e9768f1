"""Sigmoid-routed experts under grouped-query attention: dots1, EXAONE, Hunyuan 3, Kolibri, Solar, Trinity.

Each row of `KIN` is a model type.
"""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import in_layers, layer_windows
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import sparse_layers
from firstlight.engine.model.families.sigmoid_common import RULES, Kin, sigmoid_decoder
from firstlight.engine.model.rules import WeightRule
from firstlight.engine.model.spec import ModelSpec

KIN = {
    "afmoe": Kin(
        head_dim=128,
        window=1024,
        full=4,
        nope=True,
        sandwich=True,
        gate="own",
        dense=1,
        scale="route_scale",
        router={"float32": False, "normalize": True},
    ),
    "dots1": Kin(eps=1e-6, window=4096),
    "exaone_moe": Kin(window=4096, full=4, nope=True, dense=1),
    "hy_v3": Kin(theta=11158840.0, head_dim=128, dense=1, scale="router_scaling_factor", router={"normalize": True}),
    "kolibri1": Kin(
        eps=1e-6,
        head_dim=128,
        window=513,
        full=5,
        nope=True,
        sandwich=True,
        normalize=False,
        router={"score_chosen": True, "eps": 0.0},
    ),
    "solar_open": Kin(theta=1000000.0, head_dim=128, qk_norm=False, output_bias=False),
}


def _windows(config: Config, kin: Kin, model_type: str) -> list[int | None]:
    count, window = config.size("num_hidden_layers"), config.stated("sliding_window", absent=kin.window)
    full = int(config.get("global_attn_every_n_layers", config.get("sliding_window_pattern", kin.full)))
    above = int(config.get("max_window_layers", 62))
    if "layer_types" in config:
        return layer_windows(config, window)
    if model_type == "dots1":
        return [window if index >= above else None for index in range(count)]
    return [window if full and (index + 1) % full else None for index in range(count)]


def _sparse(config: Config, kin: Kin) -> list[bool]:
    if "num_dense_layers" in config:
        return sparse_layers(config, kin.dense, "num_dense_layers")
    return sparse_layers(config, kin.dense)


def spec(config: Config) -> ModelSpec:
    model_type = str(config.need("model_type"))
    kin = KIN[model_type]
    return sigmoid_decoder(config, model_type, kin, _windows(config, kin, model_type), _sparse(config, kin))


def names(config: Config) -> tuple[WeightRule, ...]:
    """Norms are named for where they stand, which is not the same place in all of these."""
    behind_attention = "post_mixer_norm" if config.get("model_type") == "afmoe" else "ffn_norm"
    return in_layers({"post_attention_layernorm": behind_attention})


FAMILY = Family(
    name="sigmoid_kin",
    model_types=tuple(KIN),
    spec=spec,
    rules=RULES,
    silent={
        "afmoe": {"num_shared_experts": 2},
        "dots1": {"norm_topk_prob": False},
        "exaone_moe": {"num_shared_experts": 1, "routed_scaling_factor": 2.5},
        "hy_v3": {"num_key_value_heads": 8, "num_shared_experts": 1, "router_scaling_factor": 2.826},
        "kolibri1": {"num_key_value_heads": 4, "shared_expert_intermediate_size": 512},
        "solar_open": {"num_key_value_heads": 8, "n_shared_experts": 1},
    },
    left_out=names,
)
