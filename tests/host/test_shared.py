"""Shared memory is counted once where something depends on it."""

import mmap
import os
import signal
from pathlib import Path

import pytest

from umad.host.memory import MachineProbe
from umad.host.procs import parse_proportional, process_identity, with_shared_once
from umad.units import MIB

SEGMENT = 64 * MIB

ROLLUP = b"""\
55d0c0000000-7ffe00000000 ---p 00000000 00:00 0                          [rollup]
Rss:              270000 kB
Pss:               90000 kB
Pss_Anon:          20000 kB
Pss_File:            500 kB
Pss_Shmem:         69500 kB
"""


def test_parsing() -> None:
    assert parse_proportional(ROLLUP) == (20000 + 69500) * 1024
    with pytest.raises(ValueError, match="Pss_Anon"):
        parse_proportional(ROLLUP.replace(b"Pss_Anon", b"Pss_Else"))


@pytest.mark.slow
def test_two_processes_on_one_segment_share_its_bytes() -> None:
    segment = mmap.mmap(-1, SEGMENT)  # shared and anonymous: RssShmem
    segment[::4096] = b"\x01" * (SEGMENT // 4096)
    children = []
    ready, write = os.pipe()
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            sum(segment[::4096])  # maps every page here too
            os.write(write, b"x")
            signal.pause()
        children.append(pid)
    try:
        for _ in children:
            os.read(ready, 1)
        identities = [process_identity(pid) for pid in children]
        probe = MachineProbe(gpu="none")
        snapshot = probe.sample([one for one in identities if one], 1.0)
        for identity, reading in snapshot.processes.items():
            assert reading.shmem_bytes >= SEGMENT
            assert reading.bytes.value is not None
            once = with_shared_once(reading)
            assert once.bytes.source == "smaps_rollup"
            # Three map it: the parent, and these two.
            assert once.host_bytes < reading.host_bytes - SEGMENT // 2
            limit = reading.bytes.value - MIB
            confirmed = probe.confirm(snapshot, {identity: limit}).processes[identity]
            assert confirmed.host_bytes == pytest.approx(once.host_bytes, abs=MIB)
            # Nothing depends on it: nothing is read.
            assert probe.confirm(snapshot, {identity: reading.bytes.value}) is snapshot
            assert probe.confirm(snapshot, {identity: 0}) is snapshot
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(ready)
        os.close(write)
        segment.close()


def test_what_cannot_be_read_stays_as_it_was(tmp_path: Path) -> None:
    identity = process_identity(os.getpid())
    assert identity is not None
    reading = MachineProbe(gpu="none").sample([identity], 1.0).processes[identity]
    assert with_shared_once(reading, str(tmp_path)) is reading
