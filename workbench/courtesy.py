"""Threads that keep account of an engine must not take the processor from it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

NICER = 10  # a tenth of the weight of a thread that computes; when both want a processor, the engine's goes on


def step_back() -> None:
    """Lower the priority of the calling thread, and of it alone, where the system has priorities a thread (Linux).

    An engine's operator is as slow as its slowest thread: a millisecond taken from one of them is lost to all.
    """
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # a sandbox that forbids it: the thread works on as it is
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICER))
