"""FlexOlmo: OLMoE's blocks with OLMo 2's norms, which stand behind the blocks."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import ATTENTION, ENDS, POST, POST_NORMS, QK_NORM
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import MIXTURE
from firstlight.engine.model.families.olmoe import model
from firstlight.engine.model.spec import ModelSpec


def spec(config: Config) -> ModelSpec:
    return model(config, "flex_olmo", POST, 500000.0, 1e-6)


RULES = ENDS + POST_NORMS + ATTENTION + QK_NORM + MIXTURE
FAMILY = Family(name="flex_olmo", model_types=("flex_olmo",), spec=spec, rules=RULES)
