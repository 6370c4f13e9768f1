"""One rank gives what transformers gives, for every family and for every key of a configuration that changes the result."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from firstlight.workbench.reference import Reference
from tests.checkpoints import TINY, inputs
from tests.engine.direct import Direct, flatten

LIMIT = 2e-5  # float32, relative to the largest value of the reference


@pytest.mark.parametrize("name", TINY)
def test_one_rank_equals_transformers(name: str, checkpoint: Callable[[str], Path]) -> None:
    given = inputs(name, batch=1 if TINY[name].tokens > 1000 else 2)
    expected = Reference.open(checkpoint(name)).run(given)
    model = Direct(checkpoint(name))
    found = model.run(given)
    _, mask = flatten(given)
    assert set(found) == set(expected)
    assert model.ledger.complete
    errors = {}
    for key, ours in found.items():
        theirs = expected[key] if key == "image_features" else expected[key][mask]
        assert ours.shape == theirs.shape
        errors[key] = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    assert max(errors.values()) <= LIMIT, errors
    assert np.abs(expected["logits"]).max() > 0.5, "logits too small to tell anything"
