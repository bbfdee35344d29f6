"""Field cases of process families against a real daemon: forks, orphans, escapes, polite stops."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.running import ROOT, Daemon, Raw, alive, eventually
from umad.daemon import up
from umad.host.procs import process_stat
from umad.units import GIB, MIB

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

CONFIG = """
[daemon]
socket = "{socket}"
[memory]
reserve = "256MiB"
budget = "2GiB"
{more}
"""


class Worker:
    """One behaviour of tests.integration.forkers in a process of its own."""

    def __init__(self, daemon: Daemon, *words: str, session: bool = False) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.integration.forkers",
                words[0],
                daemon.socket,
                *words[1:],
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=session,
        )
        self.children: list[int] = []

    def hears(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def has_child(self) -> int:
        """The next line names a child."""
        word, pid = self.hears()
        assert word == "child"
        self.children.append(int(pid))
        return self.children[-1]

    def step(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        for pid in (*self.children, self.process.pid):
            if running(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


def running(pid: int) -> bool:
    stat = process_stat(pid)
    return stat is not None and not stat.ended


@pytest.fixture
def daemon(folder: Path, request: pytest.FixtureRequest) -> Iterator[Daemon]:
    more = getattr(request, "param", "")
    made = Daemon(folder, text=CONFIG.format(socket=folder / "umad.sock", more=more)).start()
    yield made
    made.stop()


@pytest.fixture
def spawn(daemon: Daemon) -> Iterator[Any]:
    made: list[Worker] = []

    def start(*words: str, session: bool = False) -> Worker:
        made.append(Worker(daemon, *words, session=session))
        return made[-1]

    yield start
    for worker in made:
        worker.end()


def process_of(daemon: Daemon, pid: int) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in daemon.status()["processes"] if one["pid"] == pid)
    return found


def holds(daemon: Daemon, worker: Worker) -> int:
    shown = process_of(daemon, worker.process.pid)
    return int(shown["bytes"] or 0) - int(shown["baseline"])


def quiet(daemon: Daemon) -> bool:
    """Nobody was stopped, or told to stop."""
    return not [line for line in daemon.log if line["event"] in ("revoked", "stopped", "orphaned")]


# ------------------------------------------------------------------------- C20

# A grace that can be seen: the default of 50 ms is over before anybody can ask.
GRACE = '[enforcement]\ngrace = "500ms"'


@pytest.mark.parametrize("daemon", [GRACE], indirect=True)
@pytest.mark.parametrize("kind", ["plain", "setsid", "late"])
def test_c20_an_orphan_stays_booked_and_is_stopped(daemon: Daemon, spawn: Any, kind: str) -> None:
    """``late`` forks and exits between two looks; only its session tells of the child."""
    sibling = spawn("sit", "sibling", "100MiB")
    assert sibling.hears() == ["loaded"]
    sibling_child = sibling.has_child()
    worker = spawn("orphan", kind, "600MiB", "400", session=kind == "late")
    assert worker.hears() == ["loaded"]
    worker.step()
    child = worker.has_child()
    assert worker.hears() == ["touched"]
    if kind != "late":
        eventually(lambda: holds(daemon, worker) > 390 * MIB)
        assert process_of(daemon, worker.process.pid)["family"] == [child]
        worker.step()
    assert worker.process.wait(10) == 0
    told = daemon.wait_for("orphaned", pid=worker.process.pid)
    assert (told["worker"], told["pids"]) == ("orphan", [child])
    state = daemon.status()
    [shown] = [one for one in state["workers"] if one["name"] == "orphan"]
    assert shown["state"] == "orphaned"
    assert 390 * MIB < shown["booked"] < 450 * MIB
    assert process_of(daemon, worker.process.pid)["verdict"] == "orphaned"
    stopped = daemon.wait_for("stopped", pid=worker.process.pid)
    assert (stopped["reason"], stopped["fence"]) == ("orphaned", "sigkill")
    assert stopped["freed_bytes"] > 390 * MIB
    assert stopped["seen_to_gone_s"] < 2.0
    assert not running(child)
    eventually(lambda: daemon.booked() == 100 * MIB)
    assert running(sibling_child)
    assert sibling.process.poll() is None
    assert alive(daemon.pid)


@pytest.mark.parametrize("daemon", [GRACE], indirect=True)
def test_c20_an_orphan_may_go_by_itself(daemon: Daemon, spawn: Any) -> None:
    worker = spawn("orphan", "plain", "600MiB", "50")
    assert worker.hears() == ["loaded"]
    worker.step()
    child = worker.has_child()
    assert worker.hears() == ["touched"]
    eventually(lambda: child in process_of(daemon, worker.process.pid)["family"])
    worker.step()
    daemon.wait_for("orphaned", pid=worker.process.pid)
    eventually(lambda: daemon.booked() < 100 * MIB, within_s=0.4)
    os.kill(child, signal.SIGTERM)
    assert daemon.wait_for("stopped", pid=worker.process.pid)["fence"] == "exit"
    assert daemon.booked() == 0


def test_the_bytes_of_a_child_are_its_parents_and_so_is_their_end(
    daemon: Daemon, spawn: Any
) -> None:
    worker = spawn("orphan", "plain", "200MiB", "400")
    assert worker.hears() == ["loaded"]
    worker.step()
    child = worker.has_child()
    stopped = daemon.wait_for("stopped", pid=worker.process.pid)
    assert (stopped["reason"], stopped["fence"]) == ("quota_exceeded", "sigkill")
    assert worker.process.wait(10) == -9
    eventually(lambda: not running(child))
    assert daemon.booked() == 0


def test_a_fork_shares_its_parents_pages_and_is_no_breach(daemon: Daemon, spawn: Any) -> None:
    worker = spawn("forks", "400MiB", "300", "4")
    assert worker.hears() == ["loaded"]
    for _ in range(4):
        worker.has_child()
    eventually(lambda: process_of(daemon, worker.process.pid)["family_total"] == 4)
    shown = process_of(daemon, worker.process.pid)
    assert shown["bytes"] < shown["limit"]
    # Released while the children still map it: nobody else may have it.
    worker.step()
    assert worker.hears() == ["released"]
    with Raw(daemon.socket) as rival:
        key = rival.call("register", model="rival", quota=1900 * MIB)["worker"]
        assert rival.call("reserve", worker=key)["code"] == "quota_denied"
        for child in worker.children:
            os.kill(child, signal.SIGKILL)
        assert rival.call("reserve", worker=key, wait_s=3.0)["bytes"] == 1900 * MIB
    assert quiet(daemon)


# ------------------------------------------------------------------------- C17


@pytest.mark.parametrize("daemon", ['[enforcement]\nleak_policy = "kill"'], indirect=True)
def test_c17_who_keeps_what_it_gave_back_is_recycled_where_policy_says_so(
    daemon: Daemon, spawn: Any
) -> None:
    liar = spawn("lie", "1500MiB", "1000")
    assert liar.hears() == ["released"]
    with Raw(daemon.socket) as rival:
        key = rival.call("register", model="rival", quota=1200 * MIB)["worker"]
        assert rival.call("reserve", worker=key)["code"] == "quota_denied"
        daemon.wait_for("leaking", worker="liar")
        assert daemon.status()["counters"]["leaks"] == 1
        assert rival.call("reserve", worker=key)["code"] == "quota_denied"
        revoked = daemon.wait_for("revoked", worker="liar")
        assert revoked["reason"] == "leaking"
        assert liar.process.poll() is None
        stopped = daemon.wait_for("stopped", worker="liar")
        assert (stopped["reason"], stopped["fence"]) == ("leaking", "sigkill")
        assert liar.process.wait(10) == -9
        assert rival.call("reserve", worker=key, wait_s=2.0)["bytes"] == 1200 * MIB


# ------------------------------------------------------------------------- C37


@pytest.mark.parametrize("how", ["svd", "swallow"])
def test_c37_what_no_exception_ends_the_kill_does(daemon: Daemon, spawn: Any, how: str) -> None:
    """One long call of LAPACK, and a job that swallows whatever is raised in it."""
    worker = spawn("stubborn", how, "700MiB")
    assert worker.hears() == ["loaded"]
    worker.step()
    assert worker.hears() == ["busy"]
    with Raw(daemon.socket) as admin:
        key = daemon.status()["workers"][0]["id"]
        assert admin.call("set_quota", worker=key, quota=16 * MIB) == {"quota": 16 * MIB}
    stopped = daemon.wait_for("stopped", pid=worker.process.pid)
    assert stopped["fence"] == "sigkill"
    assert stopped["seen_to_kill_s"] <= 0.1
    assert worker.process.wait(10) == -9
    assert "ended" not in worker.hears()


# ------------------------------------------------------------------------- C38


class Tree:
    """A machine of which the test writes every figure."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "proc").mkdir(parents=True)
        self.available(14 * GIB)

    def available(self, size: int) -> None:
        names = ("MemFree", "MemAvailable")
        lines = [f"MemTotal: {16 * MIB} kB", *(f"{name}: {size // 1024} kB" for name in names)]
        self._put("meminfo", "\n".join(lines) + "\n")

    def process(self, pid: int, size: int, state: str = "S") -> None:
        real = process_stat(pid)
        assert real is not None
        start = real.start_ticks
        (self.root / f"proc/{pid}").mkdir(exist_ok=True)
        self._put(f"{pid}/stat", f"{pid} (w) {state} 1 1 1 {'0 ' * 13}1 0 {start} 0\n")
        anonymous = f"RssAnon:\t{size // 1024} kB\nRssShmem:\t0 kB\n"
        self._put(f"{pid}/status", f"Name:\tw\nState:\t{state}\n{anonymous}Threads:\t1\n")

    def _put(self, name: str, text: str) -> None:
        """In one step: the daemon reads at any moment."""
        new = self.root / "new"
        new.write_text(text)
        new.rename(self.root / "proc" / name)


@pytest.fixture
def peers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that register by a line of their own and sleep."""
    made: list[subprocess.Popen[bytes]] = []
    yield made
    for one in made:
        one.kill()
        one.communicate()


def test_c38_one_that_cannot_be_killed_costs_its_bytes_and_delays_nobody(
    folder: Path, peers: list[subprocess.Popen[bytes]]
) -> None:
    """State D: SIGKILL is taken and nothing happens.  ``--dry-run`` sends none, which is that."""
    tree = Tree(folder / "machine")
    more = f'root = "{tree.root}"\ngpu = "none"\n[enforcement]\nunkillable_after = "1s"'
    text = CONFIG.format(socket=folder / "umad.sock", more=more).replace("2GiB", "12GiB")
    daemon = Daemon(folder, "", "--dry-run", text=text).start()
    program = "import sys; from tests.integration.forkers import sit_alone; sit_alone(sys.argv)"
    try:
        for name, quota in (("stuck", "4GiB"), ("other", "1GiB")):
            command = [sys.executable, "-c", program, str(daemon.socket), name, quota]
            one = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            peers.append(one)
            tree.process(one.pid, 0)
            assert one.stdin is not None
            assert one.stdout is not None
            one.stdin.write(b"\n")
            one.stdin.flush()
            assert one.stdout.readline() == b"loaded\n"
        stuck, other = (one.pid for one in peers)
        tree.available(8 * GIB)
        tree.process(stuck, 6 * GIB, "D")
        began_s = time.monotonic()
        daemon.wait_for("unkillable", pid=stuck)
        assert time.monotonic() - began_s >= 1.0
        state = daemon.status()
        assert state["counters"]["unkillable"] == 1
        assert process_of(daemon, stuck)["verdict"] == "unkillable"
        # 14 GiB were there: less the reserve, the six that are gone, and the other's quota.
        eventually(lambda: daemon.status()["pools"][0]["free"] == 7 * GIB - 256 * MIB)
        since = len(daemon.log)
        tree.process(other, 2 * GIB)
        revoked = daemon.wait_for("revoked", pid=other, since=since)
        killed = daemon.wait_for("kill_failed", pid=other, since=since)
        assert "dry run" in killed["why"]
        assert stamp(killed) - stamp(revoked) <= 0.1
        with Raw(daemon.socket) as third:
            assert third.call("register", model="third", quota=GIB)["worker"] > 0
    finally:
        daemon.stop()


def stamp(line: dict[str, Any]) -> float:
    """When a line was logged."""
    return datetime.fromisoformat(str(line["timestamp"])).timestamp()


def test_c38_a_polite_stop_that_is_ignored_ends_in_sigkill(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`umad up` and its programs."""
    monkeypatch.setattr(up, "STOP_WITHIN_S", 0.5)
    ready = folder / "ready"
    deaf = "import pathlib, signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    deaf += f"pathlib.Path({str(ready)!r}).touch(); signal.pause()"

    async def stop() -> float:
        program = up._Program("deaf", [sys.executable, "-c", deaf])
        task = asyncio.create_task(program.supervise(asyncio.Event()))
        await asyncio.to_thread(eventually, ready.exists)
        began_s = time.monotonic()
        await program.stop()
        took_s = time.monotonic() - began_s
        assert await task == signal.SIGKILL
        return took_s

    assert 0.5 <= asyncio.run(stop()) < 2.0
