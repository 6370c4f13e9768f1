from __future__ import annotations

import ctypes
import os
import random
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.weights.loading.readers import Job, Piece, read_jobs, read_pieces
from firstlight.engine.weights.sources import local
from firstlight.engine.weights.sources import native as compiled_reads
from firstlight.engine.weights.sources.base import Rows, read_rows_at_once
from firstlight.engine.weights.sources.local import LOCAL_SHAPE, LocalFiles, Method
from firstlight.engine.weights.sources.trial import Cheaper
from firstlight.kernels.native import library

MAX_GAP_BYTES = LOCAL_SHAPE.gap_bytes


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, bytes]:
    """Three files with different random bytes; the last is larger than two chunks."""
    directory = tmp_path_factory.mktemp("files")
    contents = {}
    for index, size in enumerate([10_000, 300_000, 2 * LOCAL_SHAPE.chunk_bytes + 12_345]):
        path = directory / f"shard-{index}.bin"
        contents[path] = random.Random(index).randbytes(size)
        path.write_bytes(contents[path])
    return contents


def random_pieces(files: dict[Path, bytes], count: int) -> tuple[list[Piece], list[bytearray], list[bytes]]:
    generator = random.Random(7)
    pieces: list[Piece] = []
    targets, expected = [], []
    for _ in range(count):
        path = generator.choice(list(files))
        content = files[path]
        start = generator.randrange(len(content))
        length = generator.choice([0, 1, 17, 1000, 5000, 100_000])
        length = min(length, len(content) - start)
        target = bytearray(length)
        pieces.append((path, start, memoryview(target)))
        targets.append(target)
        expected.append(content[start : start + length])
    return pieces, targets, expected


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_each_piece_gets_exactly_its_bytes(files: dict[Path, bytes], threads: int) -> None:
    pieces, targets, expected = random_pieces(files, 400)
    reported: list[int] = []
    callers: set[int] = set()

    def progress(count: int) -> None:
        reported.append(count)
        callers.add(threading.get_ident())

    delivered = read_pieces(pieces, threads, progress)
    assert [bytes(target) for target in targets] == expected
    assert delivered == sum(reported) == sum(len(content) for content in expected)
    assert callers == {threading.get_ident()}


def test_a_piece_larger_than_a_chunk_arrives_whole(files: dict[Path, bytes]) -> None:
    path, content = list(files.items())[2]
    target = bytearray(len(content))
    calls: list[int] = []
    read_pieces([(path, 0, memoryview(target))], 2, calls.append)
    assert bytes(target) == content
    assert len(calls) == 9, "eight shares of two threads, and the remainder"


@pytest.mark.parametrize(("gap", "system_calls"), [(0, 1), (100, 1), (MAX_GAP_BYTES, 1), (MAX_GAP_BYTES + 1, 50)])
def test_near_pieces_share_a_system_call(
    files: dict[Path, bytes], monkeypatch: pytest.MonkeyPatch, gap: int, system_calls: int
) -> None:
    path, content = list(files.items())[1]
    targets = [bytearray(30) for _ in range(50)]
    starts = [5 + index * (30 + gap) for index in range(50)]
    calls = []

    def counted(descriptor: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        found = preadv(descriptor, buffers, offset, flags)  # not every file system takes every flag
        calls.append(offset)
        return found

    preadv = os.preadv
    monkeypatch.setattr(local.os, "preadv", counted)
    read_pieces([(path, start, memoryview(target)) for start, target in zip(starts, targets, strict=True)], 1)
    assert len(calls) == system_calls
    assert [bytes(target) for target in targets] == [content[start : start + 30] for start in starts]


def test_short_reads_are_continued(files: dict[Path, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may return fewer bytes than asked for, in the middle of a buffer."""
    preadv = os.preadv

    def short(descriptor: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        return preadv(descriptor, [buffers[0][:777]], offset, flags)

    monkeypatch.setattr(local.os, "preadv", short)
    pieces, targets, expected = random_pieces(files, 60)
    read_pieces(pieces, 2)
    assert [bytes(target) for target in targets] == expected


@pytest.mark.parametrize("threads", [1, 2])
def test_a_file_that_ends_early_is_named_with_the_missing_range(tmp_path: Path, threads: int) -> None:
    path = tmp_path / "model-00002-of-00003.safetensors"
    path.write_bytes(bytes(5000))
    pieces: list[Piece] = [(path, 0, memoryview(bytearray(100))), (path, 4900, memoryview(bytearray(4196)))]
    before = open_descriptors()
    with pytest.raises(Refused) as refused:
        read_pieces(pieces, threads)
    (finding,) = refused.value.findings
    assert finding.code == "truncated-shard"
    assert finding.file == str(path)
    assert finding.expected == "at least 9096 bytes"
    assert finding.found == "5000 bytes"
    assert finding.next == "fetch bytes 5000 to 9095 of the file again"
    assert open_descriptors() == before


def test_a_missing_file_is_named(files: dict[Path, bytes], tmp_path: Path) -> None:
    path = next(iter(files))
    pieces: list[Piece] = [(path, 0, memoryview(bytearray(9))), (tmp_path / "gone", 0, memoryview(bytearray(9)))]
    with pytest.raises(Refused) as refused:
        read_pieces(pieces, 2)
    assert refused.value.findings[0].code == "missing-shard"
    assert refused.value.findings[0].file == str(tmp_path / "gone")


def test_what_the_system_cannot_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(Refused) as refused:
        read_pieces([(tmp_path, 0, memoryview(bytearray(9)))], 1)
    assert refused.value.findings[0].code == "read-failed"
    assert refused.value.findings[0].file == str(tmp_path)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_few_files_are_open_at_a_time(tmp_path: Path) -> None:
    pieces: list[Piece] = []
    for index in range(300):
        path = tmp_path / f"{index}.bin"
        path.write_bytes(bytes([index % 256]) * 64)
        pieces.append((path, 0, memoryview(bytearray(64))))
    before = open_descriptors()
    most = 0

    def progress(_: int) -> None:
        nonlocal most
        most = max(most, open_descriptors())

    read_pieces(reversed(pieces), 3, progress)
    assert most - before <= 4
    assert open_descriptors() == before
    assert [target[0] for _, _, target in pieces] == [index % 256 for index in range(300)]


def test_a_failing_progress_callback_stops_the_reading(files: dict[Path, bytes]) -> None:
    def progress(_: int) -> None:
        raise KeyboardInterrupt

    before = open_descriptors()
    with pytest.raises(KeyboardInterrupt):
        read_pieces(random_pieces(files, 400)[0], 2, progress)
    assert open_descriptors() == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read-")]


@pytest.mark.parametrize("as_rows", [False, True])
def test_memory_is_provided_by_the_thread_that_reads_and_before_it_does(
    files: dict[Path, bytes], as_rows: bool
) -> None:
    path, content = list(files.items())[2]
    target = memoryview(bytearray(3_000_000))
    piece: Piece = Rows(str(path), 0, target, 1000, 2000) if as_rows else (path, 0, target)
    provided: list[tuple[str, int]] = []

    def provide(view: memoryview) -> None:
        assert not any(view), "nothing was read there yet"
        provided.append((threading.current_thread().name, view.nbytes))

    for _ in read_jobs([Job([piece])], LocalFiles(), 2, provide=provide):
        pass
    assert sum(nbytes for _, nbytes in provided) == target.nbytes
    assert {name for name, _ in provided} <= {"read-0", "read-1"}
    assert bytes(target) == (shares(content, 0, 3000, 1000, 2000) if as_rows else content[: target.nbytes])


def shares(content: bytes, offset: int, count: int, span: int, stride: int) -> bytes:
    starts = range(offset, offset + count * stride, stride)
    return b"".join(content[start : start + span] for start in starts)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(("span", "stride"), [(1, 2), (512, 4096), (700, 9000), (6000, 6001), (3000, 20_000)])
def test_shares_of_rows_are_read_and_nothing_between_them(
    files: dict[Path, bytes], cached: bool, span: int, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the page cache or not, by one thread or more, in one request or several."""
    if not cached:
        monkeypatch.setattr(local, "NO_WAIT", 0)
    path, content = list(files.items())[2]
    count = min(3000, (len(content) - 77) // stride)
    target = bytearray(count * span)
    source = LocalFiles()
    rows = Rows(str(path), 77, memoryview(target), span, stride)
    assert read_pieces([rows], 3, source=source) == count * span
    assert bytes(target) == shares(content, 77, count, span, stride)
    assert source.usage["cached"] + source.usage["buffered"] == count * span


def test_shares_of_rows_that_the_file_does_not_have_are_refused(files: dict[Path, bytes]) -> None:
    path, content = next(iter(files.items()))
    rows = Rows(str(path), 0, memoryview(bytearray(11 * 10)), 10, len(content) // 10)
    with pytest.raises(Refused) as refused:
        read_pieces([rows], 2)
    assert refused.value.findings[0].code == "truncated-shard"


@pytest.mark.parametrize("gap", [10, 100_000])
def test_far_sources_get_shares_of_rows_by_few_requests_or_one_each(files: dict[Path, bytes], gap: int) -> None:
    path, content = list(files.items())[1]
    target = memoryview(bytearray(20 * 50))
    opened = LocalFiles().open(str(path))
    read_rows_at_once(opened, 5, target, 50, 7000, gap)
    opened.close()
    assert bytes(target) == shares(content, 5, 20, 50, 7000)


def direct_and_buffered(method: Method, path: Path, content: bytes) -> LocalFiles:
    source = LocalFiles(path.parent, method)
    pieces, targets, expected = random_pieces({Path(path.name): content}, 200)
    read_pieces(pieces, 3, source=source)
    assert [bytes(target) for target in targets] == expected
    source.close()
    return source


@pytest.mark.parametrize("method", ["direct", "buffered", "auto"])
def test_every_way_of_reading_gives_the_same_bytes(files: dict[Path, bytes], method: Method) -> None:
    """Past the page cache at any offset and length, to the last odd byte of a file."""
    for path, content in files.items():
        source = direct_and_buffered(method, path, content)
        target = bytearray(777)
        read_pieces([(path.name, len(content) - 777, memoryview(target))], 1, source=source)
        assert bytes(target) == content[-777:]
        for span, stride in ((700, 2500), (700, 40_000), (5000, 9000)):
            count = (len(content) - 55 - span) // stride + 1 if len(content) > 55 + span else 0
            target = bytearray(count * span)
            read_pieces([Rows(path.name, 55, memoryview(target), span, stride)], 2, source=source)
            assert bytes(target) == shares(content, 55, count, span, stride)
        if method != "auto":
            assert set(source.usage.counts()) <= {method, "buffered", "asked", "disk"}


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("method", ["direct", "buffered"])
@pytest.mark.parametrize("has_compiler", [True, False])
def test_rows_are_the_same_with_and_without_what_is_between_them(
    files: dict[Path, bytes], together: bool, method: Method, has_compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last byte of a file, rows longer than a buffer too; behind its end lies nothing. Asked bytes count."""
    monkeypatch.setattr(local.Gaps, "is_together", lambda *_: together)
    monkeypatch.setattr(local, "NATIVE_BYTES", 1)
    if not has_compiler:
        monkeypatch.setattr(local, "native", lambda: None)
    path, content = list(files.items())[2]
    for span, stride in ((700, 2500), (2048, 50_000), (40_000, 100_000), (3 << 20, 4 << 20)):
        count = (len(content) - span) // stride + 1
        start = len(content) - (count - 1) * stride - span
        source, target = LocalFiles(method=method), bytearray(count * span)
        read_pieces([Rows(str(path), start, memoryview(target), span, stride)], 2, source=source)
        assert bytes(target) == shares(content, start, count, span, stride)
        assert source.usage["direct"] + source.usage["buffered"] == count * span
        alone = count * (span + 2 * local.BLOCK_BYTES)
        assert count * span <= source.usage["asked"] <= (len(content) + 64 * local.BLOCK_BYTES if together else alone)
        with pytest.raises(Refused) as refused:
            read_pieces([Rows(str(path), start + 1, memoryview(target), span, stride)], 2, source=source)
        assert refused.value.findings[0].code == "truncated-shard"


@pytest.mark.parametrize("nbytes", [1, 4096, local.DIRECT_BYTES, local.DIRECT_BYTES + 1, 8 << 20])
def test_reads_past_the_cache_are_of_about_the_same_size(
    nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No short one at the end, which takes nearly as long as a whole one."""
    content = random.Random(nbytes).randbytes(nbytes + 100)
    (tmp_path / "shard").write_bytes(content)
    asked, target, fill = [], bytearray(nbytes), local.LocalFile._fill

    def noted(self: local.LocalFile, descriptor: int, buffer: local.Buffer, start: int, end: int) -> None:
        asked.append(end - start)
        fill(self, descriptor, buffer, start, end)

    monkeypatch.setattr(local.LocalFile, "_fill", noted)
    with closing(LocalFiles(tmp_path, "direct").open("shard")) as opened:
        opened.read_into(77, [memoryview(target)])
    assert bytes(target) == content[77 : 77 + nbytes]
    if not asked:
        pytest.skip("a file system without reads past the cache")
    assert len(asked) == -(-nbytes // local.DIRECT_BYTES)
    assert min(asked) > max(asked) - 3 * local.BLOCK_BYTES


def test_a_file_that_is_written_to_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(bytes(100_000))
    source = LocalFiles(tmp_path)
    source.stat("shard")
    read_pieces([("shard", 0, memoryview(bytearray(10)))], 1, source=source)
    with path.open("r+b") as stream:
        stream.seek(50_000)
        stream.write(b"x")
    os.utime(path, ns=(1, 1))
    with pytest.raises(Refused) as refused:
        read_pieces([("shard", 0, memoryview(bytearray(10)))], 1, source=source)
    assert refused.value.findings[0].code == "changed-file"


def both_ways(read: Callable[[LocalFiles], bytes], monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, bytes]:
    """What compiled code and what Python gives; the former was really called."""
    compiled = local.native()
    assert compiled is not None, "a compiler is among what the tests need"
    calls: list[str] = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(compiled, name)

    monkeypatch.setattr(local, "native", Watched)
    ours = read(LocalFiles())
    assert calls
    monkeypatch.setattr(local, "native", lambda: None)
    return ours, read(LocalFiles())


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 16 << 20), (4096, 300_000), (12_345, 9_000_001), (8, 4 << 20)])
def test_compiled_and_plain_reads_give_the_same_bytes(
    files: dict[Path, bytes], offset: int, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any phase of a page, over more than one window, into memory at any address."""
    path, content = list(files.items())[2]
    for shift in (0, 3):

        def read(source: LocalFiles, shift: int = shift) -> bytes:
            target = bytearray(nbytes + 64)
            read_pieces([(path, offset, memoryview(target)[shift : shift + nbytes])], 2, source=source)
            assert not any(target[:shift]), "nothing in front"
            assert not any(target[shift + nbytes :]), "nothing behind"
            return bytes(target[shift : shift + nbytes])

        ours, plain = both_ways(read, monkeypatch)
        assert ours == plain == content[offset : offset + nbytes]
        monkeypatch.undo()


@pytest.mark.parametrize("first_hole", [None, 0, 1500])
@pytest.mark.parametrize(("span", "stride"), [(512, 4096), (5000, 5001), (3000, 100_000), (300_000, 5_000_000)])
def test_compiled_and_plain_shares_of_rows_are_the_same_bytes(
    files: dict[Path, bytes], span: int, stride: int, first_hole: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the page cache lacks all of the file, or what lies behind some row."""
    path, content = list(files.items())[2]
    count = min(4000, (len(content) - 77 - span) // stride + 1)

    def read(source: LocalFiles) -> bytes:
        if first_hole is not None:
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), first_hole * 4096, 0, os.POSIX_FADV_DONTNEED)
        target = bytearray(count * span)
        read_pieces([Rows(str(path), 77, memoryview(target), span, stride)], 2, source=source)
        assert source.usage["cached"] + source.usage["buffered"] == count * span
        return bytes(target)

    monkeypatch.setattr(local, "NATIVE_BYTES", 1)
    ours, plain = both_ways(read, monkeypatch)
    assert ours == plain == shares(content, 77, count, span, stride)


def test_compiled_reads_stop_where_a_file_ends(tmp_path: Path) -> None:
    """And say what is missing, as plain ones do: behind the end lies nothing, not zeros."""
    path = tmp_path / "shard"
    path.write_bytes(b"x" * 1_000_001)
    for piece in (
        (path, 0, memoryview(bytearray(1_000_100))),
        Rows(str(path), 1, memoryview(bytearray(500_000)), 1000, 2004),
    ):
        with pytest.raises(Refused) as refused:
            read_pieces([piece], 2)
        assert refused.value.findings[0].code == "truncated-shard"


def test_what_is_behind_the_end_of_a_file_is_not_in_the_page_cache(files: dict[Path, bytes]) -> None:
    compiled = local.native()
    assert compiled is not None
    path, content = list(files.items())[2]
    with path.open("rb") as stream:
        assert 0 <= compiled.cached(stream.fileno(), 0, len(content) + (1 << 20)) <= len(content)
        assert compiled.cached(stream.fileno(), len(content) + (1 << 20), 300_000) == 0


@pytest.mark.parametrize(
    ("span", "stride", "scratch_bytes"), [(256, 4096, 20_000), (5000, 5000, 8192), (300, 301, 299)]
)
def test_shares_of_rows_are_the_same_by_either_way(tmp_path: Path, span: int, stride: int, scratch_bytes: int) -> None:
    """Out of one buffer for many rows, and one by one; both end where the file does."""
    compiled = local.native()
    assert compiled is not None
    path, rows = tmp_path / "shard", 100
    content = random.Random(1).randbytes(99 * stride + span)
    path.write_bytes(content)
    expected = b"".join(content[at * stride : at * stride + span] for at in range(rows))
    target, more = bytearray(rows * span), bytearray(200 * span)
    with path.open("rb") as stream:
        scratch = memoryview(bytearray(scratch_bytes))
        done = compiled.take_rows(stream.fileno(), 0, memoryview(target), span, stride, scratch)
        assert done == (rows if span <= scratch_bytes else 0)
        assert target[: done * span] == expected[: done * span]
        assert compiled.try_rows(stream.fileno(), 0, memoryview(target), span, stride) == rows
        assert target == expected
        assert compiled.take_rows(stream.fileno(), 0, memoryview(more), span, stride, scratch) <= done
        assert compiled.try_rows(stream.fileno(), 0, memoryview(more), span, stride) == rows


@pytest.mark.parametrize(("offset", "shift", "nbytes"), [(8, 0, 70_000), (77, 3, 200), (0, 5, 4096), (5, 63, 127)])
def test_a_range_by_way_of_a_buffer_is_the_same_bytes(tmp_path: Path, offset: int, shift: int, nbytes: int) -> None:
    """At every phase of a line of the processor's cache, past the buffer's length, and up to the end of the file."""
    compiled = local.native()
    assert compiled is not None
    path, content = tmp_path / "shard", random.Random(2).randbytes(offset + nbytes)
    path.write_bytes(content)
    target, scratch = bytearray(shift + nbytes + 100), memoryview(bytearray(8192))
    with path.open("rb") as stream:
        assert compiled.take(stream.fileno(), offset, memoryview(target)[shift:], scratch) == nbytes
    assert target == bytes(shift) + content[offset:] + bytes(100)


@pytest.mark.parametrize("way", ["scratch", "at once"])
def test_memory_out_of_step_with_its_file_is_filled_by_way_of_a_buffer_where_that_is_cheaper(
    way: str, files: dict[Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is in step, or small, without one, in whatever order they come in one read."""
    path, content = list(files.items())[2]
    assert path.read_bytes() == content, "now the page cache has it"
    compiled, taken = local.native(), list[int]()
    assert compiled is not None
    take = compiled.take

    def noted(descriptor: int, offset: int, target: memoryview, scratch: memoryview) -> int:
        taken.append(target.nbytes)
        return take(descriptor, offset, target, scratch)

    monkeypatch.setattr(compiled, "take", noted)
    memory = memoryview(bytearray(4 << 20))
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % local.STEP_BYTES
    large = local.NATIVE_BYTES + 64
    views = [memory[start:][:100], memory[start + 128 :][:large], memory[start + (1 << 20) + 8 :][: large + 1]]
    for offset, expected in ((28, [large + 1]), (36, [large]), (0, [large, large + 1])):
        taken.clear()
        source = LocalFiles()
        source.out_of_step = Cheaper(way)
        with closing(source.open(str(path))) as opened:
            opened.read_into(offset, views)
        assert b"".join(views) == content[offset : offset + sum(view.nbytes for view in views)]
        assert taken == (expected if way == "scratch" else [])


@pytest.mark.parametrize("compilers", [(), ("false",)])
def test_without_a_compiler_reads_are_plain(
    files: dict[Path, bytes], compilers: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is none, and where it fails."""
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "COMPILERS", compilers)
    monkeypatch.setattr(local, "native", compiled_reads.native.__wrapped__)
    assert local.native() is None
    path, content = list(files.items())[2]
    target = bytearray(len(content))
    read_pieces([(path, 0, memoryview(target))], 2)
    assert bytes(target) == content
