"""EXAONE 4: norms behind the blocks, queries and keys normed by head; where layers have windows only those rotate."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import (
    ATTENTION,
    DENSE,
    ENDS,
    POST,
    POST_NORMS,
    QK_NORM,
    decoder,
    gqa,
    head_dim,
    layer_windows,
    mlp,
    rms,
    rope,
)
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.spec import Attention, ModelSpec


def _windows(config: Config) -> list[int | None]:
    """`sliding_window_pattern` is "LLLG", or the number of layers of which the last sees everything."""
    window, pattern = config.stated("sliding_window", absent=4096), config.get("sliding_window_pattern", 4)
    count = config.size("num_hidden_layers")
    if window is None:
        config.get("layer_types")
        return [None] * count
    if "layer_types" in config:
        return layer_windows(config, window)
    if isinstance(pattern, str):
        kinds = [pattern[index % len(pattern)] for index in range(count - 1)] + ["G"]
        return [window if kind == "L" else None for kind in kinds]
    return [window if (index + 1) % pattern else None for index in range(count)]


def spec(config: Config) -> ModelSpec:
    norm, windows, feed_forward = rms(config, 1e-5), _windows(config), mlp(config)
    positions, all_turn = rope(config, head_dim(config)), config.stated("sliding_window", absent=4096) is None

    def attention(index: int) -> Attention:
        turns = all_turn or windows[index] is not None
        return gqa(config, rope=positions if turns else None, window=windows[index], qk_norm=norm)

    return decoder(config, "exaone4", attention, feed_forward, norm=norm, norms=POST)


RULES = ENDS + POST_NORMS + ATTENTION + QK_NORM + DENSE
FAMILY = Family(name="exaone4", model_types=("exaone4",), spec=spec, rules=RULES)
