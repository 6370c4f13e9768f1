"""Released configurations give the published parameter counts, from the files alone.

Exact totals are those that the hosting sites derive from the shards' headers: with the extra prediction layers, without
the scales of quantized weights. Rounded ones are of the model cards: billions of parameters, and active ones.
"""

import json
from pathlib import Path

import pytest

from firstlight.engine.model.families import FAMILIES
from firstlight.engine.parallel.census import census
from firstlight.engine.parallel.plan import active_parameters
from tests.families.releases import RELEASES

FACTS = Path("data/models")
# Of DeepSeek-V3 680,571,043,840 in float8, 3,918,786,560 in bfloat16, and 15,104 router biases among the float32.
EXACT = {
    "deepseek-v3": 680_571_043_840 + 3_918_786_560 + 15_104,
    "glm-5": 753_864_139_008,
    "glm-5.1": 753_864_139_008,
    "kimi-k2": 1_026_408_232_448,
    "llama-3.1-405b": 405_853_388_800,
    "mixtral-8x22b": 140_620_634_112,
    "qwen3-235b-a22b": 235_093_634_560,
}
ROUNDED = {  # billions: all without extra layers, active
    "deepseek-v3": (671, 37),
    "deepseek-v3.2": (672, 37),
    "deepseek-v4-flash": (284, 13),
    "deepseek-v4-pro": (1573, 49),
    "glm-5": (744, 40),
    "glm-5.2": (743, 40),
    "kimi-k2": (1026, 32),
    "qwen3-235b-a22b": (235, 22),
}


def raw(name: str) -> dict[str, object]:
    found = json.loads((FACTS / f"{name}.json").read_text())
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("name", EXACT)
def test_all_parameters_of_a_release(name: str) -> None:
    spec, _ = FAMILIES.describe(raw(name))
    own = sum(kind.elements for kind in census(spec))
    assert own + sum(param.elements for param in spec.mtp_parameters()) == EXACT[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_parameters_as_model_cards_round_them(name: str) -> None:
    spec, _ = FAMILIES.describe(raw(name))
    everything, active = ROUNDED[name]
    assert round(sum(kind.elements for kind in census(spec)) / 1e9) == everything
    assert active_parameters(spec) / 1e9 == pytest.approx(active, abs=1.0)


@pytest.mark.parametrize("name", RELEASES)
def test_a_released_configuration_is_read_whole(name: str) -> None:
    total, config = RELEASES[name]
    spec, _ = FAMILIES.describe(config)
    tied = spec.vocab_size * spec.hidden if spec.tied_head else 0
    assert sum(kind.elements for kind in census(spec)) - tied == total
    assert [finding.message for finding in spec.findings] == []


def test_the_text_of_llama_4_maverick() -> None:
    """401,583,781,376 with the tower and projector, which have 871,932,416."""
    text = raw("llama-4-maverick")["text_config"]
    assert isinstance(text, dict)
    spec, _ = FAMILIES.describe(text)
    assert sum(kind.elements for kind in census(spec)) == 401_583_781_376 - 871_932_416


@pytest.mark.parametrize(
    ("name", "per_token", "per_sequence"),
    [
        ("deepseek-v3", 61 * 576 * 2, 0),
        ("deepseek-v3.2", 61 * (576 + 128) * 2, 0),
        ("glm-5.2", (78 * 576 + 21 * 128) * 2, 0),  # 21 of 78 layers have an indexer
        # 21 layers with an entry and an index key every 4 tokens, 20 with an entry every 128; 43 windows of 128
        ("deepseek-v4-flash", (21 * (512 + 128) // 4 + 20 * 512 // 128) * 2, 43 * 128 * 512 * 2),
    ],
)
def test_what_a_token_and_a_sequence_keep(name: str, per_token: int, per_sequence: int) -> None:
    spec, _ = FAMILIES.describe(raw(name))
    caches = [layer.cache() for layer in spec.layers]
    assert 2 * sum(cache.elements_per_token for cache in caches) == per_token
    assert 2 * sum(cache.elements(1 << 40)[1] for cache in caches) == per_sequence


@pytest.mark.parametrize(
    "name",
    [*EXACT, "deepseek-v3.2", "deepseek-v4-flash", "deepseek-v4-pro", "glm-5.2", "glm-5-fp8", "glm-5.2-fp8"],
)
def test_every_key_of_a_release_is_read(name: str) -> None:
    spec, _ = FAMILIES.describe(raw(name))
    assert [finding.message for finding in spec.findings] == []
