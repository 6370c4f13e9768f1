"""The machine itself, through psutil: processors, memory, disks, network."""

from __future__ import annotations

import time
from collections.abc import Iterator

import psutil

from firstlight.workbench.readings import Reading
from firstlight.workbench.telemetry.source import FIRST, Maker, Rates

SHORTEST_S = 0.05
BUSY_S = 0.2  # the system counts a processor's time in hundredths of a second
SWAP_S = 5.0  # what takes as long to ask for as all the rest, and moves slowly
TRAFFIC_S = SLOW_S = 1.0  # counters of disks and networks, load and memory of a whole machine


class SystemSource:
    """Device `host`, and one device per network interface and disk that moved anything since the machine started.

    Each is read as often as it says something new, which is less often than some ask: reading costs the engine's time.
    """

    name = "psutil"
    every_s = 0.1

    def __init__(self) -> None:
        self._rates = Rates()
        self._since_s: float | None = None  # psutil compares with the last call of the same thread, and says 0 without
        self._read_s: dict[str, float] = {}

    def _is_due(self, part: str, time_s: float, every_s: float) -> bool:
        if time_s - self._read_s.get(part, float("-inf")) < 0.99 * every_s:
            return False
        self._read_s[part] = time_s
        return True

    def read(self, time_s: float, step: int | None) -> Iterator[Reading]:
        make = Maker(self.name, time_s, step)
        if self._is_due("busy", time_s, BUSY_S):
            yield from self._busy(make)
        if self._is_due("memory", time_s, SLOW_S):
            yield from self._memory(make)
        if self._is_due("traffic", time_s, TRAFFIC_S):
            yield from self._disks(make, time_s)
            yield from self._networks(make, time_s)

    def _busy(self, make: Maker) -> Iterator[Reading]:
        if self._since_s is None or time.monotonic() - self._since_s < SHORTEST_S:  # too short to be busy or idle in
            if self._since_s is None:
                self._since_s = time.monotonic()
                psutil.cpu_percent()
            yield make.none("host", "cpu_utilisation", "%", FIRST)
        else:
            yield make.value("host", "cpu_utilisation", "%", psutil.cpu_percent())

    def _memory(self, make: Maker) -> Iterator[Reading]:
        yield make.value("host", "load_1min", "processes", psutil.getloadavg()[0])
        memory = psutil.virtual_memory()
        yield make.value("host", "memory_used", "B", memory.total - memory.available)
        yield make.value("host", "memory_total", "B", memory.total)
        if not self._is_due("swap", make.time_s, SWAP_S):
            return
        swap = psutil.swap_memory()
        if swap.total:
            yield make.value("host", "swap_used", "B", swap.used)
        else:
            yield make.none("host", "swap_used", "B", "this machine has no swap")

    def _disks(self, make: Maker, time_s: float) -> Iterator[Reading]:
        counters = psutil.disk_io_counters(perdisk=True, nowrap=True)
        if not counters:
            yield make.none("host", "disk_read", "B/s", "the system counts no disks here (a container, often)")
            return
        for disk, one in counters.items():
            if one.read_bytes or one.write_bytes:
                yield self._rate(make, f"disk {disk}", "disk_read", time_s, one.read_bytes)
                yield self._rate(make, f"disk {disk}", "disk_written", time_s, one.write_bytes)

    def _networks(self, make: Maker, time_s: float) -> Iterator[Reading]:
        for interface, one in psutil.net_io_counters(pernic=True, nowrap=True).items():
            if one.bytes_recv or one.bytes_sent:
                yield self._rate(make, f"net {interface}", "received", time_s, one.bytes_recv)
                yield self._rate(make, f"net {interface}", "sent", time_s, one.bytes_sent)

    def _rate(self, make: Maker, device: str, metric: str, time_s: float, count: float) -> Reading:
        rate = self._rates.rate(device, metric, time_s, count)
        return make.none(device, metric, "B/s", FIRST) if rate is None else make.value(device, metric, "B/s", rate)
