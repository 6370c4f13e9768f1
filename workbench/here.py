"""This machine as a cluster: its accelerators where the driver answers, else its memory shared by ranks on CPUs."""

from __future__ import annotations

from typing import Any

from firstlight.engine.parallel.hardware import Cluster, Device, local_cluster


def this_cluster(ranks: int, device: str = "auto") -> Cluster:
    """The cluster of this machine; `device` cpu leaves accelerators out, anything else takes those there are."""
    found = [] if device == "cpu" else nvidia_devices()
    if not found:
        return local_cluster(ranks)
    smallest = min(found, key=lambda one: one.memory_bytes)
    return Cluster(nodes=1, per_node=len(found), device=smallest)


def nvidia_devices() -> list[Device]:
    """NVIDIA devices by the driver's word; none where there is no driver. Loads no torch."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_device(pynvml, pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _device(pynvml: Any, handle: Any) -> Device:
    name = pynvml.nvmlDeviceGetName(handle)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return Device(name=str(name), memory_bytes=int(memory.total))
