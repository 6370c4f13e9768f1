"""Toy checkpoints, made once."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.inputs.toys import make_toys


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toys by name; not to be changed."""
    root = tmp_path_factory.mktemp("toys")
    make_toys(root)
    return root


@pytest.fixture
def copy_of(toys: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a toy that a test may change."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(toys / name, tmp_path / name))

    return copy
