"""The cheap figures between two looks."""

import mmap
import os
import subprocess
from pathlib import Path

import pytest

from umad.host.procs import process_identity
from umad.units import MIB
from umad.values import Identity

SIZE = 8 * MIB


@pytest.fixture
def mine() -> Identity:
    identity = process_identity(os.getpid())
    assert identity is not None
    return identity


def touched() -> mmap.mmap:
    pages = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages[:: mmap.PAGESIZE] = b"\1" * (SIZE // mmap.PAGESIZE)
    return pages


def test_a_glance_grows_by_what_is_taken(mine, probing):
    probe = probing("/", "none")
    before = probe.glance([mine, None])
    with touched():
        after = probe.glance([mine, None])
    assert SIZE <= after[mine] - before[mine] < SIZE + 2 * MIB
    assert after.keys() == before.keys() == {mine, None}
    assert -after[None] == pytest.approx(-before[None], abs=1 << 30)


def test_a_family_is_glanced_at_with_its_process_and_the_dead_hold_nothing(mine, probing):
    probe = probing("/", "none")
    child = subprocess.Popen(["sleep", "60"])
    other = process_identity(child.pid)
    probe.sample([mine], 0, {mine: [other]})
    together = probe.glance([mine, other])
    probe.sample([mine], 0, {})
    assert together[mine] - probe.glance([mine])[mine] == pytest.approx(together[other], abs=MIB)
    child.kill()
    child.wait()
    assert probe.glance([other]) == {other: 0}


def test_who_cannot_be_glanced_at_is_left_out(machine, probing):
    root = machine("cpu-only")
    (root / "proc/meminfo").write_text("nonsense\n")
    for pid, statm in ((7, "500"), (8, "100 x 3"), (9, "100 50 3")):
        (root / f"proc/{pid}").mkdir(parents=True)
        (root / f"proc/{pid}/statm").write_text(statm)
    short, odd, good = (Identity(pid, 77) for pid in (7, 8, 9))
    probe = probing(root)
    assert probe.glance([None, short, odd, good]) == {good: 50 * mmap.PAGESIZE}
    probe.sample([good], 0, {good: [Identity(pid, 1) for pid in range(100, 133)]})
    assert probe.glance([good]) == {}  # too many to be cheap


def kept() -> int:
    """Descriptors of statm that are open here."""
    links = Path("/proc/self/fd").iterdir()
    return sum(str(link.resolve()).endswith("/statm") for link in links)


def test_a_glance_keeps_no_descriptor_of_who_is_not_asked_for(mine, probing):
    probe = probing("/", "none")
    probe.glance([mine])
    assert kept() == 1
    probe.sample([], 0, {})
    assert kept() == 0
