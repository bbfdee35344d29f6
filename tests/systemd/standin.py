"""Inside the container: a worker that stands in for umad-serve.

standin.py MODEL MIB: takes its load lease, holds that much, tells systemd that it is ready, stays.
"""

import signal
import sys

from umad.client import connect
from umad.host.notify import Notifier


class Model:
    """Memory that was really touched."""

    def __init__(self, size: int) -> None:
        self.held = b"\x01" * size


def main() -> None:
    """Hold the model until SIGTERM."""
    name, size = sys.argv[1], int(sys.argv[2]) << 20
    with connect(name="standin") as client, client.worker(name, quota=2 * size) as worker:
        model = worker.load(lambda: Model(size))
        Notifier().ready(f"holds {len(model.held)} bytes")
        signal.sigwait({signal.SIGTERM})


signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
main()
