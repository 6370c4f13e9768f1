"""`firstlight` and `python -m firstlight.workbench`: interrupts are heard before anything else is imported."""

import os
import signal
import sys


class Early:
    """Takes interrupts where nobody else does: before the command line listens it keeps them, and a second one ends."""

    heard = False

    def __call__(self, *_: object) -> None:
        if self.heard:
            os._exit(130)
        self.heard = True


def main() -> int:
    """Runs the command line on this process's arguments; the exit status.

    Once the status is known an interrupt changes nothing: torch takes its time to leave.
    """
    early, numbers = Early(), (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        signal.signal(number, early)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # whoever started Python may have held them back until now
    from firstlight.workbench.cli import main as run

    status = run()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return status


if __name__ == "__main__":
    sys.exit(main())
