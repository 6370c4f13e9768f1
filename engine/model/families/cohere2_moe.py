"""Command with experts: attention and experts side by side behind one norm, rotation on layers with windows alone."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import (
    ATTENTION,
    DENSE,
    ENDS,
    activation,
    decoder,
    gqa,
    in_layers,
    layer_windows,
    mlp,
    rope,
)
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import MIXTURE, mixture, router, shared_expert, sparse_layers
from firstlight.engine.model.spec import Attention, ModelSpec, MoE, Norm


def _norm(config: Config) -> Norm:
    """A LayerNorm without bias, unless the file names an epsilon of an RMSNorm."""
    plain = config.positive("layer_norm_eps", config.get("layer_norm_eps", 1e-5))
    if "rms_norm_eps" in config:
        return Norm(eps=config.positive("rms_norm_eps", config.get("rms_norm_eps")))
    return Norm(kind="layer", eps=plain)


def _windows(config: Config, first: int) -> list[int | None]:
    """The last of every `sliding_window_pattern` layers sees everything; dense layers at the bottom count apart."""
    count, window = config.size("num_hidden_layers"), config.stated("sliding_window", absent=4096)
    low = int(config.get("prefix_dense_sliding_window_pattern", 1))
    high = int(config.get("sliding_window_pattern", 4))
    if "layer_types" in config:
        return layer_windows(config, window)
    places = [(index + 1, low) for index in range(first)] + [(index + 1, high) for index in range(count - first)]
    return [window if place % pattern else None for place, pattern in places]


def _mixture(config: Config) -> MoE:
    shared = shared_expert(config, config.size("intermediate_size"))
    how = config.only("shared_expert_combination_strategy", "sum", "average", default="average")
    chooses = router(
        config,
        scoring=config.only("expert_selection_fn", "softmax", "sigmoid", default="softmax"),
        score_chosen=True,
        normalize=bool(config.get("norm_topk_prob", True)),
        eps=0.0,
    )
    scale = 0.5 if shared and how == "average" else 1.0
    return mixture(config, chooses, "intermediate_size", shared=shared, scale=scale)


def spec(config: Config) -> ModelSpec:
    sparse, bias = sparse_layers(config), bool(config.get("attention_bias", False))
    windows = _windows(config, int(config.get("first_k_dense_replace", 0)))
    size = int(config.get("head_dim", 128))
    positions = rope(config, size, interleaved=True)
    always = config.get("prefix_dense_sliding_window_pattern", 1) == 1  # dense layers rotate

    def attention(index: int) -> Attention:
        rotates = windows[index] is not None or (always and not sparse[index])
        return gqa(
            config,
            head_dim=size,
            scale=size**-0.5,
            rope=positions if rotates else None,
            window=windows[index],
            qkv_bias=bias,
            output_bias=bias,
        )

    moe = _mixture(config)
    dense = moe if all(sparse) else mlp(config, "prefix_dense_intermediate_size", activation=activation(config))
    return decoder(
        config,
        "cohere2_moe",
        attention,
        lambda i: moe if sparse[i] else dense,
        norm=_norm(config),
        norms=("mixer_norm",),
        layer={"parallel": True},
        tie_default=True,
        logit_scale=float(config.get("logit_scale", 0.0625)),
    )


RULES = ENDS + in_layers({"input_layernorm": "mixer_norm"}) + ATTENTION + DENSE + MIXTURE
FAMILY = Family(name="cohere2_moe", model_types=("cohere2_moe",), spec=spec, rules=RULES)
