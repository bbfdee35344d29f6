"""What every probe of a machine keeps, on recorded machines and on the real one."""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.contracts.damage import FAULTS, assert_sane, damage, identities, readings
from tests.data.machine_tree import NAMES, expected, lay_out
from umad.core.ports import Probe
from umad.host.memory import MachineProbe
from umad.values import Figure, Identity

REAL = "the real machine"


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
    with closing(MachineProbe(str(recorded))) as probe:
        first, second = (probe.sample(identities(recorded), now_s) for now_s in (0.0, 0.2))
    assert (first.pools, first.processes) == (second.pools, second.processes)
    assert first.anomalies == second.anomalies
    ages = {key for key in first.info | second.info if key.endswith("_age_ms")}
    for key in (first.info.keys() | second.info.keys()) - ages:
        assert first.info[key] == second.info[key], key


@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - {"shortened"}))
def test_damaged_meminfo_is_broken_and_heals(tmp_path, fault):
    """The sharpest of what tests/contracts/test_damage.py does to every file."""
    root = lay_out("cpu-only", tmp_path / "machine")
    probe = MachineProbe(str(root), gpu="none")
    sound = probe.sample([], 0).pools
    path = root / "proc/meminfo"
    mend = damage(path, fault)
    pool = probe.sample([], 1).pools["system"]
    for reading in (pool.capacity, pool.used, pool.safe):
        assert reading.state is Figure.BROKEN
        assert str(path) in reading.problem
    mend()
    assert probe.sample([], 2).pools == sound


def test_the_recorded_machines_are_the_expected_ones():
    assert NAMES == [
        "cpu-only",
        "discrete-amd",
        "discrete-nvidia",
        "gb10",
        "intel-igpu-xe",
        "jetson-orin-8g",
        "strix-halo-128g",
        "strix-halo-128g-k617-gttsize",
        "strix-halo-128g-pressure",
    ]
    assert all(expected(name)["kind"] for name in NAMES)
