"""Birth, death and resurrection of the daemon: sockets (R3, R4), exit codes, books afterwards."""

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.daemon.running import ROOT, Daemon, Raw, eventually, running
from umad.client.memory import give_back
from umad.units import MIB

pytestmark = pytest.mark.slow


def test_after_kill_9_the_path_is_taken_again_at_once(daemon: Daemon) -> None:
    daemon.kill()
    assert daemon.socket.exists()
    before_s = time.monotonic()
    daemon.start()
    assert time.monotonic() - before_s < 5  # about 0.3 s of it is the interpreter
    with Raw(daemon.socket) as peer:
        assert peer.call("ping") == {}


def test_a_second_daemon_leaves_the_first_alone(daemon: Daemon) -> None:
    second = subprocess.run(daemon.command(), cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert second.returncode == 78
    assert "another umad" in second.stderr
    with Raw(daemon.socket) as peer:
        assert peer.call("ping") == {}


@pytest.mark.parametrize("kind", ["file", "link", "folder", "somebody's socket"])
def test_what_is_no_stale_socket_is_not_touched(folder: Path, kind: str) -> None:
    daemon = Daemon(folder)
    path = daemon.socket
    live = None
    if kind == "file":
        path.write_text("precious")
    elif kind == "link":
        path.symlink_to("/etc/passwd")
    elif kind == "folder":
        path.mkdir()
    else:
        live = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        live.bind(str(path))
        live.listen()
    before = path.lstat()
    done = subprocess.run(daemon.command(), cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == 78
    assert str(path) in done.stderr
    assert path.lstat().st_ino == before.st_ino
    if live is not None:
        live.close()


def test_of_twenty_that_start_together_one_wins(folder: Path) -> None:
    daemons = [Daemon(folder) for _ in range(20)]
    Path(folder / "umad.sock").unlink(missing_ok=True)
    for daemon in daemons:
        daemon.spawn()

    def winners() -> list[Daemon]:
        return [daemon for daemon in daemons if daemon.process and daemon.process.poll() is None]

    try:
        eventually(lambda: len(winners()) == 1, within_s=60)
        [winner] = winners()
        winner.wait_for("started")
        with Raw(winner.socket) as peer:
            assert peer.call("status")["daemon"]["pid"] == winner.pid
    finally:
        for daemon in daemons:
            daemon.stop()


def test_the_socket_is_never_open_to_others(folder: Path) -> None:
    """R4: stat in a tight loop from before the start, under the most careless umask."""
    seen: set[int] = set()
    ended = threading.Event()
    path = folder / "umad.sock"

    def watch() -> None:
        while not ended.is_set():
            try:
                seen.add(stat.S_IMODE(path.lstat().st_mode))
            except FileNotFoundError:
                continue

    watcher = threading.Thread(target=watch)
    before = os.umask(0)
    watcher.start()
    try:
        with running(folder) as daemon, Raw(daemon.socket) as peer:
            eventually(lambda: seen)
            assert peer.call("ping") == {}
    finally:
        os.umask(before)
        ended.set()
        watcher.join()
    assert seen == {0o660}


def test_the_kernel_says_who_is_there_not_the_peer(daemon: Daemon) -> None:
    with Raw(daemon.socket, hello=False) as peer:
        answer = peer.call("hello", versions=[1], client="liar")
        assert answer["version"] == 1
        peer.call("register", model="liar", quota=MIB)
        assert peer.call("status")["workers"][0]["pid"] == os.getpid()
        refused = peer.call("register", model="other", quota=MIB, pid=1)
        assert refused["code"] == "invalid_params"


def test_a_forked_child_on_its_parents_connection_is_flagged(daemon: Daemon) -> None:
    with Raw(daemon.socket) as peer:
        peer.call("register", model="parent", quota=MIB)
        _, data = peer.wire.send_request("ping", {})
        child = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import socket; socket.socket(fileno={peer.socket.fileno()}).sendall({data!r})",
            ],
            pass_fds=[peer.socket.fileno()],
        )
        child.wait(10)
        flagged = daemon.wait_for("foreign_sender")
        assert (flagged["pid"], flagged["sender_pid"]) == (os.getpid(), child.pid)
        assert peer.call("status")["workers"][0]["pid"] == os.getpid()


def test_the_books_are_right_within_2_s_of_a_restart(daemon: Daemon) -> None:
    with daemon.client() as client:
        workers = [client.worker(f"m{index}", quota=f"{50 + index}MiB") for index in range(5)]
        models = [worker.load(type("Model", (), {})) for worker in workers]
        assert daemon.booked() == sum(50 + index for index in range(5)) * MIB
        daemon.kill()
        daemon.start()
        eventually(
            lambda: daemon.booked() == sum(50 + index for index in range(5)) * MIB, within_s=2.0
        )
        state = daemon.status()
        assert state["generation"] == 2
        assert {worker["name"] for worker in state["workers"]} == {f"m{i}" for i in range(5)}
        # Nothing new is granted before former workers had their chance to come back.
        with Raw(daemon.socket) as peer:
            fresh = peer.call("register", model="fresh", quota=MIB)["worker"]
            denied = peer.call("reserve", worker=fresh)
            if denied.get("code") is not None:
                assert denied["code"] == "recovering"
                assert peer.call("reserve", worker=fresh, wait_s=5.0)["bytes"] == MIB
        for worker in workers:
            worker.unload()
        del models
        eventually(lambda: daemon.booked() <= MIB)


class Held:
    def __init__(self, block: bytearray) -> None:
        self.block = block


def test_a_restarted_daemon_still_judges_by_the_old_limits(daemon: Daemon) -> None:
    """The interpreter of a worker that comes back is not billed to its quota."""
    give_back()  # what the tests before this one left in this process
    with daemon.client() as client:
        worker = client.worker("llama", quota="64MiB")
        # Really held: a process that has shrunk below its old baseline is judged by what it is.
        model = worker.load(lambda: Held(bytearray(b"\x01") * (60 * MIB)))
        limit = daemon.status()["processes"][0]["limit"]
        daemon.kill()
        daemon.start()
        eventually(lambda: daemon.status()["processes"])
        assert daemon.status()["processes"][0]["limit"] == pytest.approx(limit, abs=MIB)
        del model


def test_a_forward_at_work_keeps_its_burst_over_a_restart(daemon: Daemon) -> None:
    def booked() -> list[int]:
        return [worker["booked"] for worker in daemon.status()["workers"]]

    with daemon.client() as client:
        worker = client.worker("llama", quota="64MiB")
        model = worker.load(lambda: Held(bytearray(b"\x01") * (60 * MIB)))
        with worker.forward("32MiB"):
            daemon.kill()
            daemon.start()
            eventually(lambda: booked() == [96 * MIB])
        eventually(lambda: booked() == [64 * MIB])
        del model


def test_a_bad_configuration_is_told_whole(folder: Path) -> None:
    daemon = Daemon(folder, text="[memory]\nbudget = 12\n[sevre]\n")
    done = subprocess.run(daemon.command(), cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == 78
    assert "line 2: memory.budget = 12" in done.stderr
    assert "line 3: sevre" in done.stderr


def test_a_missing_configuration_is_an_error_only_when_named(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "umad.daemon.main", "--config", str(folder / "no.toml")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 78
    assert "no.toml" in done.stderr


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_as_asked_and_leaves_no_socket(folder: Path, signum: signal.Signals) -> None:
    daemon = Daemon(folder).start()
    os.kill(daemon.pid, signum)
    assert daemon.process is not None
    assert daemon.process.wait(10) == 0
    assert not daemon.socket.exists()


def test_preflight_refuses_and_says_what_to_do(folder: Path) -> None:
    for name, value in [("swappiness", "60"), ("vfs_cache_pressure", "100")]:
        path = folder / "root/proc/sys/vm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value + "\n")
    meminfo = folder / "root/proc/meminfo"
    meminfo.write_bytes(Path("/proc/meminfo").read_bytes())
    daemon = Daemon(folder)
    command = [*daemon.command(), "--root", str(folder / "root")]
    command.remove("--permissive")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == 69
    assert "sysctl -w vm.swappiness=1" in done.stderr
    assert "vfs_cache_pressure" in done.stderr


def test_memory_that_cannot_be_read_grants_nothing_and_recovers(folder: Path) -> None:
    root = folder / "root"
    (root / "proc").mkdir(parents=True)
    meminfo = root / "proc/meminfo"
    good = Path("/proc/meminfo").read_bytes()
    meminfo.write_bytes(good)
    with running(folder, "", "--root", str(root)) as daemon, Raw(daemon.socket) as peer:
        worker = peer.call("register", model="llama", quota=64 * MIB)["worker"]
        for number, damage in enumerate([b"", b"MemTotal: many kB\n", None, "fifo"]):
            meminfo.unlink()
            if isinstance(damage, bytes):
                meminfo.write_bytes(damage)
            elif damage == "fifo":
                os.mkfifo(meminfo)
            seen = len(daemon.log)
            daemon.wait_for("memory_unknown", since=max(0, seen - 1))
            assert peer.call("reserve", worker=worker)["code"] == "memory_unknown", damage
            assert peer.call("status")["pools"][0]["free"] is None
            replacement = root / f"good{number}"
            replacement.write_bytes(good)
            replacement.rename(meminfo)
            daemon.wait_for("memory_known", since=seen)
        assert peer.call("reserve", worker=worker)["bytes"] == 64 * MIB
