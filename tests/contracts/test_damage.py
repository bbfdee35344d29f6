"""Any reading may fail in any way: nothing is freed that is not proven, nobody else is hit."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contracts.damage import FAULTS, assert_sane, damage, identities
from tests.data.machine_tree import NAMES, answer_nvml, lay_out
from umad.host.memory import MachineProbe
from umad.values import Figure, Reading, Snapshot

# What NVML says is damaged in tests/host/test_nvidia.py: it has no file.
NVML = ("nvml.txt", "dev/nvidiactl")
# Nothing that a look opens.
OTHER = ("comm", "cgroup", "osrelease", "min_free_kbytes", "overcommit_memory")
# Missing from the start, a limit was never there: the others hold.
LIMITS = (("pages_limit", "missing"), ("mem_limit", "missing"), ("meminfo", "shortened"))


@pytest.fixture(scope="module")
def trees(tmp_path_factory) -> dict[str, Path]:
    return {name: lay_out(name, tmp_path_factory.mktemp(name) / "m") for name in NAMES}


def places(root: Path) -> list[str]:
    found = (str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    return sorted(place for place in found if not place.endswith((*NVML, *OTHER)))


def looks(root: Path, faults: dict[str, str], *, late: bool) -> Iterator[Snapshot]:
    """A sound look, one at the damaged machine, two after it is mended."""
    answer_nvml(root)
    wanted = identities(root)
    with closing(MachineProbe(str(root))) as first, closing(MachineProbe(str(root))) as other:
        sound = first.sample(wanted, 0.0)
        probe = first if late else other
        with ExitStack() as mending:
            for place, fault in faults.items():
                mending.callback(damage(root / place, fault))
            damaged = probe.sample(wanted, 2.0)
        yield from (sound, damaged, probe.sample(wanted, 20.0), probe.sample(wanted, 40.0))


def check(root: Path, faults: dict[str, str], *, late: bool) -> None:
    sound, damaged, *healed = looks(root, faults, late=late)
    context = (root.parent.name, faults, late)
    assert_sane(damaged)
    says_which(damaged, faults)
    for name, pool in damaged.pools.items():
        assert name in sound.pools, context
        known, now = sound.pools[name].safe.value, pool.safe.value
        assert known is not None
        never_there = not late and any(
            place.endswith(end) and fault == how
            for place, fault in faults.items()
            for end, how in LIMITS
        )
        assert now is None or now <= known or never_there, (context, name)
    for identity, process in damaged.processes.items():
        before = sound.processes[identity].bytes.value
        assert process.alive, context
        assert process.bytes.value != 0, context
        if not any(concerns(place, identity.pid) for place in faults):
            assert process.bytes.value in (before, None), (context, identity)
    for snapshot in healed:
        assert snapshot.pools == sound.pools, context
        assert snapshot.processes == sound.processes, context


def concerns(place: str, pid: int) -> bool:
    """Whether a file tells of a process, or of which GPU there is."""
    return f"/{pid}/" in place or place.startswith(("sys/class", "sys/module", "sys/kernel"))


def says_which(snapshot: Snapshot, faults: dict[str, str]) -> None:
    for reading in readings_of(snapshot):
        if reading.state is Figure.BROKEN:
            assert any(
                place in reading.problem
                or str(Path(place).parent) in reading.problem
                or f"process {place.split('/')[1]}" in reading.problem
                for place in faults
            ), (reading, faults)


def readings_of(snapshot: Snapshot) -> Iterator[Reading]:
    for pool in snapshot.pools.values():
        yield from (pool.capacity, pool.used, pool.safe)
    for process in snapshot.processes.values():
        yield process.bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["strix-halo-128g", "intel-igpu-xe", "jetson-orin-8g", "gb10"])
def test_each_file_in_each_way(trees, name):
    for place in places(trees[name]):
        for fault in FAULTS:
            check(trees[name], {place: fault}, late=True)


@pytest.mark.slow
@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(data=st.data(), name=st.sampled_from(NAMES), late=st.booleans())
def test_two_files_at_a_time(trees, data, name, late):
    both = st.lists(st.sampled_from(places(trees[name])), min_size=2, max_size=2, unique=True)
    faults = {place: data.draw(st.sampled_from(sorted(FAULTS))) for place in data.draw(both)}
    check(trees[name], faults, late=late)
