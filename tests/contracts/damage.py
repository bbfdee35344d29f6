"""What can happen to a file, and what every snapshot keeps all the same."""

import os
import re
from collections.abc import Callable
from pathlib import Path

from umad.host.procs import process_identity
from umad.values import Figure, Identity, Reading, Snapshot

REAL_ROOT = Path("/")
_DIGITS = re.compile(rb"[0-9]+")

FAULTS = {
    "missing": None,
    "empty": lambda sound: b"",
    "truncated": lambda sound: sound[: len(sound) // 2].rstrip(b"\n"),
    "shortened": lambda sound: b"".join(sound.splitlines(True)[: sound.count(b"\n") // 2]),
    "garbage": lambda sound: b"\xff\x00 garbage\n",
    "negative": lambda sound: _DIGITS.sub(lambda number: b"-" + number[0], sound),
    "enormous": lambda sound: _DIGITS.sub(b"100000000000000000", sound),
    "overflowing": lambda sound: _DIGITS.sub(b"99999999999999999999", sound),
    "fifo": None,
    "fifo that is open": None,
    "folder": None,
}


def damage(path: Path, fault: str) -> Callable[[], None]:
    """Do it; returns what mends it."""
    sound = path.read_bytes()
    path.unlink()
    fd = -1
    if fault.startswith("fifo"):
        os.mkfifo(path)
        # With a writer that writes nothing, a reader without O_NONBLOCK waits for ever.
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK) if fault.endswith("open") else -1
    elif fault == "folder":
        path.mkdir()
    elif (made := FAULTS[fault]) is not None:
        path.write_bytes(made(sound))

    def mend() -> None:
        if fd >= 0:
            os.close(fd)
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        path.write_bytes(sound)

    return mend


def identities(root: Path) -> list[Identity]:
    if root == REAL_ROOT:
        pids = [os.getpid(), os.getppid()]
    else:
        pids = [int(path.name) for path in (root / "proc").iterdir() if path.name.isdigit()]
    found = [process_identity(pid, str(root)) for pid in pids]
    return [identity for identity in found if identity is not None]


def readings(snapshot: Snapshot) -> list[Reading]:
    found = [process.bytes for process in snapshot.processes.values()]
    for pool in snapshot.pools.values():
        found += [pool.capacity, pool.used, pool.safe]
    return found


def assert_sane(snapshot: Snapshot) -> None:
    """What holds for every snapshot, of a sound machine and of a damaged one."""
    for reading in readings(snapshot):
        assert (reading.value is not None) == (reading.state is Figure.VALUE)
        assert reading.source
        assert bool(reading.problem) == (reading.state is Figure.BROKEN)
        if reading.value is not None:
            assert type(reading.value) is int
            assert 0 <= reading.value < 1 << 50
    assert "system" in snapshot.pools
    for name, pool in snapshot.pools.items():
        assert pool.name == name
        assert pool.binding
        assert pool.parent is None or pool.parent in snapshot.pools
        if pool.capacity.value is not None:
            assert pool.capacity.value > 0
            assert pool.safe.value is None or pool.safe.value <= pool.capacity.value
    for identity, process in snapshot.processes.items():
        assert process.identity == identity
        assert process.host_bytes >= 0
        assert process.gpu_bytes >= 0
    assert snapshot.duration_s >= 0
