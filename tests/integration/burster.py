"""A worker without a guard: calm, then at full touching speed past its quota, and it tells when.

    python -m tests.integration.burster SOCKET DIARY QUOTA_MIB CALM_MIB

Prints "calm", waits for a line, then touches ``CHUNK`` after ``CHUNK``.  The diary is a mapped
file, so that it outlives a SIGKILL: unix time and bytes touched in all, after each chunk.
"""

import mmap
import struct
import sys
import time
from pathlib import Path

from umad.client import connect

MIB = 1 << 20
CHUNK = 2 * MIB
MOST = 2048 * MIB
ENTRY = struct.Struct("dQ")


class Model:
    """Stands for a model: really touched."""

    def __init__(self, size: int) -> None:
        self.parts = [bytearray(b"\x01") * size]


def read_diary(path: Path) -> list[tuple[float, int]]:
    """(unix time, bytes touched in all) of every chunk so far."""
    entries = ((at_s, size) for at_s, size in ENTRY.iter_unpack(path.read_bytes()))
    return [entry for entry in entries if entry[1]]


def main(socket: str, diary: Path, quota: int, calm: int) -> None:
    diary.write_bytes(bytes(ENTRY.size * (MOST // CHUNK + 1)))
    with diary.open("r+b") as file:
        entries = mmap.mmap(file.fileno(), 0)
    worker = connect(socket, name="burster").worker("burster", quota=f"{quota}MiB")
    model = worker.load(lambda: Model(calm * MIB))
    print("calm", flush=True)
    if not sys.stdin.readline():
        return
    touched = calm * MIB
    ENTRY.pack_into(entries, 0, time.time(), touched)
    for index in range(1, MOST // CHUNK + 1):
        model.parts.append(bytearray(b"\x01") * CHUNK)
        touched += CHUNK
        ENTRY.pack_into(entries, ENTRY.size * index, time.time(), touched)
    print("survived", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
