"""What is read of very large checkpoints as columns is what the plain parsers and the plain account say of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.engine.model.families import FAMILIES
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.parallel.pieces import rank_pieces
from firstlight.engine.weights import checkpoint as opening
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.files import index as indexes
from firstlight.engine.weights.files.header import read_header
from firstlight.engine.weights.files.index import INDEX
from firstlight.engine.weights.files.lines import STEP_BYTES, Vocabulary, read_lines
from firstlight.engine.weights.files.shard_columns import read_shard
from firstlight.engine.weights.files.weight_map import WeightMap
from firstlight.engine.weights.ledger import account
from firstlight.engine.weights.names.patterns import parted, patterns
from firstlight.engine.weights.names.stock import stock
from firstlight.engine.weights.names.table import Table, infos_of
from tests.engine.weights.files import entries, raw
from tests.engine.weights.releases import write_release
from tests.engine.weights.test_wholesale import small_k3

Change = Callable[[Path], Any]
LINES = b'":"', b'","'  # of an index: what is in a line's middle, and between lines
SHARDS = 4


def both(home: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Checkpoint, Checkpoint]:
    """The checkpoint as columns, and tensor by tensor."""
    plain = Checkpoint.open(home)
    monkeypatch.setattr(opening, "MANY", 0)
    monkeypatch.setattr(opening, "LARGE_BYTES", 0)
    monkeypatch.setattr(indexes, "LARGE_BYTES", 0)
    found = Checkpoint.open(home)
    assert isinstance(plain.tensors, dict)
    assert isinstance(found.tensors, Table)
    return found, plain


@pytest.fixture
def home(tmp_path: Path) -> Path:
    config, tensors = small_k3()
    return write_release(tmp_path / "k3", config, tensors, SHARDS)


def shard(home: Path, number: int) -> Path:
    return home / f"model-{number:05}-of-{SHARDS:06}.safetensors"


def rewrite(home: Path, number: int, change: Callable[[dict[str, Any]], Any], **format: Any) -> None:
    """A shard with another header; data are not moved."""
    path = shard(home, number)
    with path.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    header = change(header) or header
    text = json.dumps(header, **format).encode()
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)


def reindex(home: Path, change: Callable[[dict[str, str]], Any], **format: Any) -> None:
    index = json.loads((home / INDEX).read_text())
    index["weight_map"] = change(index["weight_map"]) or index["weight_map"]
    (home / INDEX).write_text(json.dumps(index, **format))


def of_shard(index: dict[str, str], path: Path) -> list[str]:
    return [name for name, file in index.items() if file == path.name]


def moved(header: dict[str, Any]) -> None:
    name = list(header)[7]
    header[name]["data_offsets"] = [offset - 2 for offset in header[name]["data_offsets"]]


def recast(header: dict[str, Any], word: str, **other: Any) -> None:
    """Entries whose names have a word in them say something else."""
    for name, entry in header.items():
        if word in name and name != "__metadata__":
            entry.update(other)


def shifted(header: dict[str, Any], by: int) -> None:
    """Each entry so many bytes further from where it should be than the one before."""
    for place, name in enumerate(name for name in header if name != "__metadata__"):
        start, stop = header[name]["data_offsets"]
        first = max(0, start + place * by)
        header[name]["data_offsets"] = [first, first + stop - start]


def repeat(path: Path, count: int, **other: Any) -> None:
    """The first entries of a header again behind its last, with something else in them."""
    with path.open("rb") as stream:
        text = stream.read(int.from_bytes(stream.read(8), "little"))
    header, end = json.loads(text), path.stat().st_size - 8 - len(text)
    more = {name: {**header[name], **other} for name in list(header)[1 : count + 1]}
    path.write_bytes(raw(text.rstrip()[:-1] + b"," + json.dumps(more, separators=(",", ":")).encode()[1:]))
    cut(path, path.stat().st_size + end)


def cut(path: Path, nbytes: int) -> None:
    with path.open("r+b") as stream:
        stream.truncate(nbytes)


def copied(home: Path) -> None:
    """A tensor of the second shard, and one of another shape, in a shard of their own."""
    first = infos_of(read_shard(shard(home, 2), Vocabulary()))[3:5]  # type: ignore[arg-type]
    (home / "model-00005-of-000004.safetensors").write_bytes(
        raw(entries({first[0].name: list(first[0].shape), first[1].name: [3]}, first[0].dtype), first[0].nbytes + 6)
    )


def everywhere(home: Path, change: Callable[[str], str]) -> None:
    """Other names, in headers and index."""
    for number in range(1, SHARDS + 1):
        rewrite(home, number, lambda h: {n if n == "__metadata__" else change(n): e for n, e in h.items()})
    reindex(home, lambda m: {change(n): f for n, f in m.items()})


def respell(home: Path, one: bytes, other: bytes) -> None:
    """Another spelling in a header's text, with its length as it is then."""
    path = shard(home, 2)
    length = int.from_bytes(path.read_bytes()[:8], "little")
    text, data = path.read_bytes()[8 : 8 + length].replace(one, other), path.read_bytes()[8 + length :]
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def among(entry: tuple[str, Any]) -> str:
    """An order of a header with the metadata in the middle."""
    return "language_model.model.layers.1" if entry[0] == "__metadata__" else entry[0]


CHANGES: dict[str, Change] = {
    "nothing": lambda home: None,
    "no index": lambda home: (home / INDEX).unlink(),
    "an index in lines, sorted": lambda home: reindex(home, lambda m: dict(sorted(m.items())), indent=2),
    "an index with escapes": lambda home: reindex(home, lambda m: {**m, "\u00e9": shard(home, 1).name}),
    "an index of another release": lambda home: reindex(home, lambda m: {f"a.{n}": f for n, f in m.items()}),
    "headers with blanks": lambda home: [rewrite(home, n, lambda h: None) for n in range(1, 5)],
    "headers in another order": lambda home: [rewrite(home, n, lambda h: dict(sorted(h.items()))) for n in (2, 3)],
    "a header in lines": lambda home: rewrite(home, 2, lambda h: None, indent=1),
    "headers in lines": lambda home: [rewrite(home, n, lambda h: None, indent=1) for n in range(1, 5)],
    "a header behind blanks": lambda home: rewrite(home, 2, lambda h: None, separators=(" ,\n", "\t: ")),
    "numbers with zeros before them": lambda home: rewrite(
        home, 2, lambda h: {n.replace("experts.7.", "experts.007."): e for n, e in h.items()}
    ),
    "names with blanks and other letters": lambda home: rewrite(
        home, 2, lambda h: {n.replace("w1", "w\u00e91 "): e for n, e in h.items()}, ensure_ascii=False
    ),
    "every name of its own kind": lambda home: rewrite(
        home, 2, lambda h: {n if n == "__metadata__" else f"{n}{i}x": e for i, (n, e) in enumerate(h.items())}
    ),
    "names with other signs": lambda home: everywhere(home, lambda name: name.replace(".experts.", "[{e}]:, .")),
    "numbers in brackets": lambda home: everywhere(home, lambda name: name.replace("w1", "w1[0,1]}.2")),
    "names with stars": lambda home: everywhere(home, lambda name: name.replace("experts.", "*.e*")),
    "names with quotes and backslashes": lambda home: everywhere(home, lambda name: name.replace(".w", '."w\\.')),
    "names as escapes": lambda home: everywhere(home, lambda name: name.replace("experts", "\u4e13\u5bb6\U0001f680")),
    "one name in two ways": lambda home: (
        everywhere(home, lambda name: name.replace("experts", "\u4e13")),
        rewrite(home, 2, lambda h: None, ensure_ascii=False, separators=(",", ":")),
    ),
    "numbers as escapes": lambda home: respell(home, b".experts.", b".experts\\u002e"),
    "stars as escapes": lambda home: respell(home, b".experts.", b".\\u002a."),
    "names with twenty numbers": lambda home: everywhere(home, lambda name: ".".join("0123456789" * 2) + f".{name}"),
    "entries are sorted": lambda home: rewrite(home, 2, lambda h: None, sort_keys=True),
    "entries have another order": lambda home: rewrite(
        home, 2, lambda h: {n: dict(reversed(e.items())) for n, e in h.items()}, separators=(",", ":")
    ),
    "entries have two orders": lambda home: rewrite(
        home, 2, lambda h: {n: dict(reversed(e.items())) if i % 2 else e for i, (n, e) in enumerate(h.items())}
    ),
    "metadata are written like entries": lambda home: rewrite(
        home, 2, lambda h: {**h, "__metadata__": {"a": '{"b": [1, {"c": "}"}]}', "c\\": "\n"}}
    ),
    "metadata are last": lambda home: rewrite(home, 2, lambda h: {**h, "__metadata__": h.pop("__metadata__")}),
    "metadata are among entries": lambda home: rewrite(home, 2, lambda h: dict(sorted(h.items(), key=among))),
    "keys occur twice": lambda home: repeat(shard(home, 2), 7),
    "a key occurs twice, not alike": lambda home: repeat(shard(home, 3), 1, dtype="F8_E8M0", shape=[4]),
    "all keys occur twice": lambda home: repeat(shard(home, 1), 1 << 20),
    "a shard is cut": lambda home: cut(shard(home, 2), shard(home, 2).stat().st_size - 9),
    "a shard is cut in its header": lambda home: cut(shard(home, 2), 900),
    "a shard is not there": lambda home: shard(home, 3).unlink(),
    "a shard is longer": lambda home: cut(shard(home, 2), shard(home, 2).stat().st_size + 9),
    "tensors overlap": lambda home: rewrite(home, 3, moved),
    "a dtype is unknown": lambda home: rewrite(home, 1, lambda h: h[list(h)[4]].update(dtype="F3")),
    "kinds of dtypes are unknown": lambda home: rewrite(home, 2, lambda h: recast(h, "w1", dtype="Q4", shape=[5])),
    "a kind has other shapes": lambda home: rewrite(home, 2, lambda h: recast(h, "weight_packed", shape=[3, 3])),
    "nothing is what it says": lambda home: [rewrite(home, n, lambda h: recast(h, "", dtype="F4")) for n in (2, 3)],
    "gaps between all tensors": lambda home: rewrite(home, 2, lambda h: shifted(h, 2)),
    "all tensors overlap": lambda home: rewrite(home, 3, lambda h: shifted(h, -2)),
    "half of a shard is not there": lambda home: cut(shard(home, 2), shard(home, 2).stat().st_size // 2),
    "metadata is no text": lambda home: rewrite(home, 1, lambda h: {**h, "__metadata__": {"a": 1}}),
    "a tensor has moved": lambda home: reindex(home, lambda m: {n: m[n] if i % 50 else "x" for i, n in enumerate(m)}),
    "tensors are not listed": lambda home: reindex(home, lambda m: dict(list(m.items())[5:])),
    "tensors are not there": lambda home: reindex(home, lambda m: {**m, "model.layers.3.w": shard(home, 2).name}),
    "copies": copied,
    "copies, and no index": lambda home: (copied(home), (home / INDEX).unlink()),
    "copies that the index means": lambda home: (
        copied(home),
        reindex(home, lambda m: {**m, of_shard(m, shard(home, 2))[3]: "model-00005-of-000004.safetensors"}),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_checkpoint_is_what_it_is_tensor_by_tensor(change: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CHANGES[change](home)
    found, plain = both(home, monkeypatch)
    assert found.findings == plain.findings
    assert list(found.tensors) == list(plain.tensors)
    assert list(found.tensors.items()) == list(plain.tensors.items())
    assert found.payload_bytes == plain.payload_bytes
    some = list(plain.tensors)[:: len(plain.tensors) // 7]
    assert [found.tensors[name] for name in some] == [plain.tensors[name] for name in some]
    for name in ("model.layers.3.w", f"{some[-1]}.0", some[-1].replace(".5.", ".05."), "a.*.b", ""):
        assert (name in found.tensors) == (name in plain.tensors)
    for kind, other in zip(stock(found.tensors), stock(plain.tensors), strict=True):
        for said in ("pattern", "names", "numbers", "range", "shapes", "dtypes", "nbytes", "is_uniform"):
            assert getattr(kind, said) == getattr(other, said), said
        assert list(kind.tensors) == list(other.tensors)


@pytest.mark.parametrize("change", ["nothing", "copies, and no index", "tensors overlap", "a shard is not there"])
def test_the_account_and_plans_of_reading_are_the_same(
    change: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CHANGES[change](home)
    found, plain = both(home, monkeypatch)
    spec, matcher = FAMILIES.describe(plain.config)
    ledgers = [account(one, spec, matcher) for one in (found, plain)]
    monkeypatch.setattr("firstlight.engine.weights.ledger.MANY", 0)
    monkeypatch.setattr("firstlight.engine.weights.accounts.wholesale.FEWEST", 2)
    lazy = account(found, spec, matcher)
    assert ledgers[0] == ledgers[1] == msgspec.structs.replace(lazy, fills=ledgers[0].fills)
    if lazy.missing:
        return
    for mesh in (Mesh(), Mesh(tp=2, ep=3), Mesh(pp=2, ep=4)):
        for rank in (0, mesh.world_size - 1):
            assert rank_pieces(spec, mesh, rank, "BF16", lazy) == rank_pieces(spec, mesh, rank, "BF16", ledgers[1])


NAMES = st.lists(
    st.sampled_from(
        [
            "a",
            "w1",
            "layers",
            "0",
            "7",
            "12",
            "007",
            "345",
            "",
            "x-3",
            "e\u00e9",
            "*",
            "%d",
            "5]}",
            "[7",
            '"',
            "\\",
            "},",
        ]
    ),
    min_size=1,
    max_size=5,
).map(".".join)


@settings(max_examples=60, database=None)
@given(
    st.lists(st.tuples(NAMES, st.sampled_from([[], [2], [3, 5], [0]])), min_size=1, max_size=9),
    st.booleans(),
    st.booleans(),
)
def test_a_header_is_what_it_is_entry_by_entry(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[str, list[int]]], compact: bool, is_ascii: bool
) -> None:
    header = entries(dict(shapes))
    end = max(entry["data_offsets"][1] for entry in header.values())
    path = tmp_path_factory.getbasetemp() / "a.safetensors"
    text = json.dumps(header, separators=(",", ":") if compact else None, ensure_ascii=is_ascii).encode()
    path.write_bytes(raw(text, end))
    found, plain = read_shard(path, Vocabulary()), read_header(path)
    assert not plain.findings
    tensors = found.tensors if hasattr(found, "tensors") else infos_of(found)
    assert tensors == plain.tensors
    is_odd = any(name.endswith("},") for name in header)
    assert is_odd or not hasattr(found, "tensors")


@pytest.mark.parametrize("words", ["\uf02a*", ".".join("0123456789" * 5)])
def test_names_that_columns_do_not_hold_are_read_one_by_one(home: Path, words: str) -> None:
    """A sign that stands for another, and very many numbers."""
    everywhere(home, lambda name: f"{words}.{name}")
    for number in range(1, SHARDS + 1):
        assert read_shard(shard(home, number), Vocabulary()) == read_header(shard(home, number))


def test_numbers_of_lines_are_those_of_the_text() -> None:
    """Texts of several steps, numbers of every length."""
    rng = np.random.default_rng(0)
    drawn = [int(rng.integers(10 ** int(digits), 10 ** int(digits + 1))) for digits in rng.integers(0, 16, 3 * 6000)]
    names = [f"model.{a}.w1.{b}.x2y.{c}" for a, b, c in zip(*[iter(drawn)] * 3, strict=True)]
    text = '","'.join(f'{name}":"file-{place % 3}' for place, name in enumerate(names)) + '"'
    assert len(text) > STEP_BYTES / 2
    found = read_lines(text.encode(), *LINES, Vocabulary())
    assert found is not None
    assert found.numbers.ravel().tolist() == drawn
    assert (*found.heads, *found.tails) == ("model.*.w1.*.x2y.*", "file-0", "file-1", "file-2")
    assert found.tail.tolist() == [place % 3 for place in range(len(names))]
    assert patterns(names[:1]) == list(found.heads)


@pytest.mark.parametrize(
    "odd", [b'\xe9":"f"', b'a\n":"f"', b'a"', b'a","b":"c":"d":"e"', b'a":"b":"c"', b'\\ud800":"f"', b'\\x":"f"']
)
def test_what_is_no_list_of_names_is_not_read_as_one(odd: bytes) -> None:
    assert read_lines(odd, *LINES, Vocabulary()) is None


@pytest.mark.parametrize(
    ("name", "pattern", "numbers"),
    [
        ("a.0.1", "a.*.*", (0, 1)),
        ("a.007.b", "a.00*.b", (7,)),
        ("a.00", "a.0*", (0,)),
        ("a.12345678901234567.b", "a.1*.b", (2345678901234567,)),
        ("a.10000000000000000.é", "a.1000000000000000*.é", (0,)),
        ("7.a7.7a", "7.a7.7a", ()),
        ("a.٣.b", "a.٣.b", ()),
    ],
)
def test_patterns_and_numbers_give_names_again(name: str, pattern: str, numbers: tuple[int, ...]) -> None:
    assert parted(name) == (pattern, numbers)
    assert patterns([name, name]) == [pattern, pattern]
    for written in (name, json.dumps(name)[1:-1]):
        found = read_lines(f'{written}":"f"'.encode(), *LINES, Vocabulary())
        assert found is not None
        assert (list(found.heads), found.numbers.ravel().tolist()) == ([pattern], list(numbers))


def test_an_index_of_many_is_columns(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = indexes.read_index(home)
    monkeypatch.setattr(indexes, "LARGE_BYTES", 0)
    found = indexes.read_index(home)
    assert plain is not None
    assert found is not None
    assert isinstance(found.weight_map, WeightMap)
    assert dict(found.weight_map) == plain.weight_map
    assert (found.stated_bytes, found.findings) == (plain.stated_bytes, plain.findings)
    twice = (home / INDEX).read_text().replace('"weight_map":{', '"weight_map":{"model.3.a":"x",', 1)
    (home / INDEX).write_text(twice.replace('"weight_map":{', '"weight_map":{"model.3.a":"y",', 1))
    again = indexes.read_index(home)
    assert again is not None
    assert [finding.code for finding in again.findings] == ["stale-index"]


@pytest.mark.parametrize("counted", [True, False])
def test_an_index_that_names_a_file_for_each_tensor_is_one_finding(tmp_path: Path, counted: bool) -> None:
    """Files that nobody has cost no finding each, whether or not their names count how many there are."""
    names = [
        f"model-{n}-of-1500.safetensors" if counted else f"part-{n}-of-{n + 2000}.safetensors" for n in range(1500)
    ]
    weight_map = {f"model.layers.{n}.w": name for n, name in enumerate(names)}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (tmp_path / "config.json").write_text("{}")
    found = [finding for finding in Checkpoint.open(tmp_path).findings if finding.code == "missing-shard"]
    assert [finding.file for finding in found] == [INDEX]
    assert "1,500 of 1,500 files that the index names" in found[0].message
