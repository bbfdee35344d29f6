"""A process of 15 threads that each take a unit for a moment: ``sharers SOCKET NAME UNIT SECONDS``.

Prints a line ``enter`` and one ``leave`` for each, with the moment.
"""

import sys
import threading
import time

from umad.client import connect

THREADS = 15


class Model:
    """Holds nothing."""


def main(socket: str, name: str, unit: str, seconds: str) -> None:
    told: list[str] = []
    with connect(socket, name=name) as client, client.worker(name, quota="1MiB") as worker:
        model = worker.load(Model)

        def take() -> None:
            with worker.admit(unit, wait_s=60.0):
                told.append(f"enter {time.monotonic()}")
                threading.Event().wait(float(seconds))
                told.append(f"leave {time.monotonic()}")

        threads = [threading.Thread(target=take) for _ in range(THREADS)]
        print("ready", flush=True)
        sys.stdin.readline()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print("\n".join(told), flush=True)
        del model


if __name__ == "__main__":
    main(*sys.argv[1:])
