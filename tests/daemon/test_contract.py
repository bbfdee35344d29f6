"""The contract over the real socket: quotas, books, enforcement."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemon.running import ROOT, Daemon, Raw, eventually, running
from umad.units import MIB

pytestmark = pytest.mark.slow

GREEDY = [sys.executable, "-m", "tests.demo.greedy"]


@pytest.mark.parametrize(
    "quota",
    [-1, 0, True, float("nan"), 1e300, 2**63, 2**64 - 1, "12", None, 5.0, [1]],
    ids=repr,
)
def test_a_quota_that_is_no_size_changes_nothing(daemon: Daemon, quota: object) -> None:
    with Raw(daemon.socket) as peer:
        error = peer.call("register", model="llama", quota=quota)
        assert error["code"] == "invalid_params"
        assert "quota" in error["message"]
        state = peer.call("status")
        assert state["workers_total"] == 0
        assert state["pools"][0]["booked"] == 0


def test_a_quota_above_the_machine_never_fits(daemon: Daemon) -> None:
    with Raw(daemon.socket) as peer:
        assert peer.call("register", model="llama", quota=2**62)["code"] == "never_fits"


def test_a_greedy_worker_is_killed_within_100_ms_of_the_sample(daemon: Daemon) -> None:
    with daemon.client() as client:
        bystander = client.worker("bystander", quota="64MiB")
        greedy = subprocess.Popen([*GREEDY, str(daemon.socket), "128MiB", "4GiB"], cwd=ROOT)
        stopped = daemon.wait_for("stopped", pid=greedy.pid)
        assert greedy.wait(10) == -9
        assert stopped["worker"] == "greedy"
        assert stopped["fence"] == "sigkill"
        assert stopped["reason"] == "quota_exceeded"
        assert stopped["measured_bytes"] > stopped["limit_bytes"] > 128 * MIB
        assert stopped["seen_to_revoke_s"] <= stopped["seen_to_kill_s"] <= 0.1
        assert stopped["seen_to_kill_s"] <= stopped["seen_to_gone_s"]
        assert stopped["freed_bytes"] == 128 * MIB
        assert stopped["left_bytes"] == 0
        assert not bystander.revoked.is_set()
        assert [worker["name"] for worker in daemon.status()["workers"]] == ["bystander"]


def test_dry_run_kills_nobody(folder: Path) -> None:
    with running(folder, "", "--dry-run") as daemon:
        greedy = subprocess.Popen([*GREEDY, str(daemon.socket), "64MiB", "192MiB"], cwd=ROOT)
        try:
            failed = daemon.wait_for("kill_failed", pid=greedy.pid)
            assert "would have been killed" in failed["why"]
            assert greedy.poll() is None
        finally:
            greedy.kill()
            greedy.wait(10)


def test_a_client_that_dies_gives_everything_back_within_a_second(daemon: Daemon) -> None:
    code = (
        "import sys, os\n"
        "from umad.client import connect\n"
        "class Model: pass\n"
        f"worker = connect({str(daemon.socket)!r}).worker('llama', quota='64MiB')\n"
        "model = worker.load(Model)\n"
        "print('loaded', flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"loaded\n"
    with daemon.client() as client:
        assert client.call("status")["pools"][0]["booked"] == 64 * MIB
        child.kill()
        eventually(lambda: client.call("status")["pools"][0]["booked"] == 0, within_s=1.0)
    child.communicate()


def test_a_reservation_in_parts_is_all_or_nothing(daemon: Daemon) -> None:
    with Raw(daemon.socket) as peer:
        sizes = {"quota": 900 * MIB, "peak": 2048 * MIB}
        worker = peer.call("register", model="a", **sizes)["worker"]
        other = peer.call("register", model="b", quota=1000 * MIB)["worker"]
        peer.call("reserve", worker=other)
        error = peer.call("reserve", worker=worker, parts=[300 * MIB] * 4)
        assert error["code"] == "quota_denied"
        assert peer.call("status")["pools"][0]["booked"] == 1000 * MIB
        assert peer.call("reserve", worker=worker, parts=[300 * MIB] * 3)["bytes"] == 900 * MIB


def test_a_waiter_that_hangs_up_books_nothing(daemon: Daemon) -> None:
    with Raw(daemon.socket) as holder:
        worker = holder.call("register", model="holder", quota=1500 * MIB)["worker"]
        lease = holder.call("reserve", worker=worker)
        waiter = Raw(daemon.socket)
        key = waiter.call("register", model="waiter", quota=1000 * MIB)["worker"]
        waiter.socket.sendall(
            waiter.wire.send_request("reserve", {"worker": key, "wait_s": 60.0})[1]
        )
        eventually(lambda: len(holder.call("status")["queue"]) == 1)
        waiter.close()
        holder.call("void", lease=lease["lease"], token=lease["token"])
        eventually(lambda: holder.call("status")["pools"][0]["booked"] == 0)
        assert holder.call("status")["queue"] == []


def test_leases_that_are_dropped_come_back_and_are_counted(daemon: Daemon) -> None:
    """C15: the net under a forgotten lease, and the server's deadline under the net."""
    import gc

    with daemon.client() as client, client.worker("llama", quota="64MiB") as worker:
        for _ in range(1000):
            worker.admit(MIB)
        gc.collect()
        state = eventually(
            lambda: (
                (state := client.call("status"))["counters"].get("leases_leaked") == 1000 and state
            )
        )
        assert state["counters"]["leases_leaked"] == 1000
        eventually(lambda: client.call("status")["pools"][0]["booked"] == 0)

        gc.disable()
        try:
            for _ in range(10):
                burst = worker.admit(MIB, ttl_s=0.3)
                cycle = [burst]
                cycle.append(cycle)  # type: ignore[arg-type]
                del burst, cycle
            assert client.call("status")["pools"][0]["booked"] == 10 * MIB
            eventually(lambda: client.call("status")["pools"][0]["booked"] == 0)
        finally:
            gc.enable()
            gc.collect()
        assert client.call("status")["counters"]["leases_expired"] == 10

        burst = worker.admit(MIB)
        burst.release()
        del burst
        gc.collect()
        counters = client.call("status")["counters"]
        assert counters["leases_leaked"] == 1000


def test_the_daemon_is_small(daemon: Daemon) -> None:
    with daemon.client() as client:
        workers = [client.worker(f"m{index}", quota="1MiB") for index in range(5)]
        for worker in workers:
            worker.load(object)
        for _ in range(200):
            client.call("status")
    assert daemon.rss() < 40 * MIB


def test_the_log_is_one_object_a_line(daemon: Daemon) -> None:
    with daemon.client() as client, client.worker("llama", quota="64MiB"):
        line = daemon.wait_for("registered", worker="llama")
    assert {"event", "level", "timestamp", "worker", "pid", "quota_bytes"} <= line.keys()
    json.dumps(daemon.log)
