"""The gap list: every operator of the reference's own code with its share of the work, and what serves it here."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from firstlight.workbench.coverage import OUTSIDE, TOKENS, UNSEEN, coverage, trace
from firstlight.workbench.report import Draft, Report
from firstlight.workbench.scan import scan
from firstlight.workbench.served import served
from tests.kimi_k3 import write_checkpoint


def covered(directory: Path) -> Report:
    draft = Draft("scan", directory.name)
    coverage(draft, str(directory))
    return draft.close()


def test_a_native_architecture_is_native_in_what_costs(checkpoint: Callable[[str], Path]) -> None:
    report = covered(checkpoint("llama"))
    assert report.passed
    rows = report.tables["operator_coverage"]
    assert sum(row["share_of_flops"] for row in rows) == pytest.approx(1)
    assert sum(row["share_of_bytes"] for row in rows) == pytest.approx(1)
    assert [row["share_of_flops"] for row in rows] == sorted((r["share_of_flops"] for r in rows), reverse=True)
    assert rows[0]["module"] == "Linear"
    assert rows[0]["served_by"] == "linear"
    assert report.value("native_flops") == pytest.approx(100, abs=1)
    assert {"rms_norm", "rotary"} <= {row["served_by"] for row in rows}


def test_experts_and_latent_attention_are_seen(checkpoint: Callable[[str], Path]) -> None:
    rows = covered(checkpoint("deepseek_v3")).tables["operator_coverage"]
    assert {"moe", "router_topk", "linear"} <= {row["served_by"] for row in rows}
    kinds = {row["layers"] for row in rows}
    assert {"model.layers.0", "model.layers.{1..2}", OUTSIDE} == kinds
    assert {row["layers"] for row in rows if row["served_by"] == "moe"} == {"model.layers.{1..2}"}


def test_pictures_are_traced_where_their_size_is_fixed(checkpoint: Callable[[str], Path]) -> None:
    """A blank picture goes through the tower."""
    report = covered(checkpoint("llava-clip"))
    assert any("vision_tower" in row["layers"] for row in report.tables["operator_coverage"])
    assert [check.name for check in report.checks] == ["no operator is missing"]


def test_a_tower_that_is_not_traced_is_said_not_to_be_among_the_rows() -> None:
    draft = Draft("scan", "strange")
    with FakeTensorMode():
        strange = Strange(own=False)
        strange.config = SimpleNamespace(vision_config=SimpleNamespace(patch_size=14))
        trace(draft, strange)
    (said,) = [check for check in draft.close().checks if check.status == "skipped"]
    assert said.detail.startswith(UNSEEN)


def test_a_reference_that_cannot_be_asked_fails_its_check_and_the_scan_stands(tmp_path: Path) -> None:
    """Kimi K3's own code is no part of transformers; what the checkpoint brings is not run unasked."""
    home = write_checkpoint(tmp_path / "k3")
    report = scan(home, operators=True)
    assert [check.name for check in report.checks if check.status == "failed"] == [
        "the reference's operators are listed"
    ]
    assert report.value("tensors") > 100


@pytest.mark.parametrize(
    ("module", "operator", "seen", "status"),
    [
        ("StrangeAttention", "bmm", {"bmm", "_softmax"}, "native"),
        ("StrangeAttention", "bmm", {"bmm", "exp"}, "fallback"),  # called so, and no softmax in it
        ("StrangeAttention", "sub", {"bmm", "_softmax", "sub"}, "fallback"),  # no part of what attention is here
        ("StrangeMLP", "silu", {"silu", "mul"}, "native"),
        ("StrangeMLP", "log1p", {"silu", "log1p"}, "fallback"),
        ("StrangeRMSNorm", "mul", {"abs", "mul"}, "fallback"),  # a norm by another measure
        ("StrangeLayer", "add", {"add", "mul"}, "native"),
        ("StrangeLayer", "mul", {"add", "mul"}, "fallback"),
        ("Wobble", "clone", {"clone"}, "fallback"),
    ],
)
def test_a_name_alone_proves_nothing(module: str, operator: str, seen: set[str], status: str) -> None:
    verdict = served(module, operator, "aten", seen)
    assert verdict.status == status
    assert operator in verdict.evidence or module in verdict.evidence


class Strange(torch.nn.Module):
    """A reference with a product of known cost, an operator of its own, and torch inside a module of no known kind."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own = own
        self.words = torch.nn.Embedding(10, 32)
        self.project = torch.nn.Linear(32, 48, bias=False)

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        x = self.project(self.words(input_ids)).cumsum(1)
        return torch.ops.firstlight_test.wobble(x) if self.own else x


def test_what_is_not_torchs_own_is_missing_and_torch_in_an_unknown_module_is_fallback() -> None:
    library = torch.library.Library("firstlight_test", "DEF")
    library.define("wobble(Tensor x) -> Tensor")
    library.impl("wobble", lambda x: torch.empty_like(x), "Meta")
    for own, verdict in ((False, "passed"), (True, "failed")):
        draft = Draft("scan", "strange")
        with FakeTensorMode():
            trace(draft, Strange(own))
        report = draft.close()
        assert report.status == verdict
        rows = {(row["module"], row["operator"]): row for row in report.tables["operator_coverage"]}
        assert rows["Strange", "cumsum"]["status"] == "fallback"
        (product,) = [row for (module, _), row in rows.items() if module == "Linear"]
        assert product["share_of_flops"] == pytest.approx(64 / 65)  # the sum counts one a value
        assert str([TOKENS, 32]) in product["first_shapes"]
    missing = [row["operator"] for row in report.tables["operator_coverage"] if row["status"] == "missing"]
    assert missing == ["firstlight_test.wobble"]
    library._destroy()
