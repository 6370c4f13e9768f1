"""Devices and clusters as facts: what `--cluster 2x8xH200` means. No torch."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One accelerator; bandwidths in bytes/s, None where no source confirms a figure."""

    name: str
    memory_bytes: int
    memory_bandwidth_Bps: float | None = None
    bf16_flops: float | None = None
    link_Bps: float | None = None
    nic_Bps: float | None = None
    per_node: int = 8


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """`nodes` machines of `per_node` devices each."""

    nodes: int
    per_node: int
    device: Device

    @property
    def count(self) -> int:
        return self.nodes * self.per_node

    def describe(self) -> str:
        lead = f"{self.nodes}x" if self.nodes > 1 else ""
        return f"{lead}{self.per_node}x{self.device.name}"


@lru_cache(maxsize=1)
def devices() -> dict[str, Device]:
    """The accelerators of data/hardware.json by name."""
    facts: dict[str, Any] = msgspec.json.decode(
        resources.files("firstlight.data").joinpath("hardware.json").read_bytes()
    )
    return {name: _device(name, row) for name, row in facts["accelerators"].items()}


def _device(name: str, row: dict[str, Any]) -> Device:
    tflops = row.get("mamf_bf16_TFLOPs") or row.get("dense_bf16_TFLOPs")
    return Device(
        name=name,
        memory_bytes=int(row["memory_bytes"]),
        memory_bandwidth_Bps=row.get("memory_bandwidth_Bps"),
        bf16_flops=tflops * 1e12 if tflops else None,
        link_Bps=row.get("intra_node_link_Bps_per_direction"),
        nic_Bps=row.get("inter_node_nic_Bps_per_device_typical"),
        per_node=int(row.get("devices_per_node_typical") or 8),
    )


def find_device(name: str) -> Device:
    """The device of that name, or of the only name that starts so (`H200` is `H200-SXM`); case does not matter."""
    known = devices()
    wanted = name.lower()
    exact = [key for key in known if key.lower() == wanted]
    found = exact or [key for key in known if key.lower().startswith(wanted)]
    if len(found) == 1:
        return known[found[0]]
    raise Refused(
        fatal(
            "unknown-device",
            f"{name!r} names {'no device' if not found else 'several devices'} of data/hardware.json",
            expected=", ".join(found or known),
            found=name,
            next="use one of these names, or describe the cluster in a YAML file",
        )
    )


_CLUSTER = re.compile(r"(?:(\d+)x)?(\d+)x([A-Za-z].*)")


def parse_cluster(text: str) -> Cluster:
    """`[NODESx]COUNTxDEVICE`, COUNT devices a node, or the path of a YAML file with nodes, per_node and device."""
    if text.endswith((".yaml", ".yml")):
        return _cluster_file(Path(text))
    match = _CLUSTER.fullmatch(text)
    if match is None or int(match[2]) < 1 or int(match[1] or 1) < 1:
        raise Refused(
            fatal(
                "usage",
                f"--cluster {text!r} is not understood",
                expected="[NODESx]COUNTxDEVICE, e.g. 8xH200 or 2x8xB200, or a YAML file",
                found=text,
                next="name devices as data/hardware.json does",
            )
        )
    return Cluster(nodes=int(match[1] or 1), per_node=int(match[2]), device=find_device(match[3]))


def _cluster_file(path: Path) -> Cluster:
    """nodes: 2, per_node: 8, device: H200 - or device: {name, memory_bytes, memory_bandwidth_Bps, ...}."""
    import yaml

    try:
        raw = yaml.safe_load(path.read_text())
        device = raw["device"]
        found = find_device(device) if isinstance(device, str) else msgspec.convert(device, Device)
        return Cluster(nodes=int(raw.get("nodes", 1)), per_node=int(raw["per_node"]), device=found)
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError, msgspec.ValidationError) as error:
        raise Refused(
            fatal(
                "usage",
                f"the cluster file {path} cannot be used: {error}",
                file=str(path),
                expected="nodes, per_node, device (a name, or name and memory_bytes and more)",
                found=type(error).__name__,
                next="see `firstlight plan --help`",
            )
        ) from error


def local_cluster(ranks: int) -> Cluster:
    """This machine's memory shared by `ranks` processes on its CPUs."""
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Cluster(
        nodes=1,
        per_node=ranks,
        device=Device(name="CPU", memory_bytes=pages * page // ranks, per_node=ranks),
    )
