"""Long names in narrow columns are broken where their parts end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from firstlight.engine.findings import warning
from firstlight.workbench.render.names import broken
from firstlight.workbench.render.terminal import report_text
from firstlight.workbench.report import Draft


def test_parts_stay_whole() -> None:
    name = "language_model.model.layers.{0..3,7}.self_attn.q_proj.weight"
    assert list(broken(name, 40)) == ["language_model.model.layers.{0..3,7}.", "self_attn.q_proj.weight"]
    assert list(broken("rope 10,000 and 0.25 of 1,024 tokens", 12)) == ["rope 10,000", "and 0.25 of", "1,024 tokens"]
    assert list(broken("a" * 25, 10)) == ["a" * 10, "a" * 10, "a" * 5]
    assert list(broken("", 5)) == [""]


@given(st.text("ab._ {}0-", max_size=60), st.integers(1, 30))
def test_nothing_is_lost_and_no_line_is_too_long(text: str, width: int) -> None:
    lines = list(broken(text, width))
    assert all(len(line) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_a_table_of_long_names_at_any_width() -> None:
    draft = Draft("scan", "x")
    draft.table(
        "tensors", [{"name": "vision_tower.encoder.layers.{0..5}.layer_norm1.weight", "count": 6, "shape": "9"}]
    )
    for width in (50, 80, 120):
        lines = report_text(draft.close(), width).splitlines()
        assert max(map(len, lines)) <= width
        assert any(line.rstrip().endswith(("weight", "9")) for line in lines)
        assert not any(line.strip() in ("t", "ght", "eight") for line in lines)


def test_long_names_in_findings_are_shown_whole() -> None:
    name = "language_model.model.layers.47.block_sparse_moe.experts.813.w1.weight_packed"
    draft = Draft("scan", "x")
    draft.find(warning("missing-shard", f"{name} is not there", tensors=(name,), next=f"fetch {name}"))
    for width in (60, 80):
        text = report_text(draft.close(), width)
        assert max(map(len, text.splitlines())) <= width
        assert "\N{HORIZONTAL ELLIPSIS}" not in text
        assert "experts.813.w1.weight_packed" in text.replace("\n", "").replace(" ", "")
