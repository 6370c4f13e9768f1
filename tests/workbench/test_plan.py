"""Plan: known figures of released models, the verdict and its exit status, and wishes that are impossible."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.parallel.hardware import hosts_of, parse_cluster
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.workbench.here import this_cluster
from firstlight.workbench.plan import plan, read_config

Get = Callable[[str], Path]
METRICS = {
    "parameters": "parameters",
    "active_parameters": "parameters",
    "mtp_parameters": "parameters",
    "checkpoint_bytes": "B",
    "weight_bytes_per_device": "B",
    "kv_bytes_per_token": "B",
    "state_bytes_per_sequence": "B",
    "devices_needed": "devices",
    "binding_constraint": "",
}


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes"),
    [
        ("llama-3.1-405b", 405_853_388_800, 126 * 2 * 8 * 128 * 2),
        ("deepseek-v3", 671_026_419_200, 61 * (512 + 64) * 2),
        ("mixtral-8x22b", 140_620_634_112, 56 * 2 * 8 * 128 * 2),
    ],
)
def test_figures_of_released_models(name: str, parameters: int, kv_bytes: int) -> None:
    report = plan(name, parse_cluster("8xH200"))
    assert report.value("parameters") == parameters
    assert report.value("kv_bytes_per_token") == kv_bytes
    for metric, unit in METRICS.items():
        assert report.metrics[metric].unit == unit
    assert report.metrics["binding_constraint"].detail


def test_ranks_add_up_to_the_checkpoint(checkpoint: Get) -> None:
    home = checkpoint("llama")
    report = plan(home, this_cluster(4, "cpu"), Mesh(tp=2, pp=2), context=64, concurrency=3)
    assert report.status == "passed"
    rows = report.tables["ranks"]
    assert len(rows) == 4
    held = sum(t.nbytes for t in Checkpoint.open(home).tensors.values())
    assert report.value("checkpoint_bytes") == held
    assert sum(row["weight_bytes"] for row in rows) >= held, "replicated norms are held more than once"
    assert sum(row["cache_bytes"] for row in rows) == report.value("kv_bytes_per_token") * 64 * 3
    for row in rows:
        assert row["total_bytes"] == row["weight_bytes"] + row["cache_bytes"] + row["state_bytes"]
    assert report.value("weight_bytes_per_device") == max(row["weight_bytes"] for row in rows)
    assert {row["phase"] for row in report.tables["step_time_ms"]} == {"prefill", "decode"}
    assert {row["axis"] for row in report.tables["communication_bytes_per_token"]} == {"tp", "pp"}


def test_what_does_not_fit_fails_and_names_the_nearest() -> None:
    report = plan("llama-3.1-405b", parse_cluster("2xH200"))
    assert report.exit_status == 1
    assert report.value("nearest_plan")
    (finding,) = [f for f in report.findings if f.severity == "fatal"]
    assert finding.code == "does-not-fit"
    assert "nearest that fits" in str(finding.next)
    needed = report.value("devices_needed")
    assert plan("llama-3.1-405b", parse_cluster(f"{needed}xH200")).status == "passed"
    assert plan("llama-3.1-405b", parse_cluster(f"{int(str(needed)) - 1}xH200")).status == "failed"


def test_an_impossible_wish_is_refused_with_what_is_possible() -> None:
    with pytest.raises(Refused) as caught:
        plan("llama-3.1-405b", parse_cluster("8xH200"), Mesh(tp=3))
    finding = caught.value.findings[0]
    assert finding.code == "indivisible"
    assert "1, 2, 4, 8" in str(finding.expected)
    assert "--pp" in str(finding.next)
    with pytest.raises(Refused, match="has 16 ranks"):
        plan("llama-3.1-405b", parse_cluster("8xH200"), Mesh(tp=16))


def test_devices_are_found_by_the_start_of_their_name() -> None:
    assert parse_cluster("2x8xh200").device.name == "H200-SXM"
    assert parse_cluster("2x8xh200").count == 16
    with pytest.raises(Refused, match="several devices"):
        parse_cluster("8xH2")


def test_a_model_is_a_directory_a_file_or_a_name(checkpoint: Get, tmp_path: Path) -> None:
    home = checkpoint("llama")
    assert read_config(home)[1] == read_config(home / "config.json")[1]
    assert read_config("kimi-k2")[0] == read_config("data/models/kimi-k2.json")[0] == "kimi-k2"
    with pytest.raises(Refused, match="neither a checkpoint directory nor a configuration"):
        read_config("no-such-model")
    (tmp_path / "c.json").write_text("[")
    with pytest.raises(Refused, match="not JSON"):
        read_config(tmp_path / "c.json")
    with pytest.raises(Refused, match=r"has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "c.json").write_text('{"hidden_size": 8, "hidden_size": 9}')
    with pytest.raises(Refused, match="hidden_size twice with different values"):
        read_config(tmp_path / "c.json")
    os.truncate(tmp_path / "c.json", 1 << 40)
    with pytest.raises(Refused, match="1,099,511,627,776 bytes"):
        read_config(tmp_path / "c.json")


def test_the_context_is_no_longer_than_the_model_allows(checkpoint: Get) -> None:
    report = plan(checkpoint("llama"), this_cluster(1, "cpu"))
    assert "64 tokens of context" in report.checks[0].detail
    longer = plan(checkpoint("llama"), this_cluster(1, "cpu"), context=65)
    assert [f.code for f in longer.findings if f not in report.findings] == ["context-too-long"]  # and said once


def test_layouts_are_weighed_in_a_table_with_the_reasons() -> None:
    for objective, column, best in (("latency", "ms_per_token", min), ("throughput", "tokens_per_s", max)):
        report = plan("deepseek-v3", parse_cluster("2x8xH200"), objective=objective)  # type: ignore[arg-type]
        rows = report.tables["layouts"]
        assert len(rows) > 3
        assert rows[0][column] == best(row[column] for row in rows)
        assert rows[0]["mesh"] == report.value("mesh")
        assert rows[0][column] == report.value(column)
        assert all(row["why"] for row in rows)
        assert {row["bound_by"] for row in report.tables["step_time_ms"]} <= {"memory", "compute", "communication"}
    fewest = plan("deepseek-v3", parse_cluster("2x8xH200"), objective="devices").tables["layouts"]
    assert fewest[0]["devices"] == min(row["devices"] for row in fewest)


def test_what_does_not_fit_for_a_crowd_names_a_layout_for_the_crowd() -> None:
    report = plan("llama-3.1-405b", parse_cluster("8xH200"), concurrency=3000)
    assert report.exit_status == 1
    (finding,) = [f for f in report.findings if f.severity == "fatal"]
    devices = int(str(finding.next).partition(" on ")[2].partition(" x ")[0].replace(",", ""))
    assert plan("llama-3.1-405b", parse_cluster(f"{devices}xH200"), concurrency=3000).status == "passed"
    room = int(str(finding.next).rpartition(" ")[2])
    assert plan("llama-3.1-405b", parse_cluster("8xH200"), Mesh(tp=8), concurrency=room).status == "passed"
    assert plan("llama-3.1-405b", parse_cluster("8xH200"), Mesh(tp=8), concurrency=room + 1).status == "failed"


def test_a_cluster_file_may_name_hosts_and_write_figures_as_text(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    device = "{name: X, memory_bytes: 80000000000, memory_bandwidth_Bps: 4e12}"
    file.write_text(f"hosts: [a, b]\nper_node: 8\ndevice: {device}")
    found = parse_cluster(str(file))
    assert (found.nodes, found.device.memory_bandwidth_Bps) == (2, 4e12)
    assert hosts_of(str(file)) == ("a", "b")
    file.write_text("hosts: [a, b]\nnodes: 3\nper_node: 8\ndevice: H200")
    with pytest.raises(Refused, match="nodes is 3, and it names 2 hosts"):
        parse_cluster(str(file))
    file.write_text("per_node: 8\ndevice: H200")
    with pytest.raises(Refused, match="names no hosts"):
        hosts_of(str(file))
