"""A real browser, which ends with the file of tests that wanted it: its event loop would be in the way of others'."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import PATIENCE_S

BROWSER = "/usr/bin/chromium"
ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


class Chromium:
    """A browser that is started when it is first wanted, and again if it has gone since."""

    def __init__(self, play: Any) -> None:
        self._play = play
        self._started: Any = None

    def get(self) -> Any:
        if self._started is None or not self._started.is_connected():
            self._started = self._play.chromium.launch(
                executable_path=BROWSER, args=ARGUMENTS, timeout=1000 * PATIENCE_S
            )
        return self._started

    def close(self) -> None:
        if self._started is not None and self._started.is_connected():
            self._started.close()


@pytest.fixture(scope="module")
def kept_browser() -> Iterator[Chromium]:
    if not Path(BROWSER).exists():
        pytest.skip(f"there is no browser at {BROWSER}; on Debian: apt-get install chromium")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=1000 * PATIENCE_S)
    with sync_playwright() as play:
        kept = Chromium(play)
        yield kept
        kept.close()


@pytest.fixture
def browser(kept_browser: Chromium) -> Any:
    return kept_browser.get()
