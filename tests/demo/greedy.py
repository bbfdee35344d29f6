"""The sixth worker: registers a quota, loads within it, and then takes more.

A process of its own, as any program that uses umad.client.  Prints one line a step, so that the
demonstration can show what it did before it was killed.

    python -m tests.demo.greedy SOCKET QUOTA GREED
"""

import sys
import threading

from umad.client import connect
from umad.units import format_bytes, parse_bytes

STEP_BYTES = 32 << 20


class Model:
    """Stands for a model: bytes that are really touched."""

    def __init__(self, size: int) -> None:
        self.blocks = [bytearray(b"\x01") * size]

    def grow(self, size: int) -> None:
        self.blocks.append(bytearray(b"\x01") * size)


def main(socket: str, quota: str, greed: str) -> None:
    within = parse_bytes(quota) // 2
    with connect(socket, name="greedy") as client, client.worker("greedy", quota=quota) as worker:
        model = worker.load(lambda: Model(within))
        print(f"loaded {format_bytes(within)}, quota {quota}: within the contract", flush=True)
        print(f"now it takes {greed}, {format_bytes(STEP_BYTES)} at a time", flush=True)
        for _ in range(parse_bytes(greed) // STEP_BYTES):
            model.grow(STEP_BYTES)
        print("nobody stopped it", flush=True)
        threading.Event().wait(30)


if __name__ == "__main__":
    main(*sys.argv[1:])
