import os
from contextlib import closing
from pathlib import Path

import pytest

from umad.host.files import KernelFile
from umad.host.memory import MachineProbe
from umad.host.zones import (
    REQUEST,
    ZoneProbe,
    ask_for_compaction,
    parse_buddyinfo,
    parse_vmstat,
    parse_zoneinfo,
)
from umad.values import Watermarks

BUDDYINFO = b"""\
Node 0, zone      DMA      0      0      0      0      0      0      0      0      1      1      3 
Node 0, zone   Normal   9860  13602   9528   6974   5151   3182   1957   1288    706    460    840 
Node 1, zone  Movable      1      0      0      0      0      0      0      0      0      0      2 
"""  # noqa: W291  the kernel ends each line with a space
ZONEINFO = b"""\
Node 0, zone      DMA
  per-node stats
      nr_inactive_anon 2463
  pages free     3840
        boost    0
        min      22
        low      27
        high     32
        promo    37
        spanned  4095
        present  3998
        managed  3840
        cma      0
        protection: (0, 3019, 11211, 11211, 11211)
      nr_free_pages 3840
  pagesets
    cpu: 0
              count:    0
              high:     0
              high_min: 0
              batch:    1
  start_pfn:           1
Node 0, zone   Normal
  pages free     1881736
        min      12329
        low      15411
        high     18493
        spanned  4194304
        present  4194304
        managed  4096000
        protection: (0, 0, 0, 0, 0)
Node 0, zone  Movable
  pages free     0
        boost    0
        min      0
        low      0
        high     0
        spanned  0
        present  0
        managed  0
        protection: (0, 0, 0, 0, 0)
"""
VMSTAT = b"""\
nr_free_pages 1207074
allocstall_normal 3
allocstall_movable 11
pgscan_direct 18
pgscan_direct_throttle 5
compact_stall 42
compact_fail 17
compact_success 25
oom_kill 0
"""


def tree(folder: Path, **files: bytes) -> ZoneProbe:
    """A probe of ``folder``; files that are not given are there and sound."""
    (folder / "proc").mkdir(parents=True, exist_ok=True)
    sound = {"buddyinfo": BUDDYINFO, "zoneinfo": ZONEINFO, "vmstat": VMSTAT}
    for name, data in (sound | files).items():
        (folder / "proc" / name).write_bytes(data)
    return ZoneProbe(str(folder), page_bytes=4096)


def test_free_blocks_by_node_zone_and_order():
    dma, normal, movable = parse_buddyinfo(BUDDYINFO)
    assert (dma.node, dma.name, dma.free_blocks[8:]) == (0, "DMA", (1, 1, 3))
    assert (normal.name, normal.free_blocks[0], normal.free_blocks[-1]) == ("Normal", 9860, 840)
    assert (movable.node, len(movable.free_blocks)) == (1, 11)


def test_any_number_of_orders():
    [zone] = parse_buddyinfo(b"Node 7, zone    Device     1     2     3 \n")
    assert (zone.node, zone.free_blocks) == (7, (1, 2, 3))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        b"Node 0, zone DMA\n",
        b"Node 0, zone DMA 1 -2 3\n",
        b"Node 0, zone DMA 1 0x2 3\n",
        b"Node 0, zone DMA 1 9999999999999999 3\n",
        b"Node x, zone DMA 1 2 3\n",
        b"Node 0, zone DMA 1 2 3\nNode 0, zone Normal 1 2\n",  # cut short
        b"Node 0, zone DMA 1 2 3\nNode 0, zone DMA 1 2 3\n",
        b"Node 0, zone DMA" + b" 1" * 33,
    ],
)
def test_what_is_no_buddyinfo(data):
    with pytest.raises(ValueError, match=r"\w"):
        parse_buddyinfo(data)


def test_watermarks_in_bytes_of_any_page():
    marks = parse_zoneinfo(ZONEINFO, 65536)
    page = 65536
    # of a set of pages per CPU there is a "high" too: not that one
    assert marks[0, "DMA"] == Watermarks(22 * page, 27 * page, 32 * page, 11211 * page, 3840 * page)
    assert marks[0, "Normal"].protection == 0
    assert (0, "Movable") not in marks  # without memory


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"pages free 3\n",
        b"Node 0\n  pages free 3\n",
        ZONEINFO.replace(b"        low      15411\n", b""),
        ZONEINFO.replace(b"low      15411", b"low      99999"),
        ZONEINFO.replace(b"low      15411", b"low      -1"),
        ZONEINFO.replace(b"(0, 0, 0, 0, 0)", b"(0, x)"),
    ],
)
def test_what_is_no_zoneinfo(data):
    with pytest.raises(ValueError, match=r"\w"):
        parse_zoneinfo(data, 4096)


def test_the_counters_that_matter():
    found = parse_vmstat(VMSTAT)
    assert found == {
        "allocstall": 14,
        "pgscan_direct": 18,
        "compact_stall": 42,
        "compact_fail": 17,
        "compact_success": 25,
        "oom_kill": 0,
    }
    assert parse_vmstat(b"nr_free_pages 1\nallocstall 7\n") == {"allocstall": 7}
    for data in (b"", b"compact_stall", b"compact_stall -1", b"oom_kill x"):
        with pytest.raises(ValueError, match=r"\w"):
            parse_vmstat(data)


def test_a_sound_machine(tmp_path):
    zones = tree(tmp_path).read(3.0)
    assert (zones.taken_s, zones.page_bytes, zones.problem, zones.anomalies) == (3.0, 4096, "", ())
    assert [zone.marks is not None for zone in zones.zones] == [True, True, False]
    assert zones.counters is not None
    assert zones.counters["compact_stall"] == 42


def test_it_keeps_a_slow_pace(tmp_path):
    probe = tree(tmp_path)
    first = probe.read(3.0)
    (tmp_path / "proc/vmstat").write_bytes(VMSTAT.replace(b"42", b"43"))
    assert probe.read(4.9) is first
    later = probe.read(5.0)
    assert later.counters is not None
    assert later.counters["compact_stall"] == 43
    assert probe.read(4.0).taken_s == 4.0  # a clock that went back


def test_each_file_may_fail_alone(tmp_path):
    broken = tree(tmp_path, buddyinfo=b"garbage").read(0)
    assert (broken.zones, len(broken.anomalies)) == ((), 1)
    assert "buddyinfo" in broken.problem
    unmarked = tree(tmp_path, zoneinfo=b"garbage").read(0)
    assert [zone.marks for zone in unmarked.zones] == [None] * 3
    assert (unmarked.problem, len(unmarked.anomalies)) == ("", 1)
    uncounted = tree(tmp_path, vmstat=b"garbage").read(0)
    assert (uncounted.counters, len(uncounted.zones), len(uncounted.anomalies)) == (None, 3, 1)


def test_more_free_than_there_is_is_not_believed(tmp_path):
    absurd = tree(tmp_path, buddyinfo=BUDDYINFO.replace(b"840", b"8400")).read(0)
    assert absurd.zones == ()
    assert "more free than there is" in absurd.problem
    assert absurd.anomalies == (absurd.problem,)


@pytest.mark.timeout(5)
def test_what_is_missing_is_no_anomaly_and_a_fifo_blocks_nobody(tmp_path):
    probe = tree(tmp_path)
    for name in ("buddyinfo", "zoneinfo", "vmstat"):
        (tmp_path / "proc" / name).unlink()
    none = probe.read(0)
    assert (none.zones, none.counters, none.anomalies) == ((), {}, ())
    assert "buddyinfo" in none.problem
    os.mkfifo(tmp_path / "proc/vmstat")
    assert probe.read(9).counters is None


def test_the_real_machine_is_read_whole_through_kept_descriptors():
    probe = ZoneProbe()
    first, second = probe.read(0.0), probe.read(2.0)
    probe.close()
    for zones in (first, second):
        assert (zones.problem, zones.anomalies) == ("", ())
        assert zones.zones
        assert all(zone.marks is not None for zone in zones.zones if any(zone.free_blocks))
        # one of the last lines of a file that the kernel hands out a page at a time
        assert zones.counters is not None
        assert "oom_kill" in zones.counters


def test_a_file_of_many_parts_is_read_to_its_end(tmp_path):
    path = tmp_path / "long"
    path.write_bytes(b"x" * 200_000)  # more than one read takes
    whole = KernelFile(str(path), keep=True, parts=True)
    assert len(whole.read()) == len(whole.read()) == 200_000
    whole.close()


def test_a_snapshot_carries_them(machine, probing):
    root = machine("strix-halo-128g")
    tree(root)
    snapshot = probing(root).sample([], 1.0)
    assert snapshot.zones is not None
    assert len(snapshot.zones.zones) == 3
    (root / "proc/buddyinfo").write_bytes(b"garbage")
    assert any("buddyinfo" in text for text in probing(root).sample([], 9.0).anomalies)
    with closing(MachineProbe()) as probe:
        assert probe.sample([], 0.0).zones is not None


def test_a_request_for_compaction_is_a_file_that_was_written(tmp_path):
    assert ask_for_compaction(tmp_path) == ""
    path = tmp_path / REQUEST
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.stat().st_mtime_ns
    os.utime(path, ns=(before - 10**9, before - 10**9))
    assert ask_for_compaction(tmp_path) == ""  # again
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    assert "compact" in ask_for_compaction(tmp_path)
    assert not (tmp_path / "elsewhere").exists()
    assert "cannot write" in ask_for_compaction(tmp_path / "none")
