"""What every probe of a machine keeps, on recorded machines and on the real one."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.machine_tree import NAMES, expected, lay_out
from umad.core.ports import Probe
from umad.host.memory import MachineProbe
from umad.host.procs import process_identity
from umad.values import Figure, Identity, Reading, Snapshot

REAL = "the real machine"
FAULTS = ["missing", "empty", "garbage", "fifo", "folder"]


@pytest.fixture(params=[*NAMES, REAL])
def root(request, tmp_path) -> Path:
    return Path("/") if request.param == REAL else lay_out(request.param, tmp_path / "machine")


@pytest.fixture(params=NAMES)
def recorded(request, tmp_path) -> Path:
    return lay_out(request.param, tmp_path / "machine")


@pytest.fixture
def probe(root) -> Iterator[MachineProbe]:
    probe = MachineProbe(str(root))
    yield probe
    probe.close()


def identities(root: Path) -> list[Identity]:
    if root == Path("/"):
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


def test_it_is_a_probe(probe):
    typed: Probe = probe
    assert typed.sample([], 0.0).taken_s == 0.0


def test_a_sound_machine_has_only_values(root, probe):
    wanted = identities(root)
    assert wanted
    snapshot = probe.sample(wanted, time.monotonic())
    assert_sane(snapshot)
    assert snapshot.processes.keys() == set(wanted)
    assert [reading for reading in readings(snapshot) if reading.value is None] == []
    assert all(process.alive for process in snapshot.processes.values())
    assert probe.check() == []


def test_only_the_asked_for_processes_are_read(root, probe):
    one, *_ = identities(root)
    assert probe.sample([one], 0).processes.keys() == {one}
    assert probe.sample([], 1).processes == {}
    assert probe.sample([one, one], 2).processes.keys() == {one}


def test_a_pid_with_another_start_time_is_not_that_process(root, probe):
    for identity in identities(root):
        other = Identity(identity.pid, identity.start_ticks + 1)
        snapshot = probe.sample([identity, other], 0)
        assert snapshot.processes[identity].alive
        assert not snapshot.processes[other].alive
        assert snapshot.processes[other].bytes.value == 0


def test_a_process_that_is_not_there_holds_nothing(root, probe):
    nobody = Identity(2**22 + 7, 1)
    snapshot = probe.sample([nobody], 0)
    assert_sane(snapshot)
    assert not snapshot.processes[nobody].alive


def test_two_looks_agree_where_nothing_changes(recorded):
    probe = MachineProbe(str(recorded))
    first, second = (probe.sample(identities(recorded), now_s) for now_s in (0.0, 0.2))
    assert (first.pools, first.processes) == (second.pools, second.processes)
    assert (first.info, first.anomalies) == (second.info, second.anomalies)


def damage(path: Path, fault: str) -> None:
    path.unlink()
    if fault == "fifo":
        os.mkfifo(path)
    elif fault == "folder":
        path.mkdir()
    elif fault != "missing":
        path.write_bytes(b"" if fault == "empty" else b"\xff\x00 garbage\n")


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("when", ["before the start", "at run time"])
def test_no_damaged_file_frees_a_byte(recorded, tmp_path, fault, when):
    """Each file in turn: no exception, no more room than before, no process at zero."""
    wanted = identities(recorded)
    sound = MachineProbe(str(recorded)).sample(wanted, 0)
    root = str(recorded)
    for path in sorted(path for path in recorded.rglob("*") if path.is_file()):
        content = path.read_bytes()
        probe = MachineProbe(root)
        if when == "at run time":
            probe.sample(wanted, 0)
        damage(path, fault)
        snapshot = probe.sample(wanted, 1)
        place = str(path.relative_to(recorded))
        assert_sane(snapshot)
        for name, pool in snapshot.pools.items():
            # at the start, a limit that is missing was never there: the others hold
            known = sound.pools[name].safe.value
            limit = place.endswith(("pages_limit", "mem_limit"))
            if not (limit and fault == "missing" and when == "before the start"):
                assert pool.safe.value is None or pool.safe.value == known, place
        for identity, process in snapshot.processes.items():
            assert process.alive, place
            before = sound.processes[identity].bytes.value
            assert process.bytes.value != 0, place
            if not place.startswith(("proc/", "sys/class")) or place.startswith("proc/sys"):
                assert process.bytes.value == before, place
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        path.write_bytes(content)
        healed = probe.sample(wanted, 20)
        if when == "at run time":
            assert healed.pools == sound.pools, place
            assert healed.processes == sound.processes, place


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_meminfo_is_broken_and_heals(recorded, fault):
    probe = MachineProbe(str(recorded))
    sound = probe.sample([], 0).pools
    path = recorded / "proc/meminfo"
    content = path.read_bytes()
    damage(path, fault)
    pool = probe.sample([], 1).pools["system"]
    for reading in (pool.capacity, pool.used, pool.safe):
        assert reading.state is Figure.BROKEN
        assert str(path) in reading.problem
    (path.rmdir if fault == "folder" else lambda: path.unlink(missing_ok=True))()
    path.write_bytes(content)
    assert probe.sample([], 2).pools == sound


def test_the_recorded_machines_are_the_expected_ones():
    assert NAMES == [
        "cpu-only",
        "discrete-amd",
        "strix-halo-128g",
        "strix-halo-128g-k617-gttsize",
        "strix-halo-128g-pressure",
    ]
    assert all(expected(name)["kind"] for name in NAMES)
