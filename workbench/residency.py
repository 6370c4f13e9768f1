"""What of the weights came and went while an engine ran, for reports. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from firstlight.engine.serving.api import RankMemory
from firstlight.workbench.report import Draft


def add_residency(draft: Draft, ranks: Iterable[RankMemory]) -> None:
    """Per rank: what was there when wanted, what was waited for, and the memory it took; nothing if all stays."""
    rows = [{"rank": rank.rank, **rank.residency} for rank in ranks if rank.residency is not None]
    if rows:
        draft.table("residency", rows)
