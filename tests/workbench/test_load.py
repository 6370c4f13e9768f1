"""Load: what was planned is what is resident, on every rank of every mesh; a gap is refused before the first byte."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.sources.local import Method
from firstlight.engine.weights.sources.mirror import mirror
from firstlight.workbench.events import ProgressEvent
from firstlight.workbench.load import load
from firstlight.workbench.progress import Progress
from tests.engine.weights import far

Get = Callable[[str], Path]


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("llama", Mesh()),
        ("llama", Mesh(tp=4)),
        ("llama-tied", Mesh(tp=2, pp=2)),
        ("llava-clip", Mesh(pp=3)),
        ("qwen3_moe", Mesh(ep=2, tp=2)),
        ("deepseek_v3", Mesh(ep=2, dp=2)),
        ("llama-thirds", Mesh(tp=4, attention="whole")),
        ("bamba", Mesh(tp=3, pp=2, attention="whole")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.describe().replace(" ", ""),
)
def test_resident_is_what_was_planned(name: str, mesh: Mesh, checkpoint: Get) -> None:
    report = load(checkpoint(name), mesh)
    assert report.status == "passed", report
    rows = report.tables["ranks"]
    assert [row["rank"] for row in rows] == list(range(mesh.world_size))
    roles = ("vision", "projector", "embedding", "norm", "attention", "mlp", "expert", "router", "head")
    for row in rows:
        assert sum(row.get(f"{role}_bytes", 0) for role in roles) == row["planned_bytes"] == row["resident_bytes"]
        assert row["reserved_bytes"] >= row["resident_bytes"]


def test_one_rank_reads_every_byte_once(checkpoint: Get) -> None:
    home = checkpoint("llama")
    report = load(home)
    payload = sum(t.nbytes for t in Checkpoint.open(home).tensors.values())
    assert report.value("read_bytes") == payload == report.value("largest_rank_bytes")
    assert load(home, dtype="BF16").value("largest_rank_bytes") == payload // 2


def test_progress_ends_at_the_total(checkpoint: Get) -> None:
    seen: list[ProgressEvent] = []
    load(checkpoint("llama"), Mesh(tp=2), progress=Progress("load", (seen.append,)))
    for rank in range(2):
        last = [event for event in seen if f"rank {rank} of 2" in event.phase][-1]
        assert last.done == last.total
        assert last.unit == "B"


def test_what_cannot_be_whole_is_refused(checkpoint: Get, tmp_path: Path) -> None:
    import shutil

    home = Path(shutil.copytree(checkpoint("llama"), tmp_path / "broken"))
    sorted(home.glob("*.safetensors"))[-1].unlink()
    with pytest.raises(Refused, match="missing-shard"):
        load(home)
    with pytest.raises(Refused, match="3 is not possible"):
        load(checkpoint("llama"), Mesh(tp=3))


def test_hashes_are_those_of_the_stored_tensors(checkpoint: Get) -> None:
    """What lies in memory is what lies in the file, byte for byte, where a tensor is read whole and as it is."""
    home = checkpoint("llama")
    stored = Checkpoint.open(home)
    rows = load(home, hashes=True).tables["hashes"]
    assert len(rows) == len(stored.tensors)
    for row in rows:
        assert row["sha256"] == hashlib.sha256(stored.read_bytes(row["tensor"])).hexdigest()
    halves = load(home, Mesh(tp=2), hashes=True).tables["hashes"]
    assert {row["rank"] for row in halves} == {0, 1}
    down = [row for row in halves if row["parameter"] == "layers.0.ffn.down.weight"]
    assert down[0]["sha256"] != down[1]["sha256"]


@pytest.mark.parametrize("reader", ["auto", "buffered", "direct"])
def test_every_way_of_reading_gives_the_same_weights(reader: Method, checkpoint: Get) -> None:
    report = load(checkpoint("llama"), Mesh(tp=2), reader=reader, hashes=True)
    assert report.tables["hashes"] == load(checkpoint("llama"), Mesh(tp=2), hashes=True, limit=False).tables["hashes"]
    assert report.value("share_of_limit") is not None
    assert {row["role"]: row["planned_bytes"] for row in report.tables["memory"]} == {
        row["role"]: row["resident_bytes"] for row in report.tables["memory"]
    }


def test_layers_say_when_they_were_there_and_no_rate_is_of_bytes_read_before(checkpoint: Get) -> None:
    """Layers are read ahead: the time between two of them says nothing, that from the start on does."""
    report = load(checkpoint("llama"), Mesh(tp=2))
    for rank in (0, 1):
        rows = [row for row in report.tables["by_layer"] if row["rank"] == rank]
        assert [row["done_s"] for row in rows] == sorted(row["done_s"] for row in rows)
        assert rows[-1]["done_bytes"] == sum(row["read_bytes"] for row in rows)
        for row in rows:
            assert row["rate_bytes_per_s"] == pytest.approx(row["done_bytes"] / row["done_s"])


def test_a_checkpoint_behind_a_url_is_loaded_from_there(checkpoint: Get, tmp_path: Path) -> None:
    home = checkpoint("llama")
    with far.served(home) as web:
        directory = mirror(web.url, cache=tmp_path)
        report = load(directory, Mesh(pp=2), hashes=True)
    assert report.tables["hashes"] == load(home, Mesh(pp=2), hashes=True).tables["hashes"]
    assert "range requests" in report.metrics["source"].detail
    assert report.metrics["source"].value == web.url
