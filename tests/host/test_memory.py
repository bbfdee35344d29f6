import statistics
import subprocess
import time

import pytest

from tests.data.machine_tree import NAMES, expected
from umad.host.memory import (
    machine_mismatch,
    parse_meminfo,
    parse_psi,
    reserve_default,
    residual,
    system_available,
    system_ceiling,
)
from umad.host.procs import process_identity
from umad.units import GIB, MIB

KIB = 1024
MEMINFO = "MemTotal: {total} kB\nMemFree: {free} kB\nMemAvailable: {available} kB\n"


def meminfo(total: int, free: int, available: int, **more: int) -> bytes:
    lines = "".join(f"{key}:  {value} kB\n" for key, value in more.items())
    return (MEMINFO.format(total=total, free=free, available=available) + lines).encode()


@pytest.mark.parametrize("name", NAMES)
def test_the_figures_of_a_recorded_machine(machine, probing, name):
    root, truth = machine(name), expected(name)
    pids = [int(pid) for pid in truth["procs"]]
    identities = {pid: process_identity(pid, str(root)) for pid in pids}
    probe = probing(root)
    assert probe.check() == []
    snapshot = probe.sample(list(identities.values()), 7.0)

    assert snapshot.taken_s == 7.0
    info = snapshot.info
    assert info["mem_total"] == truth["mem_total"]
    assert info["mem_free"] == truth["mem_free"]
    assert info["mem_available"] == truth["mem_available"]
    assert info["mem_residual"] == truth["meminfo_residual"]
    for key, value in truth.get("limits", {}).items():
        assert info[f"limit_{key}"] == value, key

    dirty = 12288 * KIB
    if "cpu_alloc_ceiling_bytes" in truth:
        assert info["limit_sys"] == truth["cpu_alloc_ceiling_bytes"]
        assert set(snapshot.pools) == {"system"}
    system = snapshot.pools["system"]
    assert system.capacity.value == truth["mem_total"]
    assert system.safe.value == info["limit_sys"] - dirty
    assert system.parent is None
    if "limits" in truth:
        gtt = snapshot.pools["gtt"]
        binding = min(truth["limits"], key=lambda key: truth["limits"][key])
        assert truth["limits"][binding] == truth["gpu_alloc_ceiling_bytes"]
        assert gtt.parent == "system"
        assert gtt.binding == ("MemAvailable" if binding == "sys" else binding)
        # dirty pages come off what MemAvailable promises, and off nothing else
        taken = dirty if binding == "sys" else 0
        assert gtt.safe.value == truth["gpu_alloc_ceiling_bytes"] - taken
    elif "gpu_alloc_ceiling_bytes" in truth:
        assert "gtt" not in snapshot.pools
        assert snapshot.pools["vram"].safe.value == truth["gpu_alloc_ceiling_bytes"]

    for pid, size in truth["gpu_by_pid_dedup"].items():
        assert snapshot.processes[identities[int(pid)]].gpu_bytes == size, pid
    for process in snapshot.processes.values():
        assert process.alive
        assert process.bytes.value == process.host_bytes + process.gpu_bytes


def test_free_swap_changes_nothing():
    low = parse_meminfo(meminfo(1000, 200, 500, SwapFree=0, SwapTotal=900))
    high = parse_meminfo(meminfo(1000, 200, 500, SwapFree=900, SwapTotal=900))
    assert system_available(low) == system_available(high) == 500 * KIB


def test_each_term_of_what_is_available():
    figures = parse_meminfo(
        meminfo(1000, 200, 500, GPUReclaim=70, CmaFree=30, Dirty=20, Writeback=10)
    )
    assert system_ceiling(figures) == (500 + 70 - 30) * KIB
    assert system_available(figures) == (500 + 70 - 30 - 20 - 10) * KIB
    assert system_available({**figures, "Dirty": 900 * KIB}) == 0
    assert system_ceiling({**figures, "CmaFree": 900 * KIB}) == 0


def test_what_meminfo_lists_is_no_residual():
    names = [
        "Buffers",
        "Cached",
        "SwapCached",
        "AnonPages",
        "Slab",
        "KernelStack",
        "PageTables",
        "SecPageTables",
        "Percpu",
        "GPUActive",
        "GPUReclaim",
        "Hugetlb",
    ]
    figures = parse_meminfo(meminfo(100000, 20000, 50000, **dict.fromkeys(names, 1000)))
    assert residual(figures) == (80000 - 12 * 1000) * KIB


def test_the_page_cache_counts_as_free_and_pinned_cache_does_not(tmp_path, probing):
    folder = tmp_path / "proc"
    folder.mkdir()
    path = folder / "meminfo"
    path.write_bytes(meminfo(124780544, 6291456, 113246208, Cached=109051904, Shmem=524288))
    probe = probing(tmp_path)
    room = probe.sample([], 0).pools["system"].safe.value
    assert room is not None
    assert room - 8 * GIB >= 40 * GIB
    path.write_bytes(meminfo(124780544, 6291456, 16777216, Cached=109051904, Shmem=94371840))
    room = probe.sample([], 1).pools["system"].safe.value
    assert room is not None
    assert room - 8 * GIB < 40 * GIB


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        b"\x00\xff\n",
        meminfo(1000, 200, 500).replace(b"MemAvailable", b"MemOther"),
        meminfo(1000, 200, 500).replace(b"MemTotal", b"MemOther"),
        meminfo(0, 0, 0),
        meminfo(1000, 1001, 500),
        meminfo(1000, 200, 1001),
        meminfo(1000, 200, 500).replace(b"200", b"-200"),
        meminfo(1000, 200, 500).replace(b"200", b"nan"),
        meminfo(1000, 200, 500)[:40],
    ],
)
def test_damaged_meminfo_is_refused(data):
    with pytest.raises(ValueError, match=r".+"):
        parse_meminfo(data)


def test_counts_of_huge_pages_stay_counts():
    data = meminfo(1000, 200, 500) + b"HugePages_Total:     512\n"
    assert parse_meminfo(data)["HugePages_Total"] == 512


def test_pressure():
    text = (
        b"some avg10=34.25 avg60=1.00 avg300=0.00 total=3120202\n"
        b"full avg10=18.70 avg60=0.00 avg300=0.00 total=1498300\n"
    )
    pressure = parse_psi(text)
    assert pressure.some_ratio_avg10 == pytest.approx(0.3425)
    assert pressure.full_ratio_avg10 == pytest.approx(0.187)
    assert (pressure.some_us_total, pressure.full_us_total) == (3120202, 1498300)


@pytest.mark.parametrize(
    "data",
    [b"", b"\n", b"some", b"some avg10=nan total=1", b"some avg10=101 total=1", b"some avg10=1"],
)
def test_damaged_pressure_is_refused(data):
    with pytest.raises(ValueError, match=r".+"):
        parse_psi(data)


def test_damaged_pressure_is_an_anomaly_and_missing_pressure_is_not(machine, probing):
    root = machine("cpu-only")
    (root / "proc/pressure/memory").write_text("nonsense\n")
    snapshot = probing(root).sample([], 0)
    assert "psi_some_us_total" not in snapshot.info
    assert "proc/pressure/memory" in snapshot.anomalies[0]
    (root / "proc/pressure/memory").unlink()
    assert probing(root).sample([], 0).anomalies == ()


def test_meminfo_that_lists_too_much_is_an_anomaly(tmp_path, probing):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_bytes(meminfo(100000, 20000, 50000, Cached=90000))
    snapshot = probing(tmp_path).sample([], 0)
    assert snapshot.info["mem_residual"] == 0
    assert len(snapshot.anomalies) == 1


def test_the_default_reserve():
    assert reserve_default(24 * GIB) == 4 * GIB
    assert reserve_default(128 * GIB) == 128 * GIB * 4 // 100
    assert reserve_default(100 * GIB) == 4 * GIB


@pytest.mark.parametrize(
    ("mem", "gtt", "container", "mounted", "contradiction"),
    [
        (125 * GIB, 112 * GIB, None, False, False),
        (125 * GIB, 112 * GIB, "docker", False, False),
        (12 * GIB, 64 * GIB, "lxc", False, True),
        (12 * GIB, 64 * GIB, None, False, True),
        (60 * GIB, 64 * GIB, "lxc", False, True),
        (60 * GIB, 64 * GIB, None, False, False),
        (12 * GIB, None, "lxc", False, False),
        (12 * GIB, None, "lxc", True, True),
    ],
)
def test_machines_that_do_not_fit_together(mem, gtt, container, mounted, contradiction):
    text = machine_mismatch(mem, gtt, container, meminfo_mounted=mounted)
    assert (text is not None) == contradiction
    if text and gtt:
        assert "gtt_total" in text
        assert "meminfo" in text


def test_a_containers_meminfo_keeps_umad_from_starting(machine, probing):
    root = machine("strix-halo-128g")
    (root / "proc/meminfo").write_bytes(meminfo(12 * MIB, 6 * MIB, 8 * MIB))  # kB: 12 GiB
    (root / "run/systemd").mkdir(parents=True)
    (root / "run/systemd/container").write_text("lxc\n")
    (fault,) = probing(root).check()
    assert "lxc" in fault
    assert "12.0 GiB" in fault


def test_a_mount_over_meminfo_keeps_umad_from_starting(machine, probing):
    root = machine("cpu-only")
    (root / "proc/self").mkdir()
    (root / "proc/self/mounts").write_text("lxcfs /proc/meminfo fuse.lxcfs rw 0 0\n")
    (root / ".dockerenv").touch()
    (fault,) = probing(root).check()
    assert "docker" in fault


def test_memory_that_cannot_be_read_keeps_umad_from_starting(tmp_path, probing):
    (fault,) = probing(tmp_path).check()
    assert "proc/meminfo" in fault


def test_no_more_than_the_smaller_of_gtt_and_memory(machine, probing):
    root = machine("strix-halo-128g")
    device = root / "sys/class/drm/card1/device"
    (device / "mem_info_gtt_total").write_text(f"{90 * GIB}\n")
    (device / "mem_info_gtt_used").write_text(f"{1 * GIB}\n")
    (root / "proc/meminfo").write_bytes(meminfo(125 * MIB, 2 * MIB, 13 * MIB))
    gtt = probing(root).sample([], 0).pools["gtt"]
    assert gtt.safe.value == 13 * GIB
    assert gtt.binding == "MemAvailable"


@pytest.mark.slow
def test_a_look_at_five_processes_is_cheap(probing):
    """At most 300 µs of CPU at the median: a tick may not cost more (measured: about 85)."""
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(5)]
    try:
        found = [process_identity(child.pid) for child in children]
        identities = [identity for identity in found if identity is not None]
        probe = probing("/")
        costs_ns = []
        for now_s in range(500):
            before_ns = time.thread_time_ns()
            snapshot = probe.sample(identities, now_s)
            costs_ns.append(time.thread_time_ns() - before_ns)
            assert len(snapshot.processes) == 5
        assert statistics.median(costs_ns) < 300_000
    finally:
        for child in children:
            child.kill()
            child.wait()
