"""NVIDIA's GPUs as the probe shows them: the maker's own binding over a library that pretends."""

import os
import shutil
from pathlib import Path

import pytest

from tests.data.machine_tree import answer_nvml
from tests.host.gpu_trees import write_process
from umad.host.memory import MachineProbe
from umad.host.nvidia import is_unified
from umad.host.nvml import STALE_S
from umad.host.procs import process_identity
from umad.testing.clock import ManualClock
from umad.units import GIB, MIB
from umad.values import Figure, Identity, Reading, Snapshot

DISCRETE, GB10, ORIN = "discrete-nvidia", "gb10", "jetson-orin-8g"


class Machine:
    """A machine with NVML, whose answers can be changed, and a probe on it."""

    def __init__(self, root: Path, gpu: str = "auto") -> None:
        self.root = root
        self.clock = ManualClock()
        self.answers = root / "nvml.txt"
        self.probe = MachineProbe(str(root), gpu, self.clock)

    def identity(self, pid: int) -> Identity:
        found = process_identity(pid, str(self.root))
        assert found
        return found

    def look(self, *pids: int) -> Snapshot:
        """A look with answers of now, whatever the thread's own pace."""
        self.probe.sample([], self.clock.now_s())
        reader = self.probe._gpu._nvidia._reader
        if reader.started:
            assert reader.fresh(10.0)
        wanted = [self.identity(pid) for pid in pids]
        return self.probe.sample(wanted, self.clock.now_s())

    def answer(self, old: str, new: str) -> None:
        text = self.answers.read_text()
        assert old in text
        self.answers.write_text(text.replace(old, new))


@pytest.fixture
def on(machine):
    made: list[Machine] = []

    def make(name: str, gpu: str = "auto") -> Machine:
        made.append(Machine(machine(name), gpu))
        return made[-1]

    yield make
    for each in made:
        each.probe.close()


@pytest.mark.parametrize(
    ("total", "mem_total", "x86", "unified"),
    [
        (Reading.absent("nvml"), 128 * GIB, False, True),
        (Reading.of(0, "nvml"), 128 * GIB, False, True),
        (Reading.of(116 * GIB, "nvml"), 128 * GIB, False, True),
        (Reading.of(115 * GIB, "nvml"), 128 * GIB, False, False),
        # 32 GiB of each: no x86 machine shares them, and many look like this
        (Reading.of(32 * GIB, "nvml"), 31 * GIB, True, False),
        (Reading.absent("nvml"), 31 * GIB, True, True),
        (Reading.broken("nvml", "unknown error"), 128 * GIB, False, None),
        (Reading.of(24 * GIB, "nvml"), None, False, None),
    ],
)
def test_whose_memory_it_is(total, mem_total, x86, unified):
    assert is_unified(total, mem_total, x86=x86) is unified


def test_total_that_equals_the_machines_memory_is_no_second_memory(on):
    machine = on(GB10)
    machine.answer("error 3", f"{124780544 * 1024} {1 * GIB}")
    assert set(machine.look().pools) == {"system", "unified"}


def test_with_huge_pages_the_driver_takes_from_their_pool(on):
    machine = on(GB10)
    meminfo = machine.root / "proc/meminfo"
    text = meminfo.read_text()
    for line, free, binding in (
        ("HugePages_Total:  20480\nHugePages_Free:   10240\n", 20 * GIB, "HugePages_Free"),
        ("HugePages_Total:  20480\nHugePages_Free:       0\n", 0, "HugePages_Free"),
        ("HugePages_Total:  20480\nHugePages_Free:   20481\n", None, "HugePages_Free"),
        ("HugePages_Total:  90000\nHugePages_Free:   90000\n", None, "HugePages_Free"),
    ):
        meminfo.write_text(
            text.replace("HugePages_Total:       0\nHugePages_Free:        0\n", line)
        )
        pool = machine.look().pools["unified"]
        assert (pool.safe.value, pool.binding) == (free, binding)


def test_bytes_that_nvml_does_not_tell_are_unknown_and_not_zero(on):
    machine = on(DISCRETE)
    machine.answer("compute 6001 9663676416", "compute 6001 -")
    reading = machine.look(6001).processes[machine.identity(6001)]
    assert reading.bytes.state is Figure.BROKEN
    assert "process 6001" in reading.bytes.problem
    assert reading.host_bytes > 0


def test_a_process_without_the_device_open_holds_nothing_of_it(on):
    machine = on(DISCRETE)
    machine.look()
    machine.answer("driver", "fail 999\ndriver")
    plain = write_process(machine.root, 7000, 50, {5: b""}, opened="/tmp/file")
    snapshot = machine.look(6001, 7000)
    assert snapshot.processes[machine.identity(6001)].bytes.state is Figure.BROKEN
    assert snapshot.processes[plain].bytes.value == 4096
    assert snapshot.pools["vram"].safe.state is Figure.BROKEN
    assert any("NVML" in text for text in snapshot.anomalies)


def test_a_stuck_driver_stops_no_look_and_its_old_answer_ends(on):
    machine = on(DISCRETE)
    sound = machine.look(6001)
    machine.answers.rename(machine.root / "kept")
    os.mkfifo(machine.answers)
    assert machine.probe._gpu._nvidia._reader.fresh(0.05) is None
    pid = machine.identity(6001)
    machine.clock.advance(STALE_S - 0.5)
    aged = machine.probe.sample([pid], machine.clock.now_s())
    assert aged.pools == sound.pools
    assert aged.info["nvml_age_ms"] == 2500
    machine.clock.advance(1.0)
    stale = machine.probe.sample([pid], machine.clock.now_s())
    assert stale.pools["vram"].safe.state is Figure.BROKEN
    assert "has not answered for 3.5 s" in stale.pools["vram"].safe.problem
    assert stale.processes[pid].bytes.state is Figure.BROKEN
    assert stale.processes[pid].alive
    text = (machine.root / "kept").read_text()
    machine.answers.write_text(text)
    machine.answers.unlink()
    machine.answers.write_text(text)
    assert machine.look(6001).pools == sound.pools


def test_nobody_is_stopped_by_an_answer_that_is_older_than_the_look(on):
    machine = on(DISCRETE)
    pid = machine.identity(6001)
    snapshot = machine.look(6001)
    limits = {pid: 1 * GIB}
    machine.answer("compute 6001 9663676416", "compute 6001 4096")
    confirmed = machine.probe.confirm(snapshot, limits)
    assert confirmed.processes[pid].gpu == (("vram", 4096),)
    assert machine.probe.confirm(snapshot, {pid: 999 * GIB}) is snapshot
    # and when there is no newer one, it proves nothing
    machine.answers.unlink()
    os.mkfifo(machine.answers)
    unproven = machine.probe.confirm(snapshot, limits).processes[pid]
    assert unproven.bytes.state is Figure.BROKEN
    assert "too old" in unproven.bytes.problem
    # nor is it waited for again before it has moved
    reader = machine.probe._gpu._nvidia._reader
    waits = reader._wanted
    assert machine.probe.confirm(snapshot, limits).processes[pid].bytes.state is Figure.BROKEN
    assert reader._wanted == waits
    machine.answers.write_text("")


def test_a_card_that_is_gone_is_broken_until_it_is_back(on):
    machine = on(DISCRETE)
    sound = machine.look(6001)
    text = machine.answers.read_text()
    machine.answers.write_text("driver 570\n")
    gone = machine.look(6001)
    assert gone.pools.keys() == sound.pools.keys()
    assert "does not show GPU 0000:01:00.0" in gone.pools["vram"].safe.problem
    assert gone.processes[machine.identity(6001)].bytes.state is Figure.BROKEN
    machine.answers.write_text(text.replace("error 3", "1 1"))
    assert machine.look(6001).pools == sound.pools
    # one that stops telling its memory is not taken for a unified one
    machine.answers.write_text(text.replace("25757220864 10200547328", "error 3"))
    assert machine.look().pools["vram"].capacity.state is Figure.BROKEN


def test_a_card_of_unknown_kind_has_no_pool_and_its_users_are_unknown(on):
    machine = on(DISCRETE)
    machine.answer("25757220864 10200547328", "error 999")
    snapshot = machine.look(6001)
    assert set(snapshot.pools) == {"system"}
    assert snapshot.processes[machine.identity(6001)].bytes.state is Figure.BROKEN
    assert any("0000:01:00.0 is not used" in text for text in snapshot.anomalies)
    machine.answer("error 999", "25757220864 10200547328")
    assert machine.look().pools["vram"].safe.value == 15556673536


def test_no_process_holds_more_than_the_machine_has(on):
    machine = on(DISCRETE)
    machine.answer("9663676416", str(1 << 49))
    reading = machine.look(6001).processes[machine.identity(6001)]
    assert reading.bytes.state is Figure.BROKEN
    assert "more than the machine has" in reading.bytes.problem


def test_in_a_pid_namespace_silence_proves_nothing(on):
    machine = on(DISCRETE)
    machine.answer("compute 6001 9663676416\n", "")
    assert machine.look(6001).processes[machine.identity(6001)].gpu_bytes == 0
    machine.probe.close()
    (machine.root / "proc/self/ns").mkdir(parents=True)
    (machine.root / "proc/self/ns/pid").touch()  # any number but the host's
    inside = Machine(machine.root)
    reading = inside.look(6001).processes[inside.identity(6001)]
    inside.probe.close()
    assert reading.bytes.state is Figure.BROKEN
    assert "PID namespace" in reading.bytes.problem


def thor(machine: Machine) -> Machine:
    """nvmap lists nobody, NVML everybody."""
    (machine.root / "sys/kernel/debug/nvmap/iovmm/clients").write_text("")
    machine.answers.write_text(
        "driver 580\ndevice 00000000:01:00.0 error 3\ncompute 7979 3250585600\n"
    )
    answer_nvml(machine.root)
    return machine


def test_where_nvmap_is_silent_nvml_speaks(on):
    machine = thor(on(ORIN))
    snapshot = machine.look(7979, 2831)
    assert set(snapshot.pools) == {"system", "unified"}
    assert snapshot.info["gpu_kind"] == "jetson"
    assert snapshot.pools["unified"].used.value == 3489361920  # the greater: NvMapMemUsed
    held = {who.pid: one.gpu_bytes for who, one in snapshot.processes.items()}
    assert held == {7979: 3250585600, 2831: 0}


def test_where_nvml_does_not_know_a_jetsons_gpu_either(on):
    machine = thor(on(ORIN))
    machine.answers.write_text("driver 580\n")
    reading = machine.look(7979).processes[machine.identity(7979)]
    assert reading.bytes.state is Figure.BROKEN
    assert "nvmap/iovmm/clients lists nobody" in reading.bytes.problem
    assert "does not show GPU tegra" in reading.bytes.problem


def test_where_nobody_tells_who_holds_a_jetsons_memory(on):
    machine = on(ORIN)
    path = machine.root / "sys/kernel/debug/nvmap/iovmm/clients"
    path.unlink()
    path.symlink_to("clients")  # a loop: there, and not to be read
    plain = write_process(machine.root, 7000, 50, {5: b""}, opened="/tmp/file")
    snapshot = machine.look(7979, 7000)
    assert snapshot.processes[machine.identity(7979)].bytes.state is Figure.BROKEN
    assert snapshot.processes[plain].bytes.value == 4096
    assert snapshot.pools["unified"].used.value == 3489361920


def test_a_discrete_card_beside_an_integrated_gpu(on, machine):
    """The one with memory of its own comes first; the other's pools carry its address."""
    strix = machine("strix-halo-128g")
    place = on(DISCRETE)
    for part in ("class/drm", "class/kfd", "module", "kernel"):
        shutil.copytree(strix / "sys" / part, place.root / "sys" / part)
    both = write_process(
        place.root,
        6001,
        50,
        {
            9: b"drm-driver:\tamdgpu\ndrm-pdev:\t0000:c5:00.0\ndrm-client-id:\t1\n"
            b"drm-memory-gtt:\t5 MiB\ndrm-memory-vram:\t3 MiB\n"
        },
    )
    snapshot = place.look(6001)
    assert list(snapshot.pools) == ["system", "vram", "vram-0000-c5-00.0", "gtt-0000-c5-00.0"]
    assert snapshot.pools["vram"].safe.value == 15556673536
    assert snapshot.pools["gtt-0000-c5-00.0"].parent == "system"
    assert dict(snapshot.processes[both].gpu) == {
        "vram": 9663676416,
        "vram-0000-c5-00.0": 3 * MIB,
        "gtt-0000-c5-00.0": 5 * MIB,
    }
    assert snapshot.info["gpu-0000-c5-00.0"] == "0000:c5:00.0"
    # one that is named has the short names alone, and all bytes still count
    place.probe.close()
    named = Machine(place.root, "0000:C5:00.0")
    snapshot = named.look(6001)
    named.probe.close()
    assert list(snapshot.pools) == ["system", "vram", "gtt"]
    assert snapshot.pools["vram"].capacity.value == 536870912
    assert dict(snapshot.processes[both].gpu) == {
        "vram-0000-01-00.0": 9663676416,
        "vram": 3 * MIB,
        "gtt": 5 * MIB,
    }
