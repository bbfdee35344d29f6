import os
import shutil

import pytest

from tests.data.machine_tree import NAMES
from tests.host.gpu_trees import fdinfo, write_process
from umad.host.debugfs import DebugFile, debug_path
from umad.host.procs import process_identity
from umad.units import GIB, MIB
from umad.values import Figure, Moved

STRIX = "strix-halo-128g"
DEVICE = "sys/class/drm/card1/device"
C5 = "0000:c5:00.0"


def test_c10_the_registered_holder_pays(machine, probing):
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
    worker = write_process(root, 5000, 50, {9: fdinfo("drm-memory-gtt: 8 MiB", pdev=C5)})
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


def test_what_was_moved_out_of_the_gpu_is_shown(machine, probing):
    root = machine(STRIX)
    lines = ("drm-memory-gtt: 8 MiB", "amd-evicted-vram: 3 MiB", "amd-evicted-visible-vram: 1 MiB")
    worker = write_process(root, 5000, 50, {9: fdinfo(*lines, pdev=C5)})
    probe = probing(root)
    assert probe.sample([worker], 0).processes[worker].moved == Moved(evicted=3 * MIB)
    path = root / "sys/class/kfd/kfd/proc/5000/stats_51110/evicted_ms"
    path.parent.mkdir(parents=True)
    path.write_text("1200\n")
    reading = probe.sample([worker], 0).processes[worker]
    assert reading.moved == Moved(evicted=3 * MIB, evicted_ms=1200)
    assert reading.gpu_bytes == 8 * MIB, "counted once, where it is now"
    path.write_text("many\n")
    snapshot = probe.sample([worker], 0)
    assert any("evicted_ms" in text for text in snapshot.anomalies)
    assert snapshot.processes[worker].bytes.value is not None


def test_damaged_fdinfo_breaks_one_process_only(machine, probing):
    root = machine(STRIX)
    good = write_process(root, 5000, 50, {9: fdinfo("drm-memory-gtt: 8 MiB")})
    bad = write_process(root, 5001, 51, {9: fdinfo("drm-memory-gtt: lots", client="2")})
    snapshot = probing(root).sample([good, bad], 0)
    assert snapshot.processes[good].gpu_bytes == 8 * MIB
    assert snapshot.processes[bad].bytes.state is Figure.BROKEN
    assert snapshot.processes[bad].bytes.value is None


def test_c06_used_above_total_is_zero_free_and_one_anomaly(machine, probing):
    root = machine(STRIX)
    (root / DEVICE / "mem_info_vram_total").write_text("536870912\n")
    (root / DEVICE / "mem_info_vram_used").write_text("601882624\n")
    snapshot = probing(root).sample([], 0)
    assert snapshot.pools["vram"].safe.value == 0
    assert len(snapshot.anomalies) == 1
    assert "601882624" in snapshot.anomalies[0]


def test_c06_the_card_is_found_by_its_address_and_found_again_under_another_name(machine, probing):
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
    probe = probing(root, gpu=C5)
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


@pytest.mark.parametrize("name", NAMES)
def test_debugfs_is_read_at_the_listed_paths_only(machine, probing, monkeypatch, name):
    """Reading some files there evicts buffers or shrinks pools; none of those is ever opened."""
    root = machine(name)
    opened: list[str] = []
    real_open, real_scandir = os.open, os.scandir
    monkeypatch.setattr(
        os, "open", lambda path, *rest: opened.append(str(path)) or real_open(path, *rest)
    )
    monkeypatch.setattr(os, "scandir", lambda path: opened.append(str(path)) or real_scandir(path))
    probe = probing(root)
    probe.check()
    probe.sample([], 0)
    assert {path for path in opened if "kernel/debug" in path} <= {
        debug_path(str(root), file, C5 if "strix" in name else "0000:03:00.0") for file in DebugFile
    }


def test_no_listed_file_acts_when_it_is_read():
    acting = ("shrink", "evict", "test_ib", "gpu_recover", "autodump", "compute_reg")
    for file in DebugFile:
        assert not any(word in file for word in acting)
        assert "*" not in file
    with pytest.raises(ValueError, match="PCI address"):
        debug_path("/", DebugFile.HSA_PAGES, "../../ttm")


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


def test_what_several_clients_show_is_told_beside(machine, probing):
    """48 MiB of one buffer are in the figures of clients 11 and 13, as the kernel counts."""
    root = machine(STRIX)
    pids = [process_identity(pid, str(root)) for pid in (1502, 1533)]
    assert probing(root).sample(pids, 0).info["gpu_shared"] == 2 * 48 * MIB


def test_a_second_card_has_pools_of_its_own(machine, probing):
    root = machine("discrete-amd")
    drm = root / "sys/class/drm"
    shutil.copytree(drm / "card0", drm / "card1")
    (drm / "card1/device/uevent").write_text("PCI_SLOT_NAME=0000:0a:00.0\nPCI_ID=1002:744C\n")
    (drm / "card1/device/mem_info_vram_total").write_text(f"{48 * GIB}\n")
    worker = write_process(
        root,
        5000,
        50,
        {
            9: fdinfo("drm-memory-vram: 8 MiB", pdev="0000:03:00.0"),
            10: fdinfo("drm-memory-vram: 1 MiB", "drm-memory-gtt: 2 MiB", pdev="0000:0a:00.0"),
            11: fdinfo("drm-memory-vram: 4 MiB", client="3", pdev="0000:0b:00.0"),
        },
    )
    probe = probing(root)
    snapshot = probe.sample([worker], 0)
    # the larger one first
    assert snapshot.pools["vram"].capacity.value == 48 * GIB
    assert snapshot.pools["vram-0000-03-00.0"].capacity.value == 25753026560
    assert dict(snapshot.processes[worker].gpu) == {
        "vram": 1 * MIB,
        "vram-0000-03-00.0": 8 * MIB,
        "system": 2 * MIB,
        "vram-0000-0b-00.0": 4 * MIB,
    }
    # and it stays the first, whatever comes later or goes
    shutil.rmtree(drm / "card1")
    later = probe.sample([], 1).pools
    assert later["vram"].safe.state is Figure.BROKEN
    assert later["vram-0000-03-00.0"] == snapshot.pools["vram-0000-03-00.0"]


def test_an_integrated_gpu_of_intels_that_goes_and_comes_back(machine, probing):
    root = machine("intel-igpu-xe")
    drm = root / "sys/class/drm"
    probe = probing(root)
    sound = probe.sample([], 0)
    assert (sound.pools["unified"].binding, sound.pools["unified"].parent) == ("ttm", "system")
    (drm / "card0").rename(root / "away")
    lost = probe.sample([], 1)
    assert lost.pools == sound.pools  # it has no memory of its own that could be lost
    assert "gone" in lost.anomalies[0]
    (root / "away").rename(drm / "card7")
    assert probe.sample([], 2).anomalies == ()


def test_i915_is_not_bound_by_ttm_and_a_card_of_intels_has_no_pool(machine, probing):
    root = machine("intel-igpu-xe")
    uevent = root / "sys/class/drm/card0/device/uevent"
    text = uevent.read_text()
    uevent.write_text(text.replace("DRIVER=xe", "DRIVER=i915"))
    snapshot = probing(root).sample([], 0)
    assert snapshot.pools["unified"].binding == "MemAvailable"
    uevent.write_text(text.replace("0000:00:02.0", "0000:03:00.0"))
    worker = write_process(
        root,
        5000,
        50,
        {9: fdinfo("drm-resident-vram0: 8 MiB", pdev="0000:03:00.0", driver="xe")},
    )
    snapshot = probing(root).sample([worker], 0)
    assert set(snapshot.pools) == {"system"}
    assert snapshot.processes[worker].gpu_bytes == 8 * MIB


def test_nobody_is_stopped_by_a_figure_of_intels_that_is_older_than_the_look(machine, probing):
    root = machine("intel-igpu-xe")
    worker = write_process(root, 5000, 50, {9: fdinfo("drm-resident-gtt: 8 MiB", driver="xe")})
    probe = probing(root)
    probe.sample([worker], 0)
    (root / "proc/5000/fdinfo/9").write_bytes(fdinfo("drm-resident-gtt: 1 MiB", driver="xe"))
    snapshot = probe.sample([worker], 1)
    assert snapshot.processes[worker].gpu_bytes == 8 * MIB
    assert snapshot.info["fdinfo_age_ms"] == 1000
    assert probe.confirm(snapshot, {worker: 4 * MIB}).processes[worker].gpu_bytes == MIB
    assert probe.confirm(snapshot, {worker: 9 * MIB}) is snapshot


def test_the_vendors_debugfs_is_shown_where_it_is(machine, probing):
    root = machine(STRIX)
    probe = probing(root)
    assert "hsa_pages_used" not in probe.sample([], 0).info
    folder = root / "sys/kernel/debug/hsa/agents" / C5
    folder.mkdir(parents=True)
    (folder / "pages_used").write_text("Pages used: 256\n")
    (folder / "mem_info").write_text("Used memory: none\n")
    snapshot = probe.sample([], 1)
    assert snapshot.info["hsa_pages_used"] == MIB
    assert "hsa_memory_used" not in snapshot.info
    (odd,) = snapshot.anomalies
    assert "mem_info" in odd


def test_a_size_that_changes_is_not_believed(machine, probing):
    root = machine("discrete-amd")
    probe = probing(root)
    probe.sample([], 0)
    path = root / "sys/class/drm/card0/device/mem_info_vram_total"
    path.write_text(f"{64 * GIB}\n")
    safe = probe.sample([], 1).pools["vram"].safe
    assert safe.state is Figure.BROKEN
    assert "a size stays" in safe.problem


def test_a_fork_is_not_billed_while_its_parent_cannot_be_read(machine, probing):
    root = machine(STRIX)
    parent, fork = (process_identity(pid, str(root)) for pid in (4211, 4213))
    probe = probing(root)
    before = probe.sample([parent, fork], 0).processes
    (root / "proc/4211/fdinfo/6").write_text("garbage")
    (root / "proc/4211/fdinfo/12").write_text("drm-driver: amdgpu\n")
    for now_s in (0.2, 2.0):
        now = probe.sample([parent, fork], now_s).processes
        assert now[parent].bytes.state is Figure.BROKEN
        assert now[fork] == before[fork]
    # a probe that never saw who paid cannot tell
    fresh = probing(root).sample([parent, fork], 0).processes
    assert "4211" in fresh[fork].bytes.problem
