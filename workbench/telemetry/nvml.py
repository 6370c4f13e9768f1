"""NVIDIA GPUs, through NVML (pynvml).

What a part does not support is said so, never shown as 0: unified memory has no device memory to report, a GPU cut into
MIG instances does not count its utilisation. A lost GPU is an alarm, and the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pynvml

from firstlight.workbench.readings import Reading
from firstlight.workbench.telemetry.source import FIRST, Maker, Rates

SELDOM_S = 1.0
OFTEN_S = 0.5  # who asks more often than this is spared what takes long, for all GPUs but one at a time
LOST = "GPU lost: it has fallen off the bus or was reset; its work is gone"
UNIFIED = "NotSupported (UMA: system memory shown)"
IN_MIG = "not counted for a GPU cut into MIG instances"
NVLINK_FIELDS = (
    ("nvlink_sent", "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX"),
    ("nvlink_received", "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX"),
)


class _Metric(NamedTuple):
    """A figure of a GPU: how to read it, in the unit shown. `seldom`: it hardly changes, or takes long to read."""

    name: str
    unit: str
    read: Callable[[Any], float]
    seldom: bool = False


_METRICS = (
    _Metric("utilisation", "%", lambda gpu: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu),
    _Metric("memory_utilisation", "%", lambda gpu: pynvml.nvmlDeviceGetUtilizationRates(gpu).memory),
    _Metric("temperature", "°C", lambda gpu: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)),
    _Metric("power", "W", lambda gpu: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3),
    _Metric("power_limit", "W", lambda gpu: pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3, seldom=True),
    _Metric("sm_clock", "MHz", lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)),
    _Metric("memory_clock", "MHz", lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_MEM)),
    _Metric("pcie_sent", "B/s", lambda gpu: _pcie(gpu, pynvml.NVML_PCIE_UTIL_TX_BYTES), seldom=True),
    _Metric("pcie_received", "B/s", lambda gpu: _pcie(gpu, pynvml.NVML_PCIE_UTIL_RX_BYTES), seldom=True),
    _Metric("throttle_reasons", "bits", lambda gpu: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)),
    _Metric("ecc_uncorrected", "errors", lambda gpu: _ecc(gpu), seldom=True),
    _Metric("fan", "%", lambda gpu: pynvml.nvmlDeviceGetFanSpeed(gpu), seldom=True),
)
_IN_MIG = frozenset(("utilisation", "memory_utilisation"))


def _pcie(gpu: Any, counter: int) -> float:
    return float(pynvml.nvmlDeviceGetPcieThroughput(gpu, counter)) * 1024  # NVML counts KiB


def _ecc(gpu: Any) -> float:
    kind, span = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    return float(pynvml.nvmlDeviceGetTotalEccErrors(gpu, kind, span))


class NvmlSource:
    """One device per GPU (`gpu 0`) and per MIG instance (`gpu 0 mig 1`)."""

    name = "nvml"
    every_s = 0.1

    def __init__(self) -> None:
        self._rates = Rates()
        self._asked_s = float("-inf")
        self._whole_s: dict[int, float] = {}  # when a GPU was asked for everything
        self._absent = ""
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self._absent = _why(error)

    def read(self, time_s: float, step: int | None) -> Iterator[Reading]:
        make = Maker(self.name, time_s, step)
        if self._absent:
            yield make.none("nvml", "gpus", "devices", self._absent)
            return
        try:
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            yield make.none("nvml", "gpus", "devices", _why(error), alarm=_is_lost(error))
            return
        if not count:
            yield make.none("nvml", "gpus", "devices", "the driver sees no GPU")
        whole = self._whole(count, time_s)
        for index in range(count):
            yield from self._gpu(make, index, time_s, index in whole)

    def _whole(self, count: int, time_s: float) -> frozenset[int]:
        """The GPUs to be asked for everything now: traffic on PCIe alone takes NVML 40 ms a GPU to measure."""
        is_often, self._asked_s = time_s - self._asked_s < OFTEN_S, time_s
        never = float("-inf")
        due = [i for i in range(count) if time_s - self._whole_s.get(i, never) >= 0.99 * SELDOM_S]
        if is_often and due:
            due = [min(due, key=lambda i: self._whole_s.get(i, never))]
        self._whole_s.update(dict.fromkeys(due, time_s))
        return frozenset(due)

    def _gpu(self, make: Maker, index: int, time_s: float, whole: bool) -> Iterator[Reading]:
        device = f"gpu {index}"
        try:
            gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        except pynvml.NVMLError as error:
            yield make.none(device, "present", "", _why(error), alarm=True)
            return
        in_mig = self._is_in_mig(gpu)
        for metric in _METRICS:
            if metric.seldom and not whole:
                continue
            if in_mig and metric.name in _IN_MIG:
                yield make.none(device, metric.name, metric.unit, IN_MIG)
                continue
            try:
                yield make.value(device, metric.name, metric.unit, float(metric.read(gpu)))
            except pynvml.NVMLError as error:
                yield make.none(device, metric.name, metric.unit, _why(error), alarm=_is_lost(error))
                if _is_lost(error):  # every other call would say the same
                    return
        yield from self._memory(make, device, gpu)
        yield from self._links(make, device, gpu, time_s)
        if in_mig:
            yield from self._instances(make, device, gpu)

    def _memory(self, make: Maker, device: str, gpu: Any) -> Iterator[Reading]:
        try:
            memory = pynvml.nvmlDeviceGetMemoryInfo(gpu)
        except pynvml.NVMLError_NotSupported:
            yield make.none(device, "memory_used", "B", UNIFIED)
            yield make.none(device, "memory_total", "B", UNIFIED)
            return
        except pynvml.NVMLError as error:
            yield make.none(device, "memory_used", "B", _why(error), alarm=_is_lost(error))
            return
        yield make.value(device, "memory_used", "B", memory.used)
        yield make.value(device, "memory_total", "B", memory.total)

    def _links(self, make: Maker, device: str, gpu: Any, time_s: float) -> Iterator[Reading]:
        """NVLink traffic of all links together: counters in KiB, so a rate needs two samples."""
        for metric, field in NVLINK_FIELDS:
            try:
                answer = pynvml.nvmlDeviceGetFieldValues(gpu, [(getattr(pynvml, field), 0xFFFFFFFF)])[0]
                if answer.nvmlReturn != pynvml.NVML_SUCCESS:
                    raise pynvml.NVMLError(answer.nvmlReturn)
            except pynvml.NVMLError as error:
                yield make.none(device, metric, "B/s", _why(error), alarm=_is_lost(error))
                continue
            rate = self._rates.rate(device, metric, time_s, float(answer.value.ullVal) * 1024)
            reason = make.none(device, metric, "B/s", FIRST)
            yield reason if rate is None else make.value(device, metric, "B/s", rate)

    @staticmethod
    def _is_in_mig(gpu: Any) -> bool:
        try:
            current, _ = pynvml.nvmlDeviceGetMigMode(gpu)
        except pynvml.NVMLError:  # parts without MIG say NotSupported
            return False
        return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)

    def _instances(self, make: Maker, device: str, gpu: Any) -> Iterator[Reading]:
        try:
            count = pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)
        except pynvml.NVMLError as error:
            yield make.none(device, "mig_instances", "instances", _why(error))
            return
        for index in range(count):
            try:
                instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
            except pynvml.NVMLError:  # a slot without an instance
                continue
            name = f"{device} mig {index}"
            yield make.none(name, "utilisation", "%", IN_MIG)
            yield from self._memory(make, name, instance)

    def close(self) -> None:
        """Lets go of the driver."""
        if not self._absent:
            self._absent = "closed"
            pynvml.nvmlShutdown()


def _is_lost(error: Exception) -> bool:
    return isinstance(error, pynvml.NVMLError_GpuIsLost)


def _why(error: pynvml.NVMLError) -> str:
    """`NotSupported`, `LibraryNotFound: NVML Shared Library Not Found` and the like."""
    if _is_lost(error):
        return LOST
    kind = type(error).__name__.removeprefix("NVMLError_")
    return kind if kind == "NotSupported" else f"{kind}: {error}"
