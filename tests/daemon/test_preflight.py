"""The daemon's own preflight: what it refuses, what it forgives by name, conservative mode."""

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.running import ROOT, Daemon, Raw
from tests.data.machine_tree import lay_out
from umad.client.memory import process_bytes
from umad.units import GIB, MIB

CONFIG = '[daemon]\nsocket = "{folder}/umad.sock"\n[memory]\n{memory}\n'


@pytest.fixture
def tree(folder: Path) -> Path:
    """A Strix Halo that is set up, but for what a test changes."""
    root = lay_out("strix-halo-128g", folder / "machine")
    write(root, "proc/sys/vm/swappiness", "1\n")
    write(root, "proc/sys/vm/vfs_cache_pressure", "50\n")
    return root


def write(root: Path, place: str, text: str) -> None:
    path = root / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def meminfo(root: Path, total: int, available: int) -> None:
    lines = (
        f"{name}: {size >> 10} kB\n"
        for name, size in [
            ("MemTotal", total),
            ("MemFree", available // 2),
            ("MemAvailable", available),
        ]
    )
    write(root, "proc/meminfo", "".join(lines))


def daemon_on(folder: Path, root: Path, *flags: str, memory: str = "") -> Daemon:
    """A daemon with these flags and no others."""
    made = Daemon(folder, text=CONFIG.format(folder=folder, memory=memory))
    made.flags = ["--log-format=json", f"--root={root}", *flags]
    return made


@contextmanager
def ending(daemon: Daemon) -> Iterator[None]:
    try:
        yield
    finally:
        assert daemon.stop() == 0


def ended(daemon: Daemon, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        daemon.command(),
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=30,
    )


def pool(state: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (one for one in state["pools"] if one["name"] == name)
    return dict(found)


@pytest.mark.slow
def test_gtt_room_that_memory_does_not_have(folder: Path, tree: Path) -> None:
    """C04 (a): 89 GiB of the cap unused, 13 GiB of memory: 9 GiB can be had, not 89."""
    device = "sys/class/drm/card1/device"
    write(tree, f"{device}/mem_info_gtt_total", f"{90 * GIB}\n")
    write(tree, f"{device}/mem_info_gtt_used", f"{GIB}\n")
    write(tree, "sys/module/ttm/parameters/pages_limit", f"{90 * GIB // 4096}\n")
    (tree / "sys/kernel/debug/kfd/mem_limit").unlink()
    meminfo(tree, 125 * GIB, 13 * GIB)
    daemon = daemon_on(folder, tree, memory='reserve = "4GiB"').start()
    with ending(daemon):
        state = daemon.status()
        assert pool(state, "gtt")["free"] == 9 * GIB
        assert pool(state, "system")["free"] == 9 * GIB


@pytest.mark.slow
@pytest.mark.parametrize("permissive", [[], ["--permissive"]])
def test_a_containers_meminfo_is_refused(folder: Path, tree: Path, permissive: list[str]) -> None:
    """C04 (b): 12 GiB of memory beside 64 GiB of GTT: an error, a code, and never READY."""
    write(tree, "sys/class/drm/card1/device/mem_info_gtt_total", f"{64 * GIB}\n")
    write(tree, "run/systemd/container", "lxc\n")
    meminfo(tree, 12 * GIB, 8 * GIB)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(folder / "notify"))
        systemd.setblocking(False)
        done = ended(daemon_on(folder, tree, *permissive), NOTIFY_SOCKET=str(folder / "notify"))
        with pytest.raises(BlockingIOError):
            systemd.recv(100)
    assert done.returncode == 69
    text = " ".join(done.stderr.split())
    assert "12.0 GiB inside a container (lxc)" in text
    assert "64.0 GiB of system memory (gtt_total): they describe different machines" in text
    assert "Two ways out" in text
    assert "conservative = true" in text
    assert "--permissive=" not in text  # no way out of this


@pytest.mark.slow
def test_conservative_mode_promises_half(folder: Path, tree: Path) -> None:
    write(tree, "sys/class/drm/card1/device/mem_info_gtt_total", f"{64 * GIB}\n")
    write(tree, "run/systemd/container", "lxc\n")
    meminfo(tree, 12 * GIB, 11 * GIB)
    daemon = daemon_on(folder, tree, memory='reserve = "1GiB"\nconservative = true').start()
    with ending(daemon):
        state = daemon.status()
        assert state["daemon"]["conservative"] is True
        assert pool(state, "system")["capacity"] == 12 * GIB
        assert pool(state, "system")["budget"] == 5 * GIB  # half of it, less the reserve
        assert pool(state, "gtt")["budget"] == 6 * GIB  # no GTT beyond the memory shown, halved
        with Raw(daemon.socket) as peer:
            worker = peer.call("register", model="llama", quota=64 * MIB)["worker"]
            assert peer.call("reserve", worker=worker)["prefault"] is True


@pytest.mark.slow
def test_permissive_forgives_by_name(folder: Path, tree: Path) -> None:
    write(tree, "proc/sys/vm/swappiness", "60\n")
    write(tree, "proc/sys/vm/vfs_cache_pressure", "100\n")
    refused = ended(daemon_on(folder, tree, "--permissive=vm.swappiness"))
    assert refused.returncode == 69
    assert "vm.vfs_cache_pressure: 100; should be at most 50" in refused.stderr
    assert "sysctl -w vm.swappiness" not in refused.stderr
    assert "or start with --permissive=vm.vfs_cache_pressure" in refused.stderr
    names = ["vm.swappiness", "vm.vfs_cache_pressure"]
    daemon = daemon_on(folder, tree, f"--permissive={','.join(names)}").start()
    with ending(daemon):
        said = daemon.status()["daemon"]
        assert said["permissive"] == names
        assert said["warnings"] == [
            "vm.swappiness: 60; should be 1",
            "vm.vfs_cache_pressure: 100; should be at most 50",
        ]
        assert any(text.startswith("gpu.holders: VLLM::Worker_0") for text in said["advice"])
        assert said["conservative"] is False
        daemon.wait_for("preflight", finding=said["warnings"][0], level="warning")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vm.swapiness", "memory.virtual", "up", ""])
def test_a_name_that_cannot_be_forgiven_is_wrong_usage(folder: Path, name: str) -> None:
    done = ended(daemon_on(folder, Path("/"), f"--permissive={name}"))
    assert done.returncode == 2
    assert "vm.swappiness, vm.vfs_cache_pressure" in done.stderr


@pytest.mark.slow
def test_the_preflight_alone(folder: Path, tree: Path) -> None:
    good = ended(daemon_on(folder, tree, "--preflight"))
    assert (good.returncode, good.stderr) == (0, "")
    assert "[advice] gpu.holders: VLLM::Worker_0 (pid 4211) holds 58.0 GiB" in good.stdout
    assert "systemctl stop vllm@0.service" in good.stdout
    assert not (folder / "umad.sock").exists()
    write(tree, "proc/sys/vm/swappiness", "60\n")
    bad = ended(daemon_on(folder, tree, "--preflight"))
    assert (bad.returncode, bad.stdout) == (69, "")
    assert "now       sysctl -w vm.swappiness=1" in bad.stderr
    forgiven = ended(daemon_on(folder, tree, "--preflight", "--permissive"))
    assert forgiven.returncode == 0
    assert "[hard] vm.swappiness: 60; should be 1" in forgiven.stdout


class Model:
    """What a load returns; it holds nothing."""


@pytest.mark.slow
def test_a_load_in_conservative_mode_touches_what_was_promised(folder: Path) -> None:
    """At the quota's full size, under a watch every 10 ms, and nobody is stopped for it."""
    memory = 'conservative = true\nreserve = "64MiB"\ninterval = "10ms"'
    daemon = daemon_on(folder, Path("/"), "--permissive", memory=memory).start()
    with ending(daemon), daemon.client() as one:
        worker = one.worker("llama", quota="256MiB")
        before = process_bytes()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        model = worker.load(Model)
        status = Path("/proc/self/status").read_text()
        peak = int(status.split("VmHWM:")[1].split()[0]) << 10
        rss = int(status.split("VmRSS:")[1].split()[0]) << 10
        assert peak - rss >= 256 * MIB - 16 * MIB - 8 * MIB
        assert process_bytes() - before < 8 * MIB
        state = daemon.status()
        assert state["workers"][0]["state"] == "ready"
        assert not worker.revoked.is_set()
        del model
