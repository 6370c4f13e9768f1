"""How rank 0 tells the other ranks what to do next, and how they answer: bytes over the control group."""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.engine.parallel.comm import Comm

FIRST_BYTES = 8192  # sent in any case, with the length in front: most messages need no second broadcast


class Control:
    """Messages from rank 0 to all, answers from all to rank 0. One thread of each rank uses it, in the same order."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self._first = torch.zeros(8 + FIRST_BYTES, dtype=torch.uint8)

    @property
    def is_alone(self) -> bool:
        return self.comm.size == 1

    def tell(self, message: bytes) -> None:
        """Rank 0: give `message` to every rank."""
        if self.is_alone:
            return
        first = self._first
        first[:8] = _bytes_tensor(len(message).to_bytes(8, "little"))
        head = message[:FIRST_BYTES]
        if head:
            first[8 : 8 + len(head)] = _bytes_tensor(head)
        self.comm.broadcast(first, 0)
        if len(message) > FIRST_BYTES:
            self.comm.broadcast(_bytes_tensor(message[FIRST_BYTES:]), 0)

    def hear(self) -> bytes:
        """Other ranks: wait for the next message."""
        self.comm.broadcast(self._first, 0)
        length = int.from_bytes(self._first[:8].numpy().tobytes(), "little")
        head = self._first[8 : 8 + min(length, FIRST_BYTES)].numpy().tobytes()
        if length <= FIRST_BYTES:
            return head
        rest = torch.empty(length - FIRST_BYTES, dtype=torch.uint8)
        self.comm.broadcast(rest, 0)
        return head + rest.numpy().tobytes()

    def collect(self, answer: bytes) -> tuple[bytes, ...]:
        """All ranks: rank 0 gets every rank's answer in rank order, the others an empty tuple."""
        if self.is_alone:
            return (answer,)
        sizes = self.comm.all_gather(torch.tensor([len(answer)], dtype=torch.int64), 0).tolist()
        if self.comm.index != 0:
            if answer:
                self.comm.send(_bytes_tensor(answer), 0)
            return ()
        answers = [answer]
        for source, size in enumerate(sizes[1:], start=1):
            if size == 0:
                answers.append(b"")
                continue
            received = torch.empty(size, dtype=torch.uint8)
            answers.append(self.comm.receive(received, source).numpy().tobytes())
        return tuple(answers)


def _bytes_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
