"""Whether layers run while those behind them are read, chosen by what reading leaves of the processors.

Where a source is waited for, computing meanwhile is free. Where reading is copying memory, every core is at it, and who
computes as well only holds it up: then all is read first, as it is where others keep the machine busy.
"""

from __future__ import annotations

import time

import psutil
import torch

ENOUGH_BYTES, ENOUGH_S = 64 << 20, 0.2  # read before it is judged, or tried for so long
WAITS = 0.35  # of the processors: less, and the source is waited for, whatever else the machine does
BUSY = 0.7  # of the processors: from here on reading leaves too little to compute with


class Overlap:
    """Watches reading from now on, by this process on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cores = torch.get_num_threads()
        self._started_s, self._computed_s, self._idle_s = time.perf_counter(), time.process_time(), _idle_s()

    def left_s(self, seconds: float) -> float:
        """What is left of `seconds` from when watching began."""
        return max(0.0, self._started_s + seconds - time.perf_counter())

    def judge(self, nbytes: int) -> tuple[bool, str]:
        """Whether to run while reading goes on, and why, once `nbytes` were read."""
        took_s = max(time.perf_counter() - self._started_s, 1e-6)
        busy = min(1.0, (time.process_time() - self._computed_s) / took_s / self._cores)
        idle = min(1.0, max(0.0, _idle_s() - self._idle_s) / took_s / (psutil.cpu_count() or 1))
        found = (
            f"{nbytes / took_s / 1e9:.2f} GB/s, which kept its processors {100 * busy:.0f} % busy, and "
            f"{100 * idle:.0f} % of the machine's were idle"
        )
        if self._device.type != "cpu":
            return True, f"layers ran while those behind them were read: {found}, and {self._device} computes"
        if busy < WAITS or (busy < BUSY and idle > 1 - BUSY):
            return True, f"layers ran while those behind them were read: {found}"
        return False, f"all was read before the first layer ran: {found}, so that running meanwhile would gain nothing"


def _idle_s() -> float:
    """For how long the machine's processors had nothing to do so far, all added up."""
    times = psutil.cpu_times()
    return float(times.idle + getattr(times, "iowait", 0.0))
