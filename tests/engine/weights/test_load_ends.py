"""However a load ends, nothing of it is left: no thread, no open file, no memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.parallel.pieces import RankPieces, rank_pieces
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.ledger import account
from firstlight.engine.weights.loader import LoadProgress, load
from firstlight.engine.weights.loading.pages import reserve
from firstlight.engine.weights.loading.readers import Cancelled
from firstlight.engine.weights.synthesize import synthesize
from tests.costs import own_bytes
from tests.engine.weights.files import LLAMA

ROUNDS = 5


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 60 MB, nearly all of it embedding and head."""
    path = tmp_path_factory.mktemp("large")
    synthesize({**LLAMA, "vocab_size": 120_000, "hidden_size": 64, "num_attention_heads": 4}, path, shards=2)
    return path


def plan(home: Path) -> tuple[Checkpoint, RankPieces]:
    checkpoint = Checkpoint.open(home)
    spec, matcher = FAMILIES.describe(checkpoint.config)
    return checkpoint, rank_pieces(spec, Mesh(), 0, "F32", account(checkpoint, spec, matcher))


def leaves_nothing(end: Callable[[], object], nbytes: int) -> None:
    """No thread, no open file, and no memory: what stays each time, not what a process comes to have once."""

    def kept_bytes() -> int:
        before = own_bytes()
        end()
        kept = own_bytes() - before
        assert not [one.name for one in threading.enumerate() if one.name.startswith(("read-", "pages-"))]
        assert not [one for one in psutil.Process().open_files() if "large" in one.path]
        return kept

    assert any(kept_bytes() < 0.1 * nbytes for _ in range(ROUNDS))


def cancel_at(share: float, cancel: threading.Event) -> Callable[[LoadProgress], None]:
    def progress(now: LoadProgress) -> None:
        if now.bytes_done >= share * now.bytes_total:
            cancel.set()

    return progress


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_a_cancelled_load_gives_everything_back(home: Path, share: float) -> None:
    checkpoint, pieces = plan(home)
    assert pieces.nbytes > 50e6

    def end() -> None:
        cancel = threading.Event()
        with pytest.raises(Cancelled):
            load(checkpoint, pieces, threads=2, progress=cancel_at(share, cancel), cancel=cancel)

    leaves_nothing(end, pieces.nbytes)


def test_an_interrupt_gives_everything_back(home: Path) -> None:
    checkpoint, pieces = plan(home)

    def interrupted(_: LoadProgress) -> None:
        raise KeyboardInterrupt

    def end() -> None:
        with pytest.raises(KeyboardInterrupt):
            load(checkpoint, pieces, progress=interrupted)

    leaves_nothing(end, pieces.nbytes)


@pytest.mark.parametrize("has_begun", [False, True])
def test_an_interrupt_while_a_thread_starts_is_one(
    home: Path, monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    """Such a thread cannot be waited for, which is no failure of the load."""
    checkpoint, pieces = plan(home)
    start, started = threading.Thread.start, 0

    def interrupted(thread: threading.Thread) -> None:
        nonlocal started
        started += 1
        if started != 2:
            start(thread)
            return
        if has_begun:
            monkeypatch.setattr(thread, "_started", Unset())
            start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load(checkpoint, pieces, threads=4)


class Unset(threading.Event):
    """What a thread says once it runs, and nobody has heard yet."""

    def is_set(self) -> bool:
        return False

    def wait(self, timeout: float | None = None) -> bool:
        return False


def test_a_file_that_is_cut_gives_everything_back(home: Path, tmp_path: Path) -> None:
    checkpoint, pieces = plan(home)
    last = home / checkpoint.shards[-1]
    content = last.read_bytes()

    def end() -> None:
        with pytest.raises(Refused):
            load(checkpoint, pieces, threads=2)

    last.write_bytes(content[:-1000])
    try:
        leaves_nothing(end, pieces.nbytes)
    finally:
        last.write_bytes(content)


def test_memory_that_was_reserved_before_is_what_weights_lie_in(home: Path) -> None:
    """And it is waited for no longer than it takes to come."""
    checkpoint, pieces = plan(home)
    whole: dict[str, Any] = load(checkpoint, pieces).params

    def grown_bytes() -> int:
        pages = reserve((storage.nbytes for storage in pieces.storages), threads=1)
        pages.wait()
        before = own_bytes()
        weights = load(checkpoint, pieces, reserved=pages)
        grown = own_bytes() - before
        assert weights.pool.waited_s == pages.waited_s
        assert all((weights.params[name] == value).all() for name, value in whole.items())
        return grown

    assert any(grown_bytes() < 0.1 * pieces.nbytes for _ in range(ROUNDS)), "a second copy"


def test_memory_for_something_else_is_our_own_mistake(home: Path) -> None:
    checkpoint, pieces = plan(home)
    with pytest.raises(AssertionError, match="memory for something else"):
        load(checkpoint, pieces, reserved=reserve([1000]))
