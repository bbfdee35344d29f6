import re
import statistics
import subprocess
import time

import pytest

from tests.data import machine_tree
from umad.host.meminfo import (
    MeminfoParser,
    parse_meminfo,
    residual,
    system_available,
    system_ceiling,
)
from umad.host.memory import reserve_default
from umad.host.procs import process_identity
from umad.units import GIB, MIB

KIB = 1024
MEMINFO = "MemTotal: {total} kB\nMemFree: {free} kB\nMemAvailable: {available} kB\n"


def meminfo(total: int, free: int, available: int, **more: int) -> bytes:
    lines = "".join(f"{key}:  {value} kB\n" for key, value in more.items())
    return (MEMINFO.format(total=total, free=free, available=available) + lines).encode()


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


def test_c01_the_page_cache_counts_as_free_and_pinned_cache_does_not(tmp_path, probing):
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
        meminfo(1000, 200, 500) + b"Dirty:   ",
        meminfo(1000, 200, 500, GPUReclaim=1001),
        meminfo(1000, 200, 500, CmaFree=1 << 60),
        meminfo(1 << 41, 200, 500),
    ],
)
def test_damaged_meminfo_is_refused(data):
    with pytest.raises(ValueError, match=r".+"):
        parse_meminfo(data)
    parser = MeminfoParser()
    parser(meminfo(1000, 200, 500, Dirty=3))
    with pytest.raises(ValueError, match=r".+"):
        parser(data)
    assert parser(meminfo(1000, 201, 500, Dirty=4))["MemFree"] == 201 * KIB


def test_what_is_read_again_and_again_is_read_as_the_first_time(machine):
    """By the pattern that was made of the file before, and by none where the lines have changed."""
    parser = MeminfoParser()
    files = [(machine(name) / "proc/meminfo").read_bytes() for name in machine_tree.NAMES]
    for data in (*files, *reversed(files)):
        less = re.sub(rb"(MemFree: +|Cached: +)[0-9]", rb"\g<1>0", data)
        for text in (data, data, less, data.replace(b"Dirty", b"D?rty\xff")):
            whole = parse_meminfo(text)
            found = parser(text)
            assert found.keys() <= whole.keys()
            assert found == {key: whole[key] for key in found}
            assert residual(found) == residual(whole)
            assert system_available(found) == system_available(whole)


def test_a_line_that_matters_is_not_lost(tmp_path, probing):
    (tmp_path / "proc").mkdir()
    path = tmp_path / "proc/meminfo"
    path.write_bytes(meminfo(1000, 200, 500, CmaFree=300))
    probe = probing(tmp_path)
    sound = probe.sample([], 0).pools
    path.write_bytes(meminfo(1000, 200, 500))
    safe = probe.sample([], 1).pools["system"].safe
    assert safe.value is None
    assert "CmaFree" in safe.problem
    path.write_bytes(meminfo(1000, 200, 500, CmaFree=300))
    assert probe.sample([], 2).pools == sound


def test_counts_of_huge_pages_stay_counts():
    data = meminfo(1000, 200, 500) + b"HugePages_Total:     512\n"
    assert parse_meminfo(data)["HugePages_Total"] == 512


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


def test_memory_that_cannot_be_read_keeps_umad_from_starting(tmp_path, probing):
    (fault,) = probing(tmp_path).check()
    assert "proc/meminfo" in fault


def test_c04_no_more_than_the_smaller_of_gtt_and_memory(machine, probing):
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
