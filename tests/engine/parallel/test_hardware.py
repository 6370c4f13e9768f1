"""`--cluster`: what is understood, and what is said when it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding
from firstlight.engine.parallel.hardware import devices, find_device, local_cluster, parse_cluster


def refused(text: str) -> Finding:
    with pytest.raises(Refused) as caught:
        parse_cluster(text)
    (finding,) = caught.value.findings
    assert finding.expected
    assert finding.found is not None
    assert finding.next
    return finding


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "device"),
    [
        ("8xH200", 1, 8, "H200-SXM"),
        ("2x8xH200", 2, 8, "H200-SXM"),
        ("1xH20", 1, 1, "H20-96G"),
        ("4xh100", 1, 4, "H100-SXM-80G"),
        ("8xMI355X", 1, 8, "MI355X"),
        ("2x8xRTX-4090", 2, 8, "RTX-4090"),
        ("64xGaudi3", 1, 64, "Gaudi3"),
        ("16xH100-SXM-80G", 1, 16, "H100-SXM-80G"),
        (" 8 x B200 ", 1, 8, "B200-SXM-180G"),
        ("2×8×B200", 2, 8, "B200-SXM-180G"),
        ("8XGB200", 1, 8, "GB200-NVL72"),
    ],
)
def test_clusters(text: str, nodes: int, per_node: int, device: str) -> None:
    cluster = parse_cluster(text)
    assert (cluster.nodes, cluster.per_node, cluster.device.name) == (nodes, per_node, device)
    assert cluster.count == nodes * per_node
    assert parse_cluster(cluster.describe()) == cluster


@pytest.mark.parametrize(
    "text",
    ["", "H200", "8", "8x", "xH200", "0xH200", "0x8xH200", "-1xH200", "8.5xH200", "2x2x2xH200", "99999x99999xH200"],
)
def test_what_is_no_cluster(text: str) -> None:
    finding = refused(text)
    assert finding.code in ("usage", "unknown-device")
    assert finding.found in (text, text.split("x")[-1]) or finding.code == "unknown-device"


@pytest.mark.parametrize(
    ("text", "near"), [("8xH202", "H200-SXM"), ("8xMI300", None), ("8xA10O", "A100-SXM-80G"), ("8xMI350X", "MI355X")]
)
def test_an_unknown_device_gets_its_nearest_names(text: str, near: str | None) -> None:
    if near is None:
        assert parse_cluster(text).device.name == "MI300X"
        return
    finding = refused(text)
    assert finding.code == "unknown-device"
    assert "names no device" in finding.message
    assert near in str(finding.next)


def test_a_name_of_several_devices_lists_them() -> None:
    finding = refused("8xAscend")
    assert "several devices" in finding.message
    assert finding.expected == "Ascend-910B, Ascend-910C, Ascend-950DT, Ascend-950PR"


def test_every_device_is_found_by_its_own_name() -> None:
    assert len(devices()) >= 20
    for name, device in devices().items():
        assert find_device(name) is device
        assert device.memory_bytes > 1 << 30


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("{nodes: 2, per_node: 4, device: H200}", 8, "H200-SXM"),
        ("per_node: 3\ndevice: {name: mine, memory_bytes: 8000000000, bf16_flops: 1.0e+12}", 3, "mine"),
    ],
)
def test_a_cluster_file(text: str, count: int, name: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    cluster = parse_cluster(str(path))
    assert (cluster.count, cluster.device.name) == (count, name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Expected `object`, got `null`"),
        ("[1, 2]", "Expected `object`, got `array`"),
        ("{device: H200}", "missing required field `per_node`"),
        ("{per_node: 8}", "missing required field `device`"),
        ("{per_node: eight, device: H200}", "`$.per_node`"),
        ("{per_node: 0, device: H200}", ">= 1 - at `$.per_node`"),
        ("{nodes: -1, per_node: 8, device: H200}", "`$.nodes`"),
        ("{per_node: 8, device: H200, node: 2}", "unknown field `node`"),
        ("{per_node: 8, device: {name: x}}", "missing required field `memory_bytes`"),
        ("{per_node: 8, device: {name: x, memory_bytes: 80GB}}", "`$.device.memory_bytes`"),
        ("{per_node: 8, device: {name: x, memory_bytes: -1}}", ">= 1"),
        ("{per_node: 8, device: {name: x, memory_bytes: 1, memory_bandwith_Bps: 1}}", "memory_bandwith_Bps"),
        ("{per_node: 8, device: [", "expected the node content"),
        ("\x00", "special characters"),
    ],
)
def test_a_cluster_file_that_is_wrong_says_where(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    finding = refused(str(path))
    assert finding.code == "usage"
    assert finding.file == str(path)
    assert words in finding.message


def test_a_cluster_file_that_is_not_there_or_is_no_text(tmp_path: Path) -> None:
    assert "No such file" in refused(str(tmp_path / "absent.yaml")).message
    (tmp_path / "bytes.yml").write_bytes(b"\xff\xfe\x00")
    assert refused(str(tmp_path / "bytes.yml")).code == "usage"
    (tmp_path / "name.yaml").write_text("{per_node: 8, device: H202}")
    assert refused(str(tmp_path / "name.yaml")).code == "unknown-device"


@given(st.text(max_size=20))
def test_any_text_is_understood_or_refused(text: str) -> None:
    try:
        cluster = parse_cluster(text)
    except Refused:
        return
    assert cluster.count >= 1


def test_this_machine() -> None:
    cluster = local_cluster(2)
    assert cluster.count == 2
    assert cluster.device.memory_bytes > 1 << 28
