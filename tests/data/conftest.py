"""The scripts of data/samples as modules, and the checkpoint that they made, in transformers."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SAMPLES = Path(__file__).resolve().parents[2] / "data" / "samples"


@pytest.fixture(scope="session")
def script() -> Iterator[Callable[[str], ModuleType]]:
    """Imports a script of data/samples by its name; scripts find each other as when one is run."""
    sys.path.insert(0, str(SAMPLES))
    yield importlib.import_module
    sys.path.remove(str(SAMPLES))


@pytest.fixture(scope="session")
def scenes(script: Callable[[str], ModuleType]) -> ModuleType:
    """The renderer, where its font is installed."""
    module = script("menagerie_scenes")
    if not any(Path(path).is_file() for path in module.FONT_PATHS):
        pytest.skip("needs the font Noto Color Emoji: apt-get install fonts-noto-color-emoji")
    return module


@pytest.fixture(scope="session")
def menagerie(script: Callable[[str], ModuleType]) -> Any:
    """The checkpoint that ships, asked through transformers."""
    return script("train_menagerie").Menagerie(SAMPLES / "menagerie")
