"""Device and cluster descriptions: parses `--cluster 2x8xH200` against data/hardware.json. No torch."""

from __future__ import annotations

import difflib
import re
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.room import memory_bytes

CPU = "CPU"  # the device's name where a machine's own memory is meant

_Rate = Annotated[float, msgspec.Meta(gt=0)]


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accelerator; bandwidths in bytes/s, None where no source confirms a figure."""

    name: str
    memory_bytes: Annotated[int, msgspec.Meta(ge=1)]
    memory_bandwidth_Bps: _Rate | None = None
    bf16_flops: _Rate | None = None
    link_Bps: _Rate | None = None
    nic_Bps: _Rate | None = None
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
    """The device with this name or unambiguous prefix (`H200` is `H200-SXM`), in any case."""
    known = devices()
    wanted = name.strip().lower()
    exact = [key for key in known if key.lower() == wanted] or [
        key for key in known if key.lower().startswith(f"{wanted}-")
    ]
    found = exact or [key for key in known if wanted and key.lower().startswith(wanted)]
    if len(found) == 1:
        return known[found[0]]
    names = {key.lower(): key for key in known} | {key.lower().split("-")[0]: key for key in known}
    near = dict.fromkeys(names[key] for key in difflib.get_close_matches(wanted, names, n=4, cutoff=0.5))
    raise Refused(
        fatal(
            "unknown-device",
            f"{name!r} names {'several devices' if found else 'no device'} of data/hardware.json",
            expected=", ".join(found or known),
            found=name,
            next=(f"nearest names: {', '.join(near)}; " if near and not found else "")
            + "use one of these names, or describe the cluster in a YAML file",
        )
    )


_CLUSTER = re.compile(r"(?:(\d{1,6})\s*[x×]\s*)?(\d{1,6})\s*[x×]\s*([A-Z].*)", re.IGNORECASE)
MOST_DEVICES = 1 << 16


def parse_cluster(text: str) -> Cluster:
    """`[NODESx]COUNTxDEVICE`, COUNT devices a node, or the path of a YAML file with nodes, per_node and device."""
    if text.endswith((".yaml", ".yml")):
        return _cluster_file(Path(text))
    match = _CLUSTER.fullmatch(text.strip())
    if match is None or not 1 <= int(match[2]) * int(match[1] or 1) <= MOST_DEVICES:
        raise Refused(
            fatal(
                "usage",
                f"--cluster {text!r} is not understood",
                expected=f"[NODESx]COUNTxDEVICE, e.g. 8xH200 or 2x8xB200, of 1 to {MOST_DEVICES:,} devices, "
                "or a YAML file",
                found=text,
                next="name devices as data/hardware.json does",
            )
        )
    return Cluster(nodes=int(match[1] or 1), per_node=int(match[2]), device=find_device(match[3]))


_Count = Annotated[int, msgspec.Meta(ge=1, le=MOST_DEVICES)]


class _ClusterFile(msgspec.Struct, forbid_unknown_fields=True):
    """nodes: 2, per_node: 8, device: H200 - or device: {name, memory_bytes, memory_bandwidth_Bps, ...}.

    `hosts` names the nodes to start ranks on.
    """

    per_node: _Count
    device: str | Device
    nodes: _Count | None = None
    hosts: tuple[str, ...] = ()


def hosts_of(path: str) -> tuple[str, ...]:
    """The hosts that a cluster file names; refused if it names none."""
    found = _read_cluster(Path(path)).hosts
    if not found:
        raise Refused(
            fatal(
                "usage",
                f"the cluster file {path} names no hosts",
                file=path,
                expected="hosts: [a, b]",
                found="no hosts",
                next="name the nodes in it, or give --hosts a,b",
            )
        )
    return found


def _cluster_file(path: Path) -> Cluster:
    read = _read_cluster(path)
    device = find_device(read.device) if isinstance(read.device, str) else read.device
    nodes = len(read.hosts) or 1 if read.nodes is None else read.nodes
    if read.hosts and nodes != len(read.hosts):
        raise _bad_cluster(path, f"nodes is {nodes}, and it names {len(read.hosts)} hosts")
    return Cluster(nodes=nodes, per_node=read.per_node, device=device)


def _read_cluster(path: Path) -> _ClusterFile:
    import yaml

    try:
        return msgspec.convert(yaml.safe_load(path.read_text()), _ClusterFile, strict=False)  # YAML has 4e12 as text
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise _bad_cluster(path, str(reason)) from error


def _bad_cluster(path: Path, reason: str) -> Refused:
    return Refused(
        fatal(
            "usage",
            f"the cluster file {path} cannot be used: {reason}",
            file=str(path),
            expected="nodes, per_node, device (a name, or name and memory_bytes and more)",
            found=reason,
            next="write it like this: {nodes: 2, per_node: 8, device: H200}",
        )
    )


def local_cluster(ranks: int) -> Cluster:
    """This machine as a cluster: the memory available to us, divided among `ranks` CPU processes."""
    return Cluster(
        nodes=1,
        per_node=ranks,
        device=Device(name=CPU, memory_bytes=memory_bytes() // ranks, per_node=ranks),
    )
