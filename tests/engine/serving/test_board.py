"""Statistics laid out for other processes: whole or not at all, of an engine that lives, and by whichever is there."""

import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from firstlight.engine.serving.board import BOARD, PLACES, SIZE_BYTES, Board, BoardReader, open_board
from firstlight.engine.serving.stats import EngineStats, StepSample
from tests.waiting import PATIENCE_S


def stats(step: int, blocks: int = 0) -> EngineStats:
    layers = {f"layers.{index}.{'x' * (step % 50)}": float(step) for index in range(blocks)}
    sample = StepSample(step=step, time_s=1.0, phase="decode", tokens=1, total_ms=1.0, layers_ms=layers, collectives=())
    return EngineStats(
        time_s=time.time(),
        step=step,
        running=1,
        waiting=0,
        free_pages=3,
        num_pages=4,
        page_size=16,
        prompt_tokens=step,
        generated_tokens=step,
        busy_s=0.5,
        last_step_ms=2.0,
        requests={"stop": step},
        sample=sample if blocks else None,
    )


def test_what_was_shown_last_is_read_and_offers_are_taken_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board, reader = Board(tmp_path / BOARD), BoardReader(tmp_path / BOARD)
    assert reader.read() is None, "nothing was shown yet"
    board.show(stats(7, blocks=5))
    assert reader.read() == BoardReader(tmp_path / BOARD).read()
    shown = reader.read()
    assert shown is not None
    assert (shown.step, len(shown.sample.layers_ms if shown.sample else ())) == (7, 5)
    monkeypatch.setattr("firstlight.engine.serving.board.PERIOD_S", 3600.0)
    board.offer(lambda: pytest.fail("it was shown a moment ago"))
    monkeypatch.setattr("firstlight.engine.serving.board.PERIOD_S", 0.0)
    board.offer(lambda: stats(8))
    again = reader.read()
    assert again is not None
    assert again.step == 8
    assert (tmp_path / BOARD).stat().st_mode & 0o077 == 0, "for this user alone"


def test_a_sample_that_is_too_large_is_left_out_and_not_the_rest(tmp_path: Path) -> None:
    board, reader = Board(tmp_path / BOARD), BoardReader(tmp_path / BOARD)
    board.show(stats(49, blocks=SIZE_BYTES // 40))
    shown = reader.read()
    assert shown is not None
    assert (shown.step, shown.sample) == (49, None)


def test_a_reader_never_sees_half_of_one_and_half_of_another(tmp_path: Path) -> None:
    board, reader = Board(tmp_path / BOARD), BoardReader(tmp_path / BOARD)
    end = threading.Event()

    def write() -> None:
        step = 0
        while not end.is_set():
            step += 1
            board.show(stats(step, blocks=step % 40))

    thread = threading.Thread(target=write)
    thread.start()
    seen = 0
    began_s = time.monotonic()
    while time.monotonic() < began_s + 0.5 or (seen <= 10 and time.monotonic() < began_s + PATIENCE_S):
        one = reader.read()
        if one is None:
            continue
        seen += 1
        assert one.step == one.prompt_tokens == one.generated_tokens == one.requests["stop"]
        assert one.sample is None or set(one.sample.layers_ms.values()) == {float(one.step)}
    end.set()
    thread.join()
    assert seen > 10


@pytest.mark.parametrize(
    "content", [b"", b"x" * 40, struct.pack("<QQII", os.getpid(), 1, 2**31, 5) + bytes(2 * SIZE_BYTES)]
)
def test_what_is_no_board_says_nothing(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / BOARD
    reader = BoardReader(path)
    assert reader.read() is None, "there is no file yet"
    path.write_bytes(content)
    assert reader.read() is None


def test_an_engine_that_left_or_died_has_no_statistics_and_another_one_has_its_own(tmp_path: Path) -> None:
    path = tmp_path / BOARD
    reader, board = BoardReader(path), Board(path)
    board.show(stats(1))
    assert reader.read() is not None
    board.close()
    assert reader.read() is None, "it left"
    other = (
        "import sys; from tests.engine.serving.test_board import Board, stats;"
        f"Board({str(path)!r}).show(stats(5)); print('shown', flush=True); sys.stdin.read()"
    )
    root = Path(__file__).parents[3]
    process = subprocess.Popen([sys.executable, "-c", other], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == b"shown\n"
    shown = reader.read()
    assert shown is not None
    assert shown.step == 5
    process.kill()
    process.wait()
    assert reader.read() is None, "it died"
    process.stdin.close()
    process.stdout.close()


def test_an_engine_that_stands_still_in_the_middle_of_a_payload_leaves_the_one_before(tmp_path: Path) -> None:
    board, reader = Board(tmp_path / BOARD), BoardReader(tmp_path / BOARD)
    for step in (1, 2, 3):
        board.show(stats(step))
        place = PLACES[(step + 1) % 2]
        with (tmp_path / BOARD).open("r+b") as file:  # the first bytes of the next payload, and then nothing
            file.seek(place + 24)
            file.write(b"half of one")
        shown = reader.read()
        assert shown is not None
        assert shown.step == step


def test_without_a_place_there_is_no_board(tmp_path: Path) -> None:
    assert open_board(None) is None
    assert open_board(tmp_path / "absent") is None
