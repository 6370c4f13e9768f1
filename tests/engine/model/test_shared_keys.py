"""Layers over the keys of earlier ones: what is kept of them, and which pipeline stages they can be parted into."""

import json
from pathlib import Path
from typing import Any

import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.model.spec import ModelSpec
from firstlight.engine.parallel.constraints import violations
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.parallel.pieces import stages
from firstlight.workbench.here import this_cluster
from firstlight.workbench.plan import plan
from tests.families.chosen_kinds import TINY

# Layers as those of the release with 35, of which 20 have no keys of their own.
SMALL = {
    "num_hidden_layers": 35,
    "num_kv_shared_layers": 20,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
}


def spec(**more: Any) -> ModelSpec:
    return FAMILIES.describe({**TINY["gemma4-shared-keys"].config, **SMALL, **more})[0]


def test_a_layer_attends_to_the_last_of_its_kind_that_has_keys() -> None:
    found = [layer.keys_of for layer in spec().layers]
    assert found == [None] * 15 + [14 if index % 5 == 4 else 13 for index in range(15, 35)]
    kept = [sum(one.heads * one.dim for one in layer.cache().tensors) for layer in spec().layers]
    assert kept == [2 * 2 * (16 if index % 5 == 4 else 8) if index < 15 else 0 for index in range(35)]


def test_a_stage_holds_who_shares_keys() -> None:
    shared = spec()
    assert shared.most_stages == 14
    for pp in (2, 3, 14):
        cuts = stages(shared, pp)
        assert [start for start, _ in cuts[1:]] == [stop for _, stop in cuts[:-1]]
        assert cuts[-1][0] <= 13 < cuts[-1][1] == 35
    (finding,) = violations(shared, Mesh(pp=15))
    assert "14 groups" in finding.message
    assert finding.next == "use --pp 14 or less"
    assert not violations(spec(num_kv_shared_layers=0), Mesh(pp=35))


@pytest.mark.parametrize("shared", [35, 36, -1, 32])
def test_a_kind_without_keys_is_refused(shared: int) -> None:
    """With 32 shared the three in front all have windows."""
    with pytest.raises(Refused, match="num_kv_shared_layers"):
        spec(num_kv_shared_layers=shared)


def test_what_a_stage_hands_on_has_the_inputs_of_the_layers_behind_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY["gemma4-shared-keys"].config, **SMALL}))
    report = plan(tmp_path / "config.json", this_cluster(2, "cpu"), Mesh(pp=2), context=64)
    (_, (first, _)) = stages(spec(), 2)
    rows = [row for row in report.tables["communication_bytes_per_token"] if row["axis"] == "pp"]
    assert {row["bytes_per_token"] for row in rows} == {(32 + (35 - first) * 6) * 2}
