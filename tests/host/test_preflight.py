"""The preflight: every rule with its figures, on recorded machines and on made-up ones."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.data.machine_tree import lay_out
from umad.host import preflight
from umad.host.preflight import Finding
from umad.host.preflight.finding import Fact, Keep, describe, remedy
from umad.host.preflight.gpu import GpuFacts, judge_gpu, pages_limit_advised
from umad.host.preflight.kernel import KernelFacts, judge_kernel, judge_sysctl
from umad.host.preflight.serve import (
    Fence,
    ServeFacts,
    Source,
    judge_serve,
    parse_limits,
    parse_unit,
)
from umad.settings import MemorySettings
from umad.units import GIB, MIB

STRIX = "strix-halo-128g"
GTTSIZE = "strix-halo-128g-k617-gttsize"
KNOWN = ("vm.", "kernel.", "memory.", "gpu.", "serve.")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A recorded machine whose kernel settings are as they should be."""
    return set_up(lay_out(STRIX, tmp_path / STRIX))


def set_up(root: Path) -> Path:
    for name, value in (("swappiness", "1"), ("vfs_cache_pressure", "50")):
        write(root, f"proc/sys/vm/{name}", f"{value}\n")
    write(root, "sys/fs/cgroup/cgroup.controllers", "cpu memory\n")
    return root


def write(root: Path, place: str, text: str) -> None:
    path = root / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def judged(root: Path, **settings: object) -> list[Finding]:
    found = preflight.judge(preflight.read(str(root)), replace(MemorySettings(), **settings))
    for finding in found:
        assert_whole(finding)
    return found


def assert_whole(finding: Finding) -> None:
    """What holds for every finding of every rule."""
    assert finding.name.startswith(KNOWN)
    assert finding.found
    assert "\n" not in finding.summary
    for line in [*describe(finding).splitlines(), *remedy(finding, " " * 10)]:
        assert len(line) <= 80 or ">>" in line or "'" in line or line.split()[0] == "now", line
    if finding.severity == "ok":
        assert finding == Finding(finding.name, "ok", finding.found)
        return
    assert finding.should
    assert finding.why
    if finding.severity == "hard":
        assert (finding.name in preflight.PERMISSIBLE) == finding.permissible


def by_name(found: list[Finding], name: str) -> Finding:
    (finding,) = [one for one in found if one.name == name]
    return finding


def not_ok(found: list[Finding]) -> dict[str, str]:
    return {one.name: one.severity for one in found if one.severity != "ok"}


# ------------------------------------------------------------------ kernel

GOOD = KernelFacts(
    swappiness=Fact("", "1"),
    vfs_cache_pressure=Fact("", "50"),
    overcommit_memory=Fact("", "0"),
    huge_pages=Fact("", "always [madvise] never"),
    release=Fact("", "6.1.0-28-amd64"),
    pressure=Fact("", "some avg10=0.00"),
    page_bytes=16384,
)


def test_a_kernel_as_it_should_be():
    found = list(judge_kernel(GOOD))
    assert not_ok(found) == {}
    assert by_name(found, "kernel.page_size").found == "16 KiB"


@pytest.mark.parametrize(
    ("name", "text", "severity", "fix"),
    [
        ("swappiness", "60", "hard", "1"),
        ("swappiness", "0", "hard", "1"),
        ("swappiness", "-1", "hard", "1"),
        ("swappiness", "", "hard", "1"),
        ("swappiness", "lots", "hard", "1"),
        ("swappiness", None, "hard", "1"),
        ("swappiness", "1", "ok", ""),
        ("vfs_cache_pressure", "100", "hard", "50"),
        ("vfs_cache_pressure", "51", "hard", "50"),
        ("vfs_cache_pressure", "-3", "hard", "50"),
        ("vfs_cache_pressure", None, "hard", "50"),
        ("vfs_cache_pressure", "50", "ok", ""),
        ("vfs_cache_pressure", "10", "ok", ""),
        ("overcommit_memory", "2", "advice", "0"),
        ("overcommit_memory", "1", "ok", ""),
    ],
)
def test_a_setting(name, text, severity, fix):
    finding = judge_sysctl(name, Fact("", text))
    assert_whole(finding)
    assert (finding.name, finding.severity) == (f"vm.{name}", severity)
    if severity != "ok":
        known = text is not None and text.lstrip("-").isdigit()
        assert finding.found == (text if known else "unreadable")
        assert finding.fix_now == f"sysctl -w vm.{name}={fix}"
        assert finding.keep == Keep("/etc/sysctl.d/99-umad.conf", f"vm.{name} = {fix}")


@pytest.mark.parametrize(
    ("change", "name", "severity"),
    [
        ({"huge_pages": Fact("", "[always] madvise never")}, "kernel.huge_pages", "advice"),
        ({"huge_pages": Fact("", None, "why not")}, "kernel.huge_pages", "advice"),
        ({"release": Fact("", "5.10.0-8")}, "kernel.version", "advice"),
        ({"release": Fact("", "5.2.21")}, "kernel.version", "hard"),
        ({"release": Fact("", None, "why not")}, "kernel.version", "hard"),
        ({"pidfd": False}, "kernel.version", "hard"),
        ({"mrelease": False}, "kernel.version", "advice"),
        ({"pressure": Fact("", None)}, "kernel.pressure", "advice"),
    ],
)
def test_a_kernel_that_lacks_something(change, name, severity):
    found = list(judge_kernel(replace(GOOD, **change)))
    for finding in found:
        assert_whole(finding)
    assert not_ok(found) == {name: severity}


def test_what_was_tried_counts_more_than_the_version():
    old = replace(GOOD, release=Fact("", "4.18.0-el8"), pidfd=True, mrelease=True)
    assert not_ok(list(judge_kernel(old))) == {}


# ------------------------------------------------------------------ memory


@pytest.mark.parametrize(
    ("mem", "gtt", "container", "mounted", "virtual"),
    [
        (125, 112, None, False, False),
        (125, 112, "docker", False, False),
        (12, 64, "lxc", False, True),
        (12, 64, None, False, True),
        (60, 64, "lxc", False, True),
        (60, 64, None, False, False),
        (12, None, "lxc", False, False),
        (12, None, "lxc", True, True),
    ],
)
def test_memory_that_is_not_the_machines_own(tree, mem, gtt, container, mounted, virtual):
    write(tree, "proc/meminfo", f"MemTotal: {mem << 20} kB\nMemFree: 1 kB\nMemAvailable: 1 kB\n")
    if gtt is None:
        shutil.rmtree(tree / "sys/class/drm")
    else:
        write(tree, "sys/class/drm/card1/device/mem_info_gtt_total", f"{gtt * GIB}\n")
    if container:
        write(tree, "run/systemd/container", f"{container}\n")
    if mounted:
        write(tree, "proc/self/mounts", "lxcfs /proc/meminfo fuse.lxcfs rw 0 0\n")
    found = by_name(judged(tree), "memory.virtual")
    assert found.severity == ("hard" if virtual else "ok")
    assert found.permissible == (not virtual)
    if virtual and not mounted:
        assert f"/proc/meminfo shows {mem}.0 GiB" in found.found
        assert f"{gtt}.0 GiB of system memory (gtt_total)" in found.found
    if virtual:
        assert container is None or f"inside a container ({container})" in found.found
        assert "conservative mode" in found.should
        on = by_name(judged(tree, conservative=True), "memory.virtual")
        assert (on.severity, on.found) == (
            "ok",
            f"conservative mode: half of {mem}.0 GiB may be booked",
        )


def test_a_gpu_that_windows_owns(tree):
    write(tree, "dev/dxg", "")
    found = by_name(judged(tree), "memory.virtual")
    assert (found.severity, found.permissible) == ("hard", False)
    assert "/dev/dxg" in found.found


def test_the_way_into_conservative_mode_is_the_line_that_we_ship(tree, tmp_path):
    write(tree, "dev/dxg", "")
    config = tmp_path / "umad.toml"
    shutil.copy(Path(__file__).parents[2] / "etc/umad.toml", config)
    into = by_name(judged(tree), "memory.virtual").fix_now
    (tree / "dev/dxg").unlink()
    back = by_name(judged(tree, conservative=True), "memory.virtual")
    assert back.severity == "advice"
    before = config.read_text()
    for command, line in ((into, "\nconservative = true\n"), (back.fix_now, "\n#conservative = f")):
        assert os.system(command.replace("/etc/umad/umad.toml", str(config))) == 0
        assert line in config.read_text()
    assert config.read_text() == before


def test_a_container_that_shows_the_machine_is_advice(tree):
    write(tree, "run/.containerenv", "")
    found = judged(tree)
    assert by_name(found, "memory.container").found == "inside a container (podman)"
    assert by_name(found, "memory.container").severity == "advice"


def test_memory_that_cannot_be_read(tree):
    write(tree, "proc/meminfo", "MemTotal: many kB\n")
    found = by_name(judged(tree), "memory.readable")
    assert (found.severity, found.permissible) == ("hard", False)
    assert str(tree / "proc/meminfo") in found.why


# --------------------------------------------------------------------- GPU


def test_a_strix_halo_that_is_set_up(tree):
    found = judged(tree)
    assert not_ok(found) == {"gpu.holders": "advice"}
    said = {one.name: one.found for one in found if one.severity == "ok"}
    assert said["gpu.device"] == "0000:c5:00.0, amd-apu"
    assert said["gpu.carve_out"] == "512.0 MiB; models live in system memory (GTT)"
    assert said["gpu.limits"] == "GTT and TTM agree, 112.0 GiB"
    assert said["gpu.pages_limit"] == "112.0 GiB of 124.9 GiB"
    assert said["memory.swap"] == "8.0 GiB, never counted as free"


def test_who_else_holds_gpu_memory(tree):
    holders = [one for one in judged(tree) if one.name == "gpu.holders"]
    assert [(one.found, one.fix_now) for one in holders] == [
        ("VLLM::Worker_0 (pid 4211) holds 58.0 GiB", "systemctl stop vllm@0.service"),
        ("VLLM::Worker_1 (pid 4212) holds 24.0 GiB", "systemctl stop vllm@1.service"),
    ]
    ours = preflight.read(str(tree), ours=[4211, 4212])
    (nobody,) = [
        one for one in preflight.judge(ours, MemorySettings()) if one.name == "gpu.holders"
    ]
    assert nobody.severity == "ok"


@pytest.mark.parametrize(
    ("machine", "kind", "holders"),
    [
        (
            "gb10",
            "nvidia-uma",
            ["VLLM::EngineCor (pid 114687) holds 60.0 GiB", "python3 (pid 114990) holds 18.7 GiB"],
        ),
        ("discrete-nvidia", "nvidia-dgpu", ["python3 (pid 6001) holds 9.0 GiB"]),
        ("jetson-orin-8g", "jetson", ["llama-server (pid 7979) holds 3.0 GiB"]),
        ("intel-igpu-xe", "intel-igpu", ["ollama (pid 3100) holds 1.4 GiB"]),
    ],
)
def test_who_holds_memory_of_other_makers_gpus(tmp_path, machine, kind, holders):
    found = judged(set_up(lay_out(machine, tmp_path / machine)))
    assert by_name(found, "gpu.device").found.endswith(f", {kind}")
    assert [one.found for one in found if one.name == "gpu.holders"] == holders
    assert not {"gpu.limits", "gpu.carve_out", "serve.sdma"} & {one.name for one in found}


def test_limits_that_contradict_each_other(tmp_path):
    root = set_up(lay_out(GTTSIZE, tmp_path / "machine"))
    write(root, "sys/module/amdgpu/parameters/gttsize", "122880\n")
    found = judged(root)
    limits = by_name(found, "gpu.limits")
    assert limits.severity == "hard"
    assert limits.found == "GTT (gttsize) allows 120.0 GiB, TTM (pages_limit) 62.5 GiB"
    assert "no more than 62.5 GiB can be had" in limits.why
    assert limits.keep == Keep("/etc/modprobe.d/umad.conf", "options amdgpu gttsize=-1")
    assert limits.fix_now == "update-initramfs -u && reboot"
    half = by_name(found, "gpu.pages_limit")
    assert (half.severity, half.should) == ("advice", "104.0 GiB")
    assert half.keep is not None
    assert half.keep.line == "options ttm pages_limit=27262976"
    # What the commands bring about after the reboot:
    write(root, "sys/module/amdgpu/parameters/gttsize", "-1\n")
    write(root, "sys/module/ttm/parameters/pages_limit", "27262976\n")
    write(root, "sys/class/drm/card1/device/mem_info_gtt_total", f"{104 * GIB}\n")
    limit = root / "sys/kernel/debug/kfd/mem_limit"
    limit.write_text(limit.read_text().replace("63959M", f"{104 * 1024}M"))
    write(root, "usr/bin/dracut", "")
    assert not_ok(judged(root)) == {"gpu.holders": "advice"}


def test_a_limit_that_was_moved_after_the_driver_had_loaded(tree):
    write(tree, "sys/module/ttm/parameters/pages_limit", "31457280\n")
    write(tree, "usr/bin/dracut", "")
    found = judged(tree)
    frozen = by_name(found, "gpu.frozen")
    assert frozen.severity == "hard"
    assert frozen.found == "KFD goes by 112.0 GiB, pages_limit shows 120.0 GiB"
    assert frozen.fix_now == "dracut --force && reboot"
    # Nobody chose the GTT's size: an older driver's default that differs is only told.
    assert by_name(found, "gpu.limits").severity == "advice"


@pytest.mark.parametrize(
    ("vram", "gtt", "bank", "says"),
    [
        (96 * GIB, 15 * GIB + GIB // 2, 96 * GIB, "whole budget is 96.0 GiB, and GTT is not added"),
        (16 * GIB, 16 * GIB, 16 * GIB, "whole budget is 16.0 GiB"),
        (8 * GIB, 56 * GIB, 56 * GIB, "the carve-out is lost to everybody"),
    ],
)
def test_a_carve_out_that_binds(tree, vram, gtt, bank, says):
    write(tree, "sys/class/drm/card1/device/mem_info_vram_total", f"{vram}\n")
    write(tree, "sys/class/drm/card1/device/mem_info_gtt_total", f"{gtt}\n")
    place = "sys/class/kfd/kfd/topology/nodes/1/mem_banks/0/properties"
    write(tree, place, f"heap_type 1\nsize_in_bytes {bank}\n")
    carve_out = by_name(judged(tree), "gpu.carve_out")
    assert carve_out.severity == "advice"
    assert says in carve_out.why
    assert carve_out.fix_now == "systemctl reboot --firmware-setup"


def test_a_discrete_card_has_no_carve_out(tmp_path):
    found = judged(set_up(lay_out("discrete-amd", tmp_path / "machine")))
    assert by_name(found, "gpu.device").found == "0000:03:00.0, amd-dgpu"
    names = {one.name for one in found}
    assert not names & {"gpu.carve_out", "gpu.pages_limit"}
    assert by_name(found, "gpu.holders").found == "python3 train (pid 5150) holds 17.1 GiB"


def test_no_gpu_and_none_wanted(tree):
    found = preflight.judge(preflight.read(str(tree), "none"), MemorySettings())
    assert by_name(found, "gpu.device").severity == "ok"
    assert not {"serve.sdma", "serve.memlock"} & {one.name for one in found}


def gpu_facts(root: Path) -> GpuFacts:
    facts = preflight.read(str(root)).gpu
    assert facts is not None
    return facts


@pytest.mark.parametrize(
    ("fact", "mounted", "lockdown", "says", "fix"),
    [
        (Fact("", None), False, "", "not mounted", "mount -t debugfs debugfs /sys/kernel/debug"),
        (Fact("", None), True, "", "kfd/mem_limit is not there", ""),
        (Fact("", None, "denied"), True, "", "not readable as this user", "sudo umadctl doctor"),
        (
            Fact("", None, "denied"),
            True,
            "none integrity [confidentiality]",
            "closed by the kernel's lockdown",
            "",
        ),
        (Fact("", "garbage"), True, "", "kfd/mem_limit is not understood", ""),
    ],
)
def test_why_debugfs_says_nothing(tree, fact, mounted, lockdown, says, fix):
    facts = replace(
        gpu_facts(tree),
        mem_limit=fact,
        limits=None,
        debugfs_mounted=mounted,
        lockdown=Fact("", lockdown),
    )
    debugfs = by_name(list(judge_gpu(facts, 125 * GIB)), "gpu.debugfs")
    assert_whole(debugfs)
    assert (debugfs.severity, debugfs.found, debugfs.fix_now) == ("advice", says, fix)


def test_a_missing_limit_is_told_and_not_taken_for_none(tree):
    (tree / "sys/module/ttm/parameters/pages_limit").unlink()
    limits = by_name(judged(tree), "gpu.limits")
    assert (limits.severity, limits.found) == ("advice", "not there")


def test_the_limit_that_is_advised():
    assert pages_limit_advised(134131761152) == 27262976
    assert pages_limit_advised(64 * GIB) == 53 * GIB // 4096
    assert pages_limit_advised(64 * GIB, 65536) == 53 * GIB // 65536


# -------------------------------------------------------------- umad-serve


def engine(root: Path, environ: str = "HSA_ENABLE_SDMA=0", cgroup: str = "/system.slice/x") -> None:
    write(root, "proc/900/cmdline", "/usr/bin/python3\0-m\0umad.serve.engine\0--fd=3\0")
    write(root, "proc/900/environ", environ.replace(" ", "\0") + "\0")
    write(root, "proc/900/cgroup", f"0::{cgroup}\n")
    limits = "Max locked memory         unlimited            unlimited            bytes\n"
    write(root, "proc/900/limits", "Limit  Soft Limit  Hard Limit  Units\n" + limits)


def test_an_engine_as_it_should_be(tree):
    engine(tree, "HSA_ENABLE_SDMA=0 HSA_XNACK=0 PATH=/bin")
    found = judged(tree)
    assert not_ok(found) == {"gpu.holders": "advice"}
    assert by_name(found, "serve.sdma").found == "HSA_ENABLE_SDMA=0 in the engine (pid 900)"
    assert by_name(found, "serve.memlock").found == "unlimited in the engine (pid 900)"
    assert by_name(found, "serve.cgroup").found == "no limit around /system.slice/x"


def test_an_engine_whose_pages_may_move(tree):
    engine(tree, "HSA_ENABLE_SDMA=1 HSA_XNACK=1")
    found = judged(tree)
    assert not_ok(found) == {
        "gpu.holders": "advice",
        "serve.sdma": "hard",
        "serve.xnack": "hard",
    }
    sdma = by_name(found, "serve.sdma")
    assert sdma.fix_now == "systemctl daemon-reload; systemctl restart umad-serve.service"
    assert sdma.keep is not None
    assert sdma.keep.command == (
        "mkdir -p /etc/systemd/system/umad-serve.service.d\n"
        "printf '%s\\n' '[Service]' 'Environment=HSA_ENABLE_SDMA=0' \\\n"
        "  >> /etc/systemd/system/umad-serve.service.d/umad.conf"
    )


def test_an_engine_whose_environment_is_hidden(tree):
    engine(tree)
    (tree / "proc/900/environ").unlink()
    (tree / "proc/900/environ").mkdir()
    found = judged(tree)
    assert by_name(found, "serve.environment").severity == "advice"
    assert "serve.sdma" not in {one.name for one in found}


def test_the_unit_is_judged_while_no_engine_runs(tree):
    shipped = (Path(__file__).parents[2] / "systemd/umad-serve.service").read_text()
    write(tree, "usr/lib/systemd/system/umad-serve.service", shipped)
    assert not_ok(judged(tree)) == {"gpu.holders": "advice"}
    drop_ins = "etc/systemd/system/umad-serve.service.d"
    write(tree, f"{drop_ins}/90-a.conf", "[Service]\nEnvironment=HSA_ENABLE_SDMA=1\n")
    sdma = by_name(judged(tree), "serve.sdma")
    assert (sdma.severity, sdma.found) == ("hard", "HSA_ENABLE_SDMA=1 in umad-serve.service")
    assert sdma.fix_now == "systemctl daemon-reload"
    write(tree, f"{drop_ins}/umad.conf", "[Service]\nEnvironment=HSA_ENABLE_SDMA=0\n")
    assert by_name(judged(tree), "serve.sdma").severity == "ok"
    assert by_name(judged(tree), "serve.cgroup").found == "no limit around /system.slice"


def test_reading_a_unit():
    unit = parse_unit(
        "[Service]\nEnvironment=HSA_XNACK=1 \\\n  'HSA_ENABLE_SDMA=0' OTHER=x\n"
        "Environment='unbalanced\nLimitMEMLOCK=8M\nLimitAS=infinity\nLimitMEMLOCK=16G:infinity\n"
    )
    assert unit.environment == {"HSA_XNACK": "1", "HSA_ENABLE_SDMA": "0"}
    assert unit.limits == {"locked memory": 16 * GIB, "address space": None}
    assert parse_unit("Environment=HSA_XNACK=1\nEnvironment=\n").environment == {}
    assert parse_unit("LimitAS=4096\n").limits == {"address space": 4096}


def test_reading_limits():
    assert parse_limits(
        "Max locked memory         8388608              8388608              bytes\n"
        "Max address space         unlimited            unlimited            bytes\n"
    ) == {"locked memory": 8388608, "address space": None}


SERVE = ServeFacts(frozenset(), False, Source("this environment", {}, {}), (), "/")


@pytest.mark.parametrize(
    ("limits", "amd_gpu", "expected"),
    [
        ({"address space": 8 * GIB}, False, {"serve.address_space": "advice"}),
        ({"locked memory": 8 * MIB}, True, {"serve.memlock": "advice"}),
        ({"locked memory": 8 * MIB}, False, {}),
        ({"locked memory": 100 * GIB, "address space": None}, True, {}),
    ],
)
def test_limits_of_the_process(limits, amd_gpu, expected):
    facts = replace(SERVE, source=Source("this environment", {}, limits))
    found = list(judge_serve(facts, 100 * GIB, amd_gpu=amd_gpu))
    for finding in found:
        assert_whole(finding)
    assert not_ok(found) == expected


def test_a_variable_of_the_shell_is_unset_there():
    facts = replace(SERVE, source=Source("this environment", {"HSA_XNACK": "1"}, {}))
    xnack = by_name(list(judge_serve(facts, None, amd_gpu=True)), "serve.xnack")
    assert (xnack.fix_now, xnack.keep) == ("unset HSA_XNACK", None)


def test_fences_that_bite_before_the_budget(tree):
    engine(tree, cgroup="/system.slice/umad-serve.service")
    write(tree, "sys/fs/cgroup/system.slice/umad-serve.service/memory.max", f"{72 * GIB}\n")
    write(tree, "sys/fs/cgroup/system.slice/memory.high", f"{100 * GIB}\n")
    write(tree, "sys/fs/cgroup/system.slice/memory.max", "max\n")
    first, second = (one for one in judged(tree) if one.name == "serve.cgroup")
    assert first.severity == "hard"
    assert first.found == "memory.max of /system.slice/umad-serve.service is 72.0 GiB"
    assert first.should == "max, or at least the budget, 119.9 GiB"  # 124.9 GiB less 4 %
    assert "no cgroup sees GPU pages" in first.why
    assert first.fix_now == (
        "systemctl set-property --runtime umad-serve.service MemoryMax=infinity"
    )
    assert first.keep == Keep(
        "/etc/systemd/system/umad-serve.service.d/umad.conf", "MemoryMax=infinity", "Service"
    )
    assert (second.severity, second.keep) == (
        "advice",
        Keep("/etc/systemd/system/system.slice.d/umad.conf", "MemoryHigh=infinity", "Slice"),
    )
    fits = [one for one in judged(tree, budget=64 * GIB) if one.name == "serve.cgroup"]
    assert [(one.severity, one.found) for one in fits] == [
        ("ok", "72.0 GiB, above the budget around /system.slice/umad-serve.service")
    ]


def test_the_fence_of_a_container():
    fence = Fence("/", "memory.max", 8 * GIB)
    (found,) = judge_serve(replace(SERVE, fences=(fence,)), 20 * GIB, amd_gpu=False)
    assert_whole(found)
    assert (found.severity, found.keep) == ("hard", None)
    assert found.fix_now == "echo max > /sys/fs/cgroup/memory.max"
    assert "lower memory.budget" in found.why


def test_cgroups_that_are_not_there(tree):
    shutil.rmtree(tree / "sys/fs/cgroup")
    assert by_name(judged(tree), "serve.cgroup").severity == "advice"


# --------------------------------------------------------------- the whole


def test_what_permissive_forgives(tree):
    write(tree, "proc/sys/vm/swappiness", "60\n")
    write(tree, "proc/sys/vm/vfs_cache_pressure", "100\n")
    write(tree, "dev/dxg", "")
    found = judged(tree)
    assert preflight.forgiven(found, ()) == []
    assert [one.name for one in preflight.forgiven(found, ["vm.swappiness"])] == ["vm.swappiness"]
    everything = [one.name for one in preflight.forgiven(found, [preflight.ALL])]
    assert everything == ["vm.swappiness", "vm.vfs_cache_pressure"]  # and never memory.virtual
    assert [one.name for one in preflight.forgiven(found, ["memory.virtual"])] == []


def test_the_real_machine():
    found = judged(Path("/"))
    names = [one.name for one in found]
    assert {"vm.swappiness", "kernel.version", "memory.virtual", "gpu.device"} <= set(names)
    assert by_name(found, "kernel.version").severity == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["missing", "empty", "garbage", "negative", "huge", "fifo"])
def test_no_damaged_file_stops_it_or_makes_it_well(tmp_path, fault):
    """Each file in turn: never an exception, and a hard finding never goes away by damage."""
    root = lay_out(GTTSIZE, tmp_path / "machine")
    engine(root, "HSA_ENABLE_SDMA=1")
    write(root, "sys/module/amdgpu/parameters/gttsize", "122880\n")
    before = not_ok(judged(root))
    assert before["gpu.limits"] == "hard"
    deciding = ("gttsize", "pages_limit", "mem_info_gtt_total", "cmdline", "environ", "vendor")
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        content = path.read_bytes()
        path.unlink()
        if fault == "fifo":
            os.mkfifo(path)  # reads as empty
        elif fault != "missing":
            texts = {"empty": b"", "garbage": b"\xff\0 garbage\n", "negative": b"-7\n"}
            path.write_bytes(texts.get(fault, b"9" * 4000))
        after = not_ok(judged(root))
        if path.name not in (*deciding, "uevent"):
            assert {n for n, s in before.items() if s == "hard"} <= after.keys(), path
        path.unlink(missing_ok=True)
        path.write_bytes(content)
