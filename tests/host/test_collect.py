"""What a snapshot takes along: enough for a probe, and nothing of what is private."""

import os
from pathlib import Path

import pytest

from tests.data import machine_tree
from tests.host.gpu_trees import fdinfo
from umad.host import collect, procs
from umad.host.collect import readings
from umad.host.memory import MachineProbe
from umad.values import SYSTEM_POOL, PoolReading, ProcessReading

PRIVATE = ("environ", "cmdline", "maps", "smaps", "mounts", "mountinfo", "cwd", "exe", "stack")


def copied(root: Path, pids: set[int], target: Path) -> Path:
    for taken in readings(str(root), pids):
        path = target / taken.place
        path.parent.mkdir(parents=True, exist_ok=True)
        assert taken.data is not None, taken
        path.write_bytes(taken.data)
    return target


def probed(root: Path, pids: set[int]) -> tuple[dict[str, PoolReading], list[ProcessReading]]:
    identities = [procs.process_identity(pid, str(root)) for pid in sorted(pids)]
    probe = MachineProbe(str(root))
    look = probe.sample([one for one in identities if one is not None], 0.0)
    probe.close()
    return dict(look.pools), [look.processes[one] for one in identities if one is not None]


@pytest.mark.parametrize("name", machine_tree.NAMES)
def test_a_probe_finds_in_the_copy_what_it_finds_on_the_machine(name: str, tmp_path: Path) -> None:
    machine = machine_tree.lay_out(name, tmp_path / "machine")
    pids = {int(place.name) for place in (machine / "proc").glob("[0-9]*")}
    copy = copied(machine, pids, tmp_path / "copy")
    pools, processes = probed(machine, pids)
    copied_pools, copied_processes = probed(copy, pids)
    assert not [path for path in copy.rglob("*") if path.is_symlink()]
    if (machine / "nvml.txt").exists():  # NVML's word is in no file
        assert copied_pools[SYSTEM_POOL] == pools[SYSTEM_POOL]
    else:
        assert copied_pools == pools
        assert copied_processes == processes


def test_nothing_private_comes_along(tmp_path: Path) -> None:
    machine = machine_tree.lay_out("strix-halo-128g", tmp_path)
    process = machine / "proc/4211"
    for name in (*PRIVATE, "attr/current"):
        (process / name).parent.mkdir(exist_ok=True)
        (process / name).write_text("SECRET=hunter2")
    (process / "fd/77").symlink_to("/home/alice/letter.txt")
    (process / "fdinfo/77").write_text("SECRET=hunter2")
    (process / "fdinfo/6").write_bytes(
        fdinfo("drm-memory-gtt: 9 KiB") + b"drm-client-name:\thunter2\n"
    )
    mounts = machine / "proc/self/mounts"
    mounts.parent.mkdir()
    mounts.write_text(
        "//nas/hunter2 /home/alice nfs rw 0 0\nlxcfs /proc/meminfo fuse.lxcfs rw 0 0\n"
    )
    (machine / "sys/kernel/debug/hunter2").write_text("SECRET=hunter2")
    taken = {one.place: one.data for one in readings(str(machine), {4211})}
    assert not [place for place, data in taken.items() if b"hunter2" in (data or b"")]
    names = {place.rpartition("/")[2] for place in taken if "self" not in place}
    assert names.isdisjoint(PRIVATE)
    assert taken["proc/self/mounts"] == b"lxcfs /proc/meminfo fuse.lxcfs rw 0 0\n"
    assert b"drm-memory-gtt" in (taken["proc/4211/fdinfo/6"] or b"")
    assert taken["proc/4211/fd/6"] == b""
    assert "proc/4212/stat" not in taken, "nobody asked for it"


def test_what_cannot_be_read_is_named_and_what_is_missing_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = machine_tree.lay_out("cpu-only", tmp_path)
    (machine / "proc/zoneinfo").unlink()
    (machine / "proc/vmstat").unlink()
    (machine / "proc/vmstat").mkdir()

    def refuse(place: str) -> None:
        raise PermissionError(1, "no", place)

    (machine / "proc/1").mkdir(exist_ok=True)
    monkeypatch.setattr(os, "scandir", refuse)
    found = {one.place: one for one in readings(str(machine), {1})}
    assert "proc/zoneinfo" not in found
    assert found["proc/vmstat"].data is None
    assert "vmstat: Is a directory" in found["proc/vmstat"].problem
    assert "GPU memory cannot be told" in found["proc/1/fd"].problem


def test_there_is_an_end_to_what_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = machine_tree.lay_out("strix-halo-128g", tmp_path)
    for limit, value, files in (("FILES_MAX", 7, 7), ("TOTAL_BYTES_MAX", 1200, 1)):
        with monkeypatch.context() as patched:
            patched.setattr(collect, limit, value)
            *some, last = readings(str(machine), {4211, 4212})
        assert len(some) == files
        assert all(one.data is not None for one in some)
        assert "too much" in last.problem
