"""Every file of facts gives figures, and where a release's own figures are published, those.

`parameters` are those of the hosting sites' counts (from the headers of the shards, scales not counted), with extra
prediction layers; `bytes` the `total_size` of the release's index. Of the rest model cards round: billions, total and
active. Cache and state follow from the attention of each: elements a token and layer.
"""

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.parallel.hardware import parse_cluster
from firstlight.workbench.facts import completed
from firstlight.workbench.plan import plan, read_config
from firstlight.workbench.report import Report

FACTS = Path("data/models")


class Published(NamedTuple):
    """`rounded`: billions, total without extra layers and active; `parameters` and `size` exact, with extra layers."""

    kv: int
    rounded: tuple[float, float]
    parameters: int | None = None
    size: int | None = None
    state: int = 0


GLM_5 = Published(78 * (576 + 128) * 2, (744, 40), 753_864_139_008)
PUBLISHED = {
    # its count in the shards' headers, 685,396,921,376, has 41,591,584 scales
    "deepseek-v3.2": Published(61 * (576 + 128) * 2, (672, 37), 685_396_921_376 - 41_591_584),
    "deepseek-v3": Published(
        61 * 576 * 2,
        (671, 37),
        680_571_043_840 + 3_918_786_560 + 15_104,
        680_571_043_840 + 2 * 3_918_786_560 + 4 * 41_555_600,
    ),
    "deepseek-v4-flash": Published(
        (21 * (512 + 128) // 4 + 20 * 512 // 128) * 2,
        (284, 13),
        state=43 * 128 * 512 * 2 + 4 * (21 * 8 * 4 * (512 + 128) + 20 * 128 * 2 * 512),
    ),
    "deepseek-v4-pro": Published(9_848, (1573, 49), state=26_705_920),
    "glm-5": GLM_5,
    "glm-5.1": GLM_5,
    "glm-5-fp8": GLM_5,
    "glm-5.2": Published((78 * 576 + 21 * 128) * 2, (743, 40)),
    "glm-5.2-fp8": Published((78 * 576 + 21 * 128) * 2, (743, 40)),
    "gpt-oss-120b": Published(
        18 * 2 * 8 * 64 * 2, (116.8, 5.1), 116_829_156_672, 65_248_815_744, state=18 * 128 * 2 * 8 * 64 * 2
    ),
    "kimi-k2": Published(61 * 576 * 2, (1026, 32), 1_026_408_232_448),
    "kimi-k2.5": Published(61 * 576 * 2, (1027, 32)),
    "kimi-k3": Published(27_648, (2780, 104), 2_779_931_837_184, 1_560_860_324_864, state=434_110_464),
    "kimi-vl-a3b": Published(27 * 576 * 2, (16.4, 2.8)),
    "llama-3.1-405b": Published(126 * 2 * 8 * 128 * 2, (406, 404), 405_853_388_800, 811_706_777_600),
    "llama-4-maverick": Published(
        12 * 2 * 8 * 128 * 2, (402, 17), 401_583_781_376, 803_167_562_752, state=36 * 8192 * 2 * 8 * 128 * 2
    ),
    "minimax-m3": Published((60 * 2 * 4 * 128 + 57 * 128) * 2, (427.04, 26), 427_040_140_160),
    "mixtral-8x22b": Published(56 * 2 * 8 * 128 * 2, (140.6, 39), 140_620_634_112, 281_241_268_224),
    "qwen2.5-vl-3b": Published(36 * 2 * 2 * 128 * 2, (3.75, 3.1), 3_754_622_976, 7_509_245_952),
    "qwen3-235b-a22b": Published(94 * 2 * 4 * 128 * 2, (235, 22), 235_093_634_560, 470_187_269_120),
    "qwen3-235b-a22b-fp8": Published(94 * 2 * 4 * 128 * 2, (235, 22), 235_093_634_560),
    "qwen3-vl-235b-a22b": Published(94 * 2 * 4 * 128 * 2, (235.7, 22)),
    "qwen3.5-397b-a17b": Published(15 * 2 * 2 * 256 * 2, (396.8, 16.3), state=45 * 64 * 128 * 128 * 4),
    # of its 4,892,388,705,238 bytes the last 23 million are headers: 163 bytes for each of 142,8.. tensors
    "qwen3.8-2.4t-a95b": Published(
        23 * 2 * 4 * 256 * 2, (2420, 93.3), size=4_892_365_486_336, state=69 * 128 * 128 * 128 * 4
    ),
    "ring-1t": Published(80 * 2 * 8 * 128 * 2, (999.7, 49.8), 999_705_328_640),
    "smolvlm-256m": Published(30 * 2 * 3 * 64 * 2, (0.256, 0.135), 256_484_928, 512_969_856),
}
FILLED = {"llama-4-maverick", "minimax-m3", "qwen2.5-vl-3b", "qwen3.8-2.4t-a95b", "ring-1t", "smolvlm-256m"}


def planned(source: str | Path) -> Report:
    return plan(source, parse_cluster("64xB300"))


def test_no_file_is_without_a_figure() -> None:
    assert {path.stem for path in FACTS.glob("*.json")} == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_figures_are_the_published_ones(name: str) -> None:
    report, known = planned(FACTS / f"{name}.json"), PUBLISHED[name]
    found = {key: metric.value for key, metric in report.metrics.items()}
    assert report.status == "passed"
    assert found["kv_bytes_per_token"] == known.kv
    assert found["state_bytes_per_sequence"] == known.state
    everything, active = known.rounded
    assert found["parameters"] / 1e9 == pytest.approx(everything, rel=2e-3)
    assert found["active_parameters"] / 1e9 == pytest.approx(active, rel=0.08)
    if known.parameters is not None:
        assert found["parameters"] + found["mtp_parameters"] == known.parameters
    if known.size is not None:
        assert found["checkpoint_bytes"] == known.size
    said = [finding for finding in report.findings if finding.code == "filled-in"]
    assert bool(said) is (name in FILLED)


@pytest.mark.parametrize("name", sorted(FILLED))
def test_a_copy_of_the_facts_with_lost_keys_is_filled_in_and_says_so(name: str, tmp_path: Path) -> None:
    raw = json.loads((FACTS / f"{name}.json").read_text())
    raw.pop("_filled")
    (tmp_path / "copy.json").write_text(json.dumps(raw))
    copy, ours = planned(tmp_path / "copy.json"), planned(name)
    for metric in ("parameters", "active_parameters", "checkpoint_bytes", "kv_bytes_per_token"):
        assert copy.value(metric) == ours.value(metric)
    assert [f for f in copy.findings if f.code == "filled-in"] == [f for f in ours.findings if f.code == "filled-in"]


def test_what_a_file_states_is_never_replaced(tmp_path: Path) -> None:
    raw = json.loads((FACTS / "smolvlm-256m.json").read_text())
    raw["vision_config"]["hidden_size"] = 1152
    found = completed(raw)
    assert found["vision_config"]["hidden_size"] == 1152
    assert "hidden_size" not in found["_filled"]["values"]["vision_config"]
    whole = completed({**raw, "_filled": {"values": {"scale_factor": 9}, "why": "nothing is lacking"}})
    assert whole["scale_factor"] == 4
    assert "_filled" not in whole


def test_facts_of_another_release_fill_nothing(tmp_path: Path) -> None:
    """Neither by name alone, nor in a checkpoint's directory; the key that is missing is named."""
    raw = json.loads((FACTS / "qwen2.5-vl-3b.json").read_text())
    raw.pop("_filled")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text(json.dumps(raw))
    (tmp_path / "other.json").write_text(json.dumps({**raw, "_hf_repo": "someone/else"}))
    for source in (tmp_path / "own", tmp_path / "other.json"):
        with pytest.raises(Refused, match="vocab_size"):
            planned(source)


def test_a_class_stands_for_a_model_type_and_is_said() -> None:
    raw = read_config("ring-1t")[1]
    assert "model_type" not in raw
    said = [f.message for f in planned("ring-1t").findings if "BailingMoeV2ForCausalLM" in f.message]
    assert said
    assert all("bailing_moe_v2" in message for message in said)
