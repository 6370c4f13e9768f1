"""One rank's part of a checkpoint under a residency policy, and the same numbers to hold it against."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from firstlight.engine.errors import Refused
from firstlight.engine.model.build import Model
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.parallel.comm import Comms
from firstlight.engine.parallel.kept import Residency
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.parallel.pieces import rank_pieces
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.ledger import account
from firstlight.engine.weights.loading.hold import hold
from firstlight.kernels.registry import choose
from tests.engine.direct import Arrays, Direct

Get = Callable[[str], Path]
STAGING = 16 << 10


class Held(Direct):
    """One rank's part of a checkpoint under a policy, in float32."""

    def __init__(self, path: Path, kind: Residency, budget_bytes: int | None, mesh: Mesh | None = None) -> None:
        checkpoint = Checkpoint.open(str(path))
        self.spec, matcher = FAMILIES.describe(checkpoint.config)
        self.ledger = account(checkpoint, self.spec, matcher)
        self.comms = Comms.alone()
        pieces = rank_pieces(self.spec, mesh or Mesh(), 0, "F32", self.ledger, keep_packed=("expert",))
        self.weights = hold(checkpoint, pieces, torch.device("cpu"), kind, budget_bytes)
        self.ops = choose("cpu", torch.float32, {})
        self.model = Model(self.spec, self.weights, self.ops)


def inputs(count: int = 1) -> list[Arrays]:
    generator = torch.Generator().manual_seed(5)
    return [{"input_ids": torch.randint(3, 31, (2, 9), generator=generator).numpy()} for _ in range(count)]


def least(path: Path, kind: Residency, held: Callable[..., Held]) -> int:
    """The smallest budget that is not refused, as any refusal says."""

    def said(budget_bytes: int) -> int:
        with pytest.raises(Refused) as caught:
            held(path, kind, budget_bytes)
        return int(str(caught.value.findings[0].expected).split()[2].replace(",", ""))

    low = said(1000)
    assert said(low - 1) == low
    return low


def same(got: Arrays, wanted: Arrays) -> None:
    assert set(got) == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(torch.from_numpy(got[name]), torch.from_numpy(value), rtol=1e-5, atol=1e-5)
