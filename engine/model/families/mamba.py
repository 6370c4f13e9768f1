"""Mamba and Falcon Mamba: selective state spaces throughout; Falcon's norms step, input and output of the state."""

import math

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import decoder
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.state_spaces import BACKBONE, ENDLESS, MAMBA_RULES
from firstlight.engine.model.spec import Mamba, ModelSpec, Norm

# Keys of training, of how prompts are cut, and of which implementation the reference takes.
IDLE = """rescale_prenorm_residual residual_in_fp32 time_step_floor time_step_init_scheme time_step_max time_step_min
time_step_scale use_associative_scan use_falcon_mambapy use_mambapy""".split()


def spec(config: Config) -> ModelSpec:
    config.only("hidden_act", "silu", default="silu")
    hidden, model_type = config.size("hidden_size"), str(config.need("model_type"))
    for key in IDLE:
        config.get(key)
    width = int(config.get("intermediate_size", int(config.get("expand", 2)) * hidden))
    rank = config.get("time_step_rank", "auto")
    inner = None
    if model_type == "falcon_mamba":
        inner = Norm(eps=config.positive("mixer_rms_eps", config.get("mixer_rms_eps", 1e-6)), weight=False)
    norm = Norm(eps=config.positive("layer_norm_epsilon", config.get("layer_norm_epsilon", 1e-5)))
    mixer = Mamba(
        width=width,
        state_dim=config.size("state_size"),
        rank=math.ceil(hidden / 16) if rank == "auto" else int(rank),
        conv=int(config.get("conv_kernel", 4)),
        conv_bias=bool(config.get("use_conv_bias", True)),
        bias=bool(config.get("use_bias", False)),
        norm=inner,
    )
    return decoder(
        config,
        model_type,
        mixer,
        lambda i: None,
        norm=norm,
        norms=("mixer_norm",),
        tie_default=True,
        max_positions=ENDLESS,
    )


RULES = BACKBONE + MAMBA_RULES
FAMILY = Family(name="mamba", model_types=("mamba", "falcon_mamba"), spec=spec, rules=RULES)
