"""Field cases of worker processes against a real daemon: each with the right behaviour."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.running import ROOT, Daemon, Raw, eventually
from umad.guard import preload
from umad.units import MIB

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

CONFIG = """
[daemon]
socket = "{socket}"
[memory]
reserve = "256MiB"
budget = "{budget}"
"""


class Worker:
    """One behaviour of tests.integration.workers in a process of its own."""

    def __init__(self, daemon: Daemon, *words: str, guard: bool = False) -> None:
        environment = dict(os.environ)
        if guard:
            preload.build()
            environment, why = preload.launch_environment(environment)
            assert not why
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.integration.workers",
                words[0],
                daemon.socket,
                *words[1:],
            ],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hears(self) -> list[str]:
        """The next line it prints, in words; empty at its end."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def step(self, line: object = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def spawn(daemon: Daemon) -> Iterator[type[Worker]]:
    made: list[Worker] = []

    def start(*words: str, guard: bool = False) -> Worker:
        made.append(Worker(daemon, *words, guard=guard))
        return made[-1]

    yield start  # type: ignore[misc]
    for worker in made:
        worker.end()


@pytest.fixture
def daemon(folder: Path, request: pytest.FixtureRequest) -> Iterator[Daemon]:
    budget = getattr(request, "param", "2GiB")
    made = Daemon(folder, text=CONFIG.format(socket=folder / "umad.sock", budget=budget)).start()
    yield made
    made.stop()


def booked(daemon: Daemon) -> int:
    return daemon.booked() // MIB


# ------------------------------------------------------------------------- C07


def test_c07_a_load_is_held_to_its_peak_and_loads_go_one_by_one(
    daemon: Daemon, spawn: type[Worker]
) -> None:
    first = spawn("load_and_hold", "a", "300MiB", "900MiB", "850")
    assert first.hears() == ["touched"]  # 850 above its steady 300, within its peak
    second = spawn("load_and_hold", "b", "300MiB", "1000MiB", "350")
    eventually(lambda: len(daemon.status()["workers"]) == 2)
    eventually(lambda: daemon.status()["init"]["waiting"] == 1)
    assert booked(daemon) == 1900
    assert not [line for line in daemon.log if line["event"] == "revoked"]
    first.step()
    assert first.hears() == ["loaded"]
    assert second.hears() == ["touched"]
    second.step()
    assert second.hears() == ["loaded"]
    assert booked(daemon) == 600
    with Raw(daemon.socket) as third:
        worker = third.call("register", model="c", quota=200 * MIB, peak=1500 * MIB)["worker"]
        denied = third.call("reserve", worker=worker)
        assert denied["code"] == "quota_denied"
        assert denied["details"]["free_bytes"] == (2048 - 600) * MIB


@pytest.mark.parametrize("guard", [False, True])
def test_a_load_goes_on_though_the_daemon_dies_in_its_midst(
    daemon: Daemon, spawn: type[Worker], guard: bool
) -> None:
    loads = spawn("load_and_hold", "a", "300MiB", "900MiB", "400", guard=guard)
    assert loads.hears() == ["touched"]
    daemon.kill()
    daemon.start()
    eventually(lambda: [one["state"] for one in daemon.status()["workers"]] == ["loading"])
    assert booked(daemon) == 900
    second = spawn("load_and_hold", "b", "300MiB", "400MiB", "350", guard=guard)
    eventually(lambda: daemon.status()["init"]["waiting"] == 1)
    loads.step()  # 280 MiB more, which a guard that knows of no load would refuse
    assert loads.hears() == ["loaded"]
    assert second.hears() == ["touched"]
    assert booked(daemon) == 300 + 400
    (mine, _) = sorted(daemon.status()["workers"], key=lambda one: str(one["name"]))
    assert 280 * MIB <= mine["measured"] < 300 * MIB
    assert not [line for line in daemon.log if line["event"] in ("revoked", "stopped")]


def test_c07_a_load_above_its_peak_is_stopped_with_that_reason(
    daemon: Daemon, spawn: type[Worker]
) -> None:
    worker = spawn("load_and_hold", "a", "300MiB", "900MiB", "1100")
    stopped = daemon.wait_for("stopped", pid=worker.process.pid)
    assert stopped["reason"] == "peak_exceeded"
    assert worker.process.wait(10) == -9


# ------------------------------------------------------------------------- C13


def test_c13_shared_anonymous_pages_count(daemon: Daemon, spawn: type[Worker]) -> None:
    worker = spawn("shared_anonymous", "256MiB", "512")
    assert worker.hears() == ["registered"]
    worker.step()
    stopped = daemon.wait_for("stopped", pid=worker.process.pid)
    assert stopped["fence"] == "sigkill"


@pytest.mark.root
def test_c13_locked_memory_is_shown(daemon: Daemon, spawn: type[Worker]) -> None:
    assert spawn("locked", "256MiB", "64").hears() == ["locked"]
    eventually(lambda: daemon.status()["processes"][0]["locked"] == 64 * MIB)


def test_c13_a_segment_that_two_map_is_counted_once(daemon: Daemon, spawn: type[Worker]) -> None:
    worker = spawn("two_on_a_segment", "200MiB", "300")
    assert {worker.hears()[0], worker.hears()[0]} == {"parent", "child"}
    looks = daemon.status()["sample"]
    assert looks is not None
    for _ in range(5):
        eventually(lambda: daemon.status()["sample"]["age_s"] < 0.05)
    state = daemon.status()
    assert {process["verdict"] for process in state["processes"]} == {"ok"}
    assert worker.process.poll() is None


def test_c13_two_processes_on_one_posix_segment_are_billed_its_bytes_once(
    daemon: Daemon, spawn: type[Worker]
) -> None:
    """300 MiB in each of them, 600 by their RSS; 150 each by its share."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="umad-test-") as segment:
        segment.truncate(300 * MIB)
        for name in ("first", "second"):
            # Alone, the first is billed all of it.
            quota = "320MiB" if name == "first" else "200MiB"
            assert spawn("shared_segment", name, quota, segment.name).hears() == ["touched"]
        for _ in range(5):
            eventually(lambda: daemon.status()["sample"]["age_s"] < 0.05)
        assert {process["verdict"] for process in daemon.status()["processes"]} == {"ok"}
        assert not [line for line in daemon.log if line["event"] in ("revoked", "stopped")]


def test_five_workers_are_seen_within_2_percent_of_the_truth(
    daemon: Daemon, spawn: type[Worker]
) -> None:
    """Each alone takes memory, one after the other; what the others are billed stays."""
    sizes = {f"w{size}": size * MIB for size in (120, 160, 200, 240, 280)}
    workers = {
        name: spawn("grow", name, "300MiB", str(size // MIB)) for name, size in sizes.items()
    }
    for worker in workers.values():
        assert worker.hears() == ["loaded"]

    def billed() -> dict[int, int]:
        return {each["pid"]: each["bytes"] for each in daemon.status()["processes"]}

    eventually(lambda: None not in billed().values())
    before = billed()
    for worker in workers.values():
        worker.step()
        assert worker.hears() == ["grown"]
    # What each had loaded before is given back.
    truth = {worker.process.pid: sizes[name] - MIB for name, worker in workers.items()}

    def furthest() -> float:
        now = billed()
        return max(abs(now[pid] - before[pid] - size) / size for pid, size in truth.items())

    eventually(lambda: furthest() <= 0.02)


# ------------------------------------------------------------------------- C14


@pytest.mark.models
def test_c14_what_is_not_touched_is_not_used_and_what_is_touched_is_stopped(
    daemon: Daemon, spawn: type[Worker]
) -> None:
    worker = spawn("torch_touch", "512MiB")
    assert worker.hears() == ["allocated"]
    for _ in range(5):
        eventually(lambda: daemon.status()["sample"]["age_s"] < 0.05)
    assert worker.process.poll() is None
    worker.step()
    stopped = daemon.wait_for("stopped", pid=worker.process.pid)
    assert stopped["seen_to_kill_s"] <= 0.1
    with Raw(daemon.socket) as peer:
        asked = time.monotonic()
        error = peer.call("register", model="huge", quota=1 << 40)
        assert error["code"] == "never_fits"
        key = peer.call("register", model="small", quota=MIB)["worker"]
        error = peer.call("reserve", worker=key, bytes=1 << 40, wait_s=60.0)
        assert error["code"] == "quota_exceeded", "an error, not a wait"
        assert time.monotonic() - asked < 1.0


# ------------------------------------------------------------------------- C16


@pytest.mark.parametrize("daemon", ["450MiB"], indirect=True)
def test_c16_a_failed_load_lets_go_of_its_memory(daemon: Daemon, spawn: type[Worker]) -> None:
    worker = spawn("failed_load", "drop")
    word, left = worker.hears()
    assert word == "failed"
    assert int(left) < 10
    with Raw(daemon.socket) as rival:
        key = rival.call("register", model="rival", quota=300 * MIB)["worker"]
        assert rival.call("reserve", worker=key, wait_s=2.0)["bytes"] == 300 * MIB


@pytest.mark.parametrize("daemon", ["450MiB"], indirect=True)
def test_c16_memory_that_is_kept_on_purpose_stays_booked(
    daemon: Daemon, spawn: type[Worker]
) -> None:
    worker = spawn("failed_load", "keep")
    word, left = worker.hears()
    assert word == "failed"
    assert int(left) >= 290
    eventually(lambda: 290 <= booked(daemon) <= 330)
    with Raw(daemon.socket) as rival:
        key = rival.call("register", model="rival", quota=300 * MIB)["worker"]
        assert rival.call("reserve", worker=key)["code"] == "quota_denied"
        worker.step()
        assert worker.hears()[0] == "cleared"
        assert rival.call("reserve", worker=key, wait_s=2.0)["bytes"] == 300 * MIB


def test_c16_an_error_that_is_kept_keeps_no_tensors(daemon: Daemon, spawn: type[Worker]) -> None:
    worker = spawn("failed_forward")
    word, full = worker.hears()
    assert (word, int(full) > 300) == ("full", True)
    word, left, cause = worker.hears()
    assert (word, cause) == ("failed", "MemoryError")
    assert int(left) < 10
    assert worker.hears()[0] == "full"
    word, left = worker.hears()
    assert (word, int(left) < 10) == ("again", True)


# ------------------------------------------------------------------------- C17


def test_c17_unloaded_is_a_claim(daemon: Daemon, spawn: type[Worker]) -> None:
    worker = spawn("fragments")
    assert worker.hears() == ["loaded"]
    worker.step()
    word, left = worker.hears()
    assert word == "unloaded"
    assert int(left) > 1000, "the heap was trimmed by itself: this says nothing"
    with Raw(daemon.socket) as rival:
        key = rival.call("register", model="rival", quota=1000 * MIB)["worker"]
        assert rival.call("reserve", worker=key)["code"] == "quota_denied"
        leaking = daemon.wait_for("leaking", worker="fragments")
        assert leaking["held_bytes"] > 1000 * MIB
        worker.step()
        word, left = worker.hears()
        assert (word, int(left) < 300) == ("trimmed", True)
        assert rival.call("reserve", worker=key, wait_s=2.0)["bytes"] == 1000 * MIB


# ------------------------------------------------------------------------- C18


def test_c18_a_stop_waits_for_that_process_alone(daemon: Daemon, spawn: type[Worker]) -> None:
    leaving = spawn("grow", "leaving", "600MiB", "500")
    neighbour = spawn("grow", "neighbour", "600MiB", "500")
    assert leaving.hears() == neighbour.hears() == ["loaded"]
    leaving.step()
    assert leaving.hears() == ["grown"]
    assert booked(daemon) == 1200
    neighbour.step()  # grows by as much as the other gives back
    leaving.process.kill()
    eventually(lambda: booked(daemon) == 600, within_s=1.0)
    assert neighbour.hears() == ["grown"]
    # Dead for a while before anybody asks: nothing to wait for.
    with Raw(daemon.socket) as rival:
        key = rival.call("register", model="rival", quota=1000 * MIB)["worker"]
        assert rival.call("reserve", worker=key)["bytes"] == 1000 * MIB


# ------------------------------------------------------------------- the guard


@pytest.mark.models
def test_the_guard_keeps_the_quota_without_and_after_a_restart_of_the_daemon(
    daemon: Daemon, spawn: type[Worker]
) -> None:
    worker = spawn("guarded", "200MiB", guard=True)
    assert worker.hears() == ["loaded", "0"]
    assert daemon.status()["processes"][0]["guard"] is True
    daemon.kill()
    worker.step(300)
    assert worker.hears()[:2] == ["refused", "quota_exceeded"]
    worker.step(100)
    assert worker.hears() == ["given"]
    daemon.start()
    eventually(lambda: daemon.status()["workers_total"] == 1)
    state = daemon.status()
    assert state["processes"][0]["guard"] is True
    assert state["pools"][0]["booked"] == 200 * MIB
    worker.step(300)
    assert worker.hears()[:2] == ["refused", "quota_exceeded"]
    with Raw(daemon.socket) as admin:
        key = state["workers"][0]["id"]
        eventually(lambda: not daemon.status()["recovering"])
        assert admin.call("set_quota", worker=key, quota=400 * MIB) == {"quota": 400 * MIB}
        worker.step(300)
        assert worker.hears() == ["given"]
        # The page is the one that the guard reads: closing it through the new daemon works.
        admin.call("set_quota", worker=key, quota=1 * MIB)
    stopped = daemon.wait_for("stopped", worker="guarded")
    assert stopped["fence"] == "return"
    worker.step(10)
    assert worker.hears() == ["refused", "worker_revoked", "0.0"]


# ------------------------------------------------------------------------- C37


def test_c37_a_call_that_keeps_the_interpreter_lock_does_not_delay_the_kill(
    daemon: Daemon, spawn: type[Worker]
) -> None:
    worker = spawn("hold_the_gil", "128MiB")
    assert worker.hears() == ["registered"]
    worker.step()
    stopped = daemon.wait_for("stopped", pid=worker.process.pid)
    assert stopped["fence"] == "sigkill"
    assert stopped["seen_to_kill_s"] <= 0.1
    assert worker.process.wait(10) == -9
    assert worker.hears() == []


def test_c37_an_exception_never_reaches_the_next_job() -> None:
    """A job that ends just before delivery: 2,000 races."""
    import threading

    from umad.client.interrupt import Interruptible, Stopped

    block = Interruptible()
    hit = missed = stray = 0
    entered, turn, raised = threading.Semaphore(0), threading.Semaphore(0), threading.Event()

    def work() -> None:
        nonlocal hit, missed, stray
        for number in range(2000):
            try:
                with block:
                    entered.release()
                    while number % 4 == 0 and not raised.is_set():
                        pass  # every fourth is inside for certain; the others race
                    sum(range(50))
                missed += 1
            except Stopped:
                hit += 1
            try:
                sum(range(200))  # the next job on this thread
                turn.acquire()
            except Stopped:
                stray += 1

    thread = threading.Thread(target=work)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        thread.start()
        for _ in range(2000):
            raised.clear()
            entered.acquire()
            block.interrupt()
            raised.set()
            turn.release()
        thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert hit + missed == 2000
    assert stray == 0
    assert hit >= 100
    assert not block.interrupt()


# -------------------------------------------------------------------------- R6


@pytest.mark.models
def test_r6_ten_threads_with_a_forward_each_get_no_team_each(
    daemon: Daemon, spawn: type[Worker]
) -> None:
    """89 threads without umad: ten, and a team of eight for each."""
    worker = spawn("many_threads")
    word, more = worker.hears()
    assert word == "threads"
    cores = len(os.sched_getaffinity(0))
    assert int(more) <= 10 + min(8, cores) - 1, "the first has a team, no other has"
    assert worker.hears() == ["later", "8"]
