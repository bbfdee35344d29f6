"""Where a unit's cgroup lies and who is in it, on trees as v2 and the hybrid layout show them."""

from pathlib import Path

import pytest

from umad.host import cgroups

V2, HYBRID = "sys/fs/cgroup", "sys/fs/cgroup/unified"


def group(root: Path, mount: str, path: str, *pids: int) -> None:
    folder = root / mount / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))


@pytest.fixture(params=[V2, HYBRID])
def root(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    mount = request.param
    group(tmp_path, mount, "", 1)
    group(tmp_path, mount, "system.slice/llama.service", 7, 8)
    group(tmp_path, mount, "system.slice/system-vllm.slice/vllm@a.service")
    group(tmp_path, mount, "system.slice/system-vllm.slice/vllm@a.service/engine", 21)
    group(tmp_path, mount, "system.slice/system-vllm.slice/vllm@a.service/engine/gpu", 22)
    group(tmp_path, mount, "user.slice/user-1000.slice/user@1000.service/app.slice/mine.service", 9)
    if mount == HYBRID:
        (tmp_path / "sys/fs/cgroup/memory/system.slice/llama.service").mkdir(parents=True)
    return tmp_path


def test_a_unit_is_found_in_its_slice_and_a_users_own_is_not(root: Path) -> None:
    assert cgroups.find_unit("llama.service", str(root)) == "system.slice/llama.service"
    path = cgroups.find_unit("vllm@a.service", str(root))
    assert path == "system.slice/system-vllm.slice/vllm@a.service"
    assert cgroups.find_unit("mine.service", str(root)) == ""
    assert cgroups.find_unit("none.service", str(root)) == ""


def test_who_is_in_it_and_in_those_below(root: Path) -> None:
    assert cgroups.pids("system.slice/llama.service", str(root)) == {7, 8}
    path = "system.slice/system-vllm.slice/vllm@a.service"
    assert cgroups.pids(path, str(root)) == frozenset()
    assert cgroups.pids_below(path, str(root)) == {21, 22}
    assert cgroups.pids_below("system.slice/gone.service", str(root)) == frozenset()


def test_without_cgroups_of_the_second_version_nothing_is_found(tmp_path: Path) -> None:
    (tmp_path / "sys/fs/cgroup/memory/system.slice/llama.service").mkdir(parents=True)
    assert cgroups.find_unit("llama.service", str(tmp_path)) == ""
    assert cgroups.pids_below("system.slice/llama.service", str(tmp_path)) == frozenset()


def test_the_cgroup_of_a_process(tmp_path: Path) -> None:
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/cgroup").write_text("4:memory:/x\n0::/system.slice/llama.service\n")
    assert cgroups.of_process(7, str(tmp_path)) == "system.slice/llama.service"
    (tmp_path / "proc/7/cgroup").write_text("4:memory:/x\n")
    assert cgroups.of_process(7, str(tmp_path)) == ""
    assert cgroups.of_process(8, str(tmp_path)) == ""


def test_in_more_folders_than_are_looked_through_nobody_hides(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = "system.slice/llama.service"
    for pid, path in (
        (7, unit),
        (31, f"{unit}/deep/deeper"),  # not among the folders that were seen
        (32, f"{unit}-not"),
        (33, "user.slice/user@1.service/app.slice/mine.service"),
        (34, "top.service"),
    ):
        (root / f"proc/{pid}").mkdir(parents=True)
        (root / f"proc/{pid}/cgroup").write_text(f"4:memory:/x\n0::/{path}\n")
    (root / "proc/self").mkdir()
    mount = next(one for one in (HYBRID, V2) if (root / one / "cgroup.procs").exists())
    for number in range(cgroups._FOLDERS_MAX + 1):
        group(root, mount, f"{unit}/{number}")
    assert cgroups.pids_below(unit, str(root)) == {7, 31}
    monkeypatch.setattr(cgroups, "_FOLDERS_MAX", 1)
    assert cgroups.find_unit("llama.service", str(root)) == unit
    assert cgroups.find_unit("top.service", str(root)) == "top.service"
    assert cgroups.find_unit("mine.service", str(root)) == "", "a user's own"
    assert cgroups.find_unit("none.service", str(root)) == ""
