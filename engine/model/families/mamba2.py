"""Mamba 2 throughout: no attention, no feed-forward."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import decoder
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.state_spaces import BACKBONE, ENDLESS, MAMBA2_RULES, limits, whole_groups
from firstlight.engine.model.spec import Mamba2, ModelSpec, Norm

# Keys of training, or of how prompts are cut.
IDLE = """chunk_size rescale_prenorm_residual residual_in_fp32 time_step_floor time_step_max time_step_min
time_step_rank""".split()


def spec(config: Config) -> ModelSpec:
    config.only("hidden_act", "silu", default="silu")
    heads, dim, hidden = config.size("num_heads"), config.size("head_dim"), config.size("hidden_size")
    if heads * dim != int(config.get("expand", 2)) * hidden:
        config.refuse("num_heads", heads, f"expand x hidden_size channels in heads of head_dim = {dim}")
    for key in IDLE:
        config.get(key)
    norm = Norm(eps=config.positive("layer_norm_epsilon", config.get("layer_norm_epsilon", 1e-5)))
    bias = bool(config.get("use_bias", False))
    mixer = Mamba2(
        num_heads=heads,
        head_dim=dim,
        state_dim=config.size("state_size"),
        num_groups=int(config.get("n_groups", 8)),
        eps=norm.eps,
        conv=int(config.get("conv_kernel", 4)),
        conv_bias=bool(config.get("use_conv_bias", True)),
        bias=bias,
        output_bias=bias,
        dt_limits=limits(config),
    )
    whole_groups(config, mixer)
    return decoder(config, "mamba2", mixer, lambda i: None, norm=norm, norms=("mixer_norm",), max_positions=ENDLESS)


RULES = BACKBONE + MAMBA2_RULES
FAMILY = Family(name="mamba2", model_types=("mamba2",), spec=spec, rules=RULES)
