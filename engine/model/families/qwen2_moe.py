"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention, experts weighed as they are, a shared one behind a gate of its own."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import LLAMA, activation, decoder, gqa, layer_windows, mlp
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import MIXTURE, mixture, router
from firstlight.engine.model.spec import MLP, FeedForward, ModelSpec


def _windows(config: Config) -> list[int | None]:
    """With `use_sliding_window` every other layer below `max_window_layers`, unless the file lists them."""
    count, last = config.size("num_hidden_layers"), int(config.get("max_window_layers", 28))
    window = config.stated("sliding_window", absent=4096) if config.get("use_sliding_window", False) else None
    config.get("sliding_window")
    if "layer_types" in config:
        return layer_windows(config, window)
    return [window if index % 2 == 0 and index < last else None for index in range(count)]


def spec(config: Config) -> ModelSpec:
    windows = _windows(config)
    step, dense_layers = int(config.get("decoder_sparse_step", 1)), set(config.get("mlp_only_layers", []))
    moe = mixture(
        config,
        router(config, normalize=bool(config.get("norm_topk_prob", False))),
        shared=MLP(intermediate=config.size("shared_expert_intermediate_size"), activation=activation(config)),
        shared_gate=True,
    )
    dense, bias = mlp(config), bool(config.get("qkv_bias", True))

    def feed_forward(index: int) -> FeedForward:
        return dense if index in dense_layers or (index + 1) % step else moe

    return decoder(config, "qwen2_moe", lambda i: gqa(config, qkv_bias=bias, window=windows[i]), feed_forward)


RULES = LLAMA + MIXTURE
FAMILY = Family(name="qwen2_moe", model_types=("qwen2_moe",), spec=spec, rules=RULES)
