"""A port for a server that has to be told one, and listens on it a while after."""

from __future__ import annotations

import secrets
import socket

# Below the range from which Linux gives ports to whoever asks for any: nobody else comes upon one between the look at
# it and its use.
FIRST, COUNT = 20000, 12000


def free_port() -> int:
    """A port of loopback on which nobody listens; drawn, so that tests beside each other do not try the same."""
    for _ in range(100):
        port = FIRST + secrets.randbelow(COUNT)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")
