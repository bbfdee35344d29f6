import os
import shutil
from pathlib import Path

import pytest

from umad.host.drm import DrmClient, bill, parse_fdinfo
from umad.host.gpu import KfdLimits, kfd_system_max, parse_kfd_limits
from umad.units import GIB, MIB
from umad.values import Figure, Identity

STRIX = "strix-halo-128g"
DEVICE = "sys/class/drm/card1/device"
C3 = "0000:c3:00.0"


def fdinfo(*lines: str, client: str | None = "17", pdev: str = C3) -> bytes:
    head = ["pos:\t0", "drm-driver:\tamdgpu", f"drm-pdev:\t{pdev}"]
    if client is not None:
        head.append(f"drm-client-id:\t{client}")
    return "\n".join([*head, *lines, ""]).encode()


def write_process(root: Path, pid: int, start_ticks: int, files: dict[int, bytes]) -> Identity:
    folder = root / f"proc/{pid}"
    for part in ("fd", "fdinfo"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "stat").write_text(f"{pid} (w) S" + " 0" * 18 + f" {start_ticks} 0 0\n")
    (folder / "status").write_text("Name:\tw\nState:\tS (s)\nRssAnon:\t4 kB\nRssShmem:\t0 kB\n")
    for fd, data in files.items():
        (folder / f"fd/{fd}").symlink_to("/dev/dri/renderD128")
        (folder / f"fdinfo/{fd}").write_bytes(data)
    return Identity(pid, start_ticks)


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("drm-memory-gtt: 21504000 KiB", 22020096000),
        ("drm-memory-gtt:\t4096", 4096),
        ("drm-resident-gtt:  24 MiB", 25165824),
        ("drm-resident-vram:\t0", 0),
    ],
)
def test_units_of_fdinfo(line, size):
    assert parse_fdinfo(fdinfo(line)) == DrmClient(C3, "17", size)


def test_resident_stands_above_memory_and_is_never_added_to_it():
    data = fdinfo("drm-memory-gtt: 9 MiB", "drm-resident-gtt: 2 MiB", "drm-memory-vram: 5 MiB")
    assert parse_fdinfo(data) == DrmClient(C3, "17", 7 * MIB)


@pytest.mark.parametrize("text", ["-1 KiB", "4 kib", "1e3", "", "nan", "1.5"])
def test_figures_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match=r".+"):
        parse_fdinfo(fdinfo(f"drm-memory-gtt: {text}"))


def test_a_client_without_figures_is_refused():
    with pytest.raises(ValueError, match="without memory figures"):
        parse_fdinfo(fdinfo())


def test_a_plain_file_is_no_client():
    assert parse_fdinfo(b"pos:\t0\nflags:\t02\n") is None


A, B = Identity(5000, 10), Identity(5001, 20)


def test_a_client_counts_once_and_another_device_is_another_client():
    one = DrmClient(C3, "17", 8 * GIB)
    other = DrmClient("0000:01:00.0", "17", 1 * GIB)
    assert bill({A: [one, one, one, other]}) == ({A: 9 * GIB}, [])


def test_a_client_of_two_processes_is_billed_to_the_older_and_told():
    one = DrmClient(C3, "17", 8 * GIB)
    billed, odd = bill({B: [one], A: [one]})
    assert billed == {A: 8 * GIB, B: 0}
    assert len(odd) == 1
    assert "5000" in odd[0]
    assert "5001" in odd[0]


def test_files_without_a_client_count_once_per_process_and_device():
    nameless = DrmClient(C3, None, 1 * GIB)
    billed, odd = bill({A: [nameless, nameless], B: [nameless]})
    assert billed == {A: 1 * GIB, B: 1 * GIB}
    assert len(odd) == 2


def test_the_registered_holder_pays(machine, probing):
    root = machine(STRIX)
    data = fdinfo("drm-memory-gtt: 8388608 KiB")
    write_process(root, 1, 5, {3: data})
    worker = write_process(root, 5000, 50, {9: data, 10: data, 11: data})
    snapshot = probing(root).sample([worker], 0)
    assert snapshot.processes[worker].gpu_bytes == 8 * GIB
    assert snapshot.processes[worker].bytes.value == 8 * GIB + 4096
    assert snapshot.anomalies == ()


def test_figures_are_fresh_and_new_clients_show_within_a_second(machine, probing):
    root = machine(STRIX)
    worker = write_process(root, 5000, 50, {9: fdinfo("drm-memory-gtt: 8 MiB")})
    probe = probing(root)

    def held(now_s: float) -> int:
        return probe.sample([worker], now_s).processes[worker].gpu_bytes

    assert held(0.0) == 8 * MIB
    (root / "proc/5000/fdinfo/9").write_bytes(fdinfo("drm-memory-gtt: 1 MiB"))
    assert held(0.1) == 1 * MIB
    write_process(root, 5000, 50, {10: fdinfo("drm-memory-gtt: 2 MiB", client="18")})
    assert held(1.1) == 3 * MIB
    (root / "proc/5000/fdinfo/9").unlink()
    (root / "proc/5000/fd/9").unlink()
    assert held(1.2) == 2 * MIB


def test_kfd_counts_where_it_shows_more_than_fdinfo(machine, probing):
    root = machine(STRIX)
    worker = write_process(root, 5000, 50, {9: fdinfo("drm-memory-gtt: 8 MiB")})
    path = root / "sys/class/kfd/kfd/proc/5000/vram_51110"
    path.parent.mkdir()
    probe = probing(root)
    path.write_text(f"{9 * MIB}\n")
    reading = probe.sample([worker], 0).processes[worker]
    assert (reading.gpu_bytes, reading.bytes.source) == (9 * MIB, "status+kfd")
    path.write_text(f"{7 * MIB}\n")
    assert probe.sample([worker], 0).processes[worker].gpu_bytes == 8 * MIB
    path.write_text("many\n")
    reading = probe.sample([worker], 0).processes[worker]
    assert reading.bytes.state is Figure.BROKEN
    assert reading.alive
    assert "vram_51110" in reading.bytes.problem


def test_damaged_fdinfo_breaks_one_process_only(machine, probing):
    root = machine(STRIX)
    good = write_process(root, 5000, 50, {9: fdinfo("drm-memory-gtt: 8 MiB")})
    bad = write_process(root, 5001, 51, {9: fdinfo("drm-memory-gtt: lots", client="2")})
    snapshot = probing(root).sample([good, bad], 0)
    assert snapshot.processes[good].gpu_bytes == 8 * MIB
    assert snapshot.processes[bad].bytes.state is Figure.BROKEN
    assert snapshot.processes[bad].bytes.value is None


def test_used_above_total_is_zero_free_and_one_anomaly(machine, probing):
    root = machine(STRIX)
    (root / DEVICE / "mem_info_vram_total").write_text("536870912\n")
    (root / DEVICE / "mem_info_vram_used").write_text("601882624\n")
    snapshot = probing(root).sample([], 0)
    assert snapshot.pools["vram"].safe.value == 0
    assert len(snapshot.anomalies) == 1
    assert "601882624" in snapshot.anomalies[0]


def test_the_card_is_found_by_its_address_and_found_again_under_another_name(machine, probing):
    root = machine(STRIX)
    drm = root / "sys/class/drm"
    other = drm / "card0/device"
    other.mkdir(parents=True)
    (other / "vendor").write_text("0x8086\n")
    (other / "uevent").write_text("PCI_SLOT_NAME=0000:00:02.0\n")
    probe = probing(root, gpu="0000:C5:00.0")
    before = probe.sample([], 0).pools
    assert before["gtt"].used.value == 88336236544
    (drm / "card1").rename(drm / "card2")
    (drm / "card2/device/mem_info_gtt_used").write_text("1\n")
    assert probe.sample([], 1).pools["gtt"].used.value == 1


def test_a_second_card_under_the_old_name_is_not_taken_for_the_first(machine, probing):
    root = machine(STRIX)
    drm = root / "sys/class/drm"
    probe = probing(root)
    probe.sample([], 0)
    (drm / "card1").rename(drm / "card2")
    shutil.copytree(drm / "card2", drm / "card1")
    (drm / "card1/device/uevent").write_text("PCI_SLOT_NAME=0000:01:00.0\nPCI_ID=1002:744C\n")
    (drm / "card1/device/mem_info_gtt_used").write_text("1\n")
    assert probe.sample([], 1).pools["gtt"].used.value == 88336236544
    # and once the first is gone, its readings are broken, not the second card's
    shutil.rmtree(drm / "card2")
    (drm / "card1").rename(drm / "card2")
    snapshot = probe.sample([], 2)
    assert set(snapshot.pools) == {"system", "vram", "gtt"}
    for name in ("vram", "gtt"):
        pool = snapshot.pools[name]
        assert pool.safe.state is Figure.BROKEN, name
        assert pool.safe.value is None
    assert "gone" in snapshot.anomalies[0]
    # it comes back
    shutil.copytree(drm / "card2", drm / "card7")
    (drm / "card7/device/uevent").write_text("PCI_SLOT_NAME=0000:c5:00.0\nPCI_ID=1002:1586\n")
    assert probe.sample([], 3).pools["gtt"].used.value == 1


def test_a_card_of_that_address_must_exist(machine, probing):
    root = machine(STRIX)
    (fault,) = probing(root, gpu="0000:01:00.0").check()
    assert "0000:01:00.0" in fault
    assert set(probing(root, gpu="0000:01:00.0").sample([], 0).pools) == {"system"}


def test_no_gpu_when_none_is_wanted(machine, probing):
    probe = probing(machine(STRIX), gpu="none")
    assert probe.check() == []
    assert set(probe.sample([], 0).pools) == {"system"}


def test_a_driver_that_comes_late_is_found(machine, probing, tmp_path):
    root = machine(STRIX)
    (root / "sys/class/drm").rename(root / "drm")
    probe = probing(root)
    assert set(probe.sample([], 0).pools) == {"system"}
    (root / "drm").rename(root / "sys/class/drm")
    assert "gtt" in probe.sample([], 11).pools


@pytest.mark.parametrize(
    ("place", "pool"),
    [
        (f"{DEVICE}/mem_info_gtt_total", "gtt"),
        (f"{DEVICE}/mem_info_gtt_used", "gtt"),
        (f"{DEVICE}/mem_info_vram_total", "vram"),
        (f"{DEVICE}/mem_info_vram_used", "vram"),
        ("sys/module/ttm/parameters/pages_limit", "gtt"),
        ("sys/kernel/debug/kfd/mem_limit", "gtt"),
        ("proc/meminfo", "gtt"),
    ],
)
@pytest.mark.parametrize("fault", ["missing", "empty", "garbage", "fifo"])
@pytest.mark.timeout(10)
def test_a_limit_that_cannot_be_read_never_widens_the_pool(machine, probing, place, pool, fault):
    root = machine(STRIX)
    probe = probing(root)
    before = probe.sample([], 0).pools[pool]
    path = root / place
    text = path.read_text()
    path.unlink()
    if fault == "fifo":
        os.mkfifo(path)
    elif fault != "missing":
        path.write_text("" if fault == "empty" else "garbage\n")
    broken = probe.sample([], 1).pools[pool]
    assert broken.safe.state is Figure.BROKEN
    assert broken.safe.value is None
    assert place in broken.safe.problem
    path.unlink(missing_ok=True)
    path.write_text(text)
    assert probe.sample([], 2).pools[pool] == before


def test_kfd_limits():
    text = b"System mem used 86016M out of 124383M\nTTM mem used 83968M out of 114688M\n"
    assert parse_kfd_limits(text) == KfdLimits(86016 * MIB, 124383 * MIB, 83968 * MIB, 114688 * MIB)
    with pytest.raises(ValueError, match="TTM"):
        parse_kfd_limits(text[:30] + b"\n" + text[:38])


def test_the_limit_of_kfd_at_its_start():
    assert kfd_system_max(64 * GIB) == 63 * GIB - 1536 * MIB
    assert kfd_system_max(None) is None


def test_a_later_write_to_pages_limit_does_not_move_the_limit_of_kfd(machine, probing):
    root = machine(STRIX)
    (root / "sys/module/ttm/parameters/pages_limit").write_text("32000000\n")
    info = probing(root).sample([], 0).info
    assert info["limit_kfd_ttm"] == (114688 - 83968) * MIB


def test_a_machine_without_kfd_offers_no_gtt(machine, probing):
    root = machine(STRIX)
    shutil.rmtree(root / "sys/class/kfd")
    shutil.rmtree(root / "sys/kernel/debug")
    assert set(probing(root).sample([], 0).pools) == {"system", "vram"}


def test_two_cards_of_one_kind_are_told_apart_by_their_place(machine, probing):
    root = machine(STRIX)
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    shutil.copytree(nodes / "1", nodes / "2")
    (nodes / "2/gpu_id").write_text("7\n")
    properties = (nodes / "2/properties").read_text()
    (nodes / "2/properties").write_text(properties.replace("50432", "256"))
    assert "gtt" in probing(root).sample([], 0).pools


def test_debugfs_is_read_at_the_listed_paths_only(machine, probing, monkeypatch):
    root = machine(STRIX)
    for name in ("ttm/tt_shrink", "ttm/page_pool_shrink", "dri/1/amdgpu_evict_gtt"):
        path = root / "sys/kernel/debug" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("0\n")
    opened: list[str] = []
    real_open, real_scandir = os.open, os.scandir
    monkeypatch.setattr(
        os, "open", lambda path, *rest: opened.append(path) or real_open(path, *rest)
    )
    monkeypatch.setattr(os, "scandir", lambda path: opened.append(path) or real_scandir(path))
    probe = probing(root)
    probe.check()
    probe.sample([], 0)
    assert {path for path in opened if "kernel/debug" in path} == {
        str(root / "sys/kernel/debug/kfd/mem_limit")
    }


def test_descriptors_in_a_copied_tree_are_no_links(machine, probing):
    root = machine(STRIX)
    worker = write_process(root, 5000, 50, {9: fdinfo("drm-memory-gtt: 8 MiB")})
    (root / "proc/5000/fd/9").unlink()
    (root / "proc/5000/fd/9").write_text("/dev/dri/renderD128")
    assert probing(root).sample([worker], 0).processes[worker].gpu_bytes == 8 * MIB


def test_other_descriptors_are_not_looked_into(machine, probing):
    root = machine(STRIX)
    worker = write_process(root, 5000, 50, {9: fdinfo("drm-memory-gtt: nonsense")})
    (root / "proc/5000/fd/9").unlink()
    (root / "proc/5000/fd/9").symlink_to("socket:[1]")
    assert probing(root).sample([worker], 0).processes[worker].bytes.value == 4096


def test_descriptors_that_may_not_be_listed_are_broken(machine, probing):
    root = machine(STRIX)
    worker = write_process(root, 5000, 50, {9: fdinfo("drm-memory-gtt: 8 MiB")})
    shutil.rmtree(root / "proc/5000/fd")
    (root / "proc/5000/fd").symlink_to("fd")  # a loop: cannot be opened, and is there
    reading = probing(root).sample([worker], 0).processes[worker]
    assert reading.bytes.state is Figure.BROKEN
    assert "proc/5000/fd" in reading.bytes.problem


def test_a_figure_that_turns_bad_is_broken_and_heals(machine, probing):
    root = machine(STRIX)
    worker = write_process(root, 5000, 50, {9: fdinfo("drm-memory-gtt: 8 MiB")})
    probe = probing(root)
    probe.sample([worker], 0)
    path = root / "proc/5000/fdinfo/9"
    path.write_bytes(fdinfo("drm-memory-gtt: lots"))
    assert probe.sample([worker], 0.1).processes[worker].bytes.state is Figure.BROKEN
    path.write_bytes(fdinfo("drm-memory-gtt: 9 MiB"))
    assert probe.sample([worker], 0.2).processes[worker].gpu_bytes == 9 * MIB
