"""What opening a directory finds; every finding says all that a person needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding
from firstlight.engine.weights.checkpoint import Checkpoint


def only(home: Path) -> Finding:
    """The one finding of a directory that can be opened; it says all that a person needs."""
    (finding,) = Checkpoint.open(home).findings
    complete(finding)
    return finding


def complete(finding: Finding) -> None:
    assert finding.file
    assert finding.message
    if finding.severity != "note":
        assert finding.expected is not None
        assert finding.found is not None
        assert finding.next
        assert finding.expected != finding.found


def codes(home: Path) -> list[tuple[str, str]]:
    found = Checkpoint.open(home).findings
    for finding in found:
        complete(finding)
    return [(finding.code, finding.severity) for finding in found]


def refused(home: str | Path) -> Finding:
    with pytest.raises(Refused) as caught:
        Checkpoint.open(home)
    (finding,) = caught.value.findings
    complete(finding)
    return finding
