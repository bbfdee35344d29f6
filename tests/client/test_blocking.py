"""Deadlines, loss and return of the daemon, threads and forks."""

import errno
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import pytest

from umad.client import connect
from umad.client.dial import dial
from umad.errors import (
    AccessDenied,
    DaemonLost,
    DaemonTimeout,
    DaemonUnavailable,
    InvalidParams,
    LeaseNotFound,
    QuotaDenied,
    VersionMismatch,
)

MIB = 1 << 20


def test_a_call_returns_what_the_daemon_answers(daemon):
    daemon.handlers["status"] = lambda _: {"state": "fine"}
    with connect(daemon.path) as client:
        assert client.connected
        assert client.call("status") == {"state": "fine"}
    assert not client.connected


def test_the_socket_comes_from_the_environment(daemon, monkeypatch):
    monkeypatch.setenv("UMAD_SOCKET", daemon.path)
    with connect() as client:
        assert client.call("ping") == {}


def test_a_refusal_becomes_its_exception(daemon):
    def deny(_):
        raise QuotaDenied("no room", retry_after_s=2.0, details={"free": 7})

    daemon.handlers["reserve"] = deny
    with connect(daemon.path) as client:
        with pytest.raises(QuotaDenied, match="no room") as caught:
            client.call("reserve", {"worker": 1, "bytes": 1})
        assert (caught.value.retry_after_s, caught.value.details) == (2.0, {"free": 7})
        with pytest.raises(InvalidParams):
            client.call("reserve", {"worker": True})


def test_nobody_listens_says_how_to_start_it(tmp_path):
    path = tmp_path / "none.sock"
    with pytest.raises(DaemonUnavailable, match="systemctl start umad") as caught:
        connect(path)
    assert str(path) in caught.value.message
    assert "`umad up` in a terminal" in caught.value.message


def test_a_socket_of_another_group_names_the_group(tmp_path, monkeypatch):
    path = tmp_path / "umad.sock"
    path.touch()

    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    # Root may open every socket, so the refusal itself is played.
    monkeypatch.setattr("umad.client.dial.socket.socket.connect", refuse)
    with pytest.raises(AccessDenied, match="join the group"):
        dial(str(path), 1.0)


def test_another_protocol_version_is_told(daemon):
    def refuse(_):
        raise VersionMismatch("this daemon speaks 2")

    daemon.handlers["hello"] = refuse
    with pytest.raises(VersionMismatch):
        connect(daemon.path, on_unavailable="allow")


def test_a_deadline_ends_a_call_and_the_connection_lives_on(daemon, silent):
    daemon.handlers["status"] = lambda _: silent
    with connect(daemon.path) as client:
        begin_s = monotonic()
        with pytest.raises(DaemonTimeout):
            client.call("status", timeout_s=0.05)
        assert 0.05 <= monotonic() - begin_s < 1
        assert client.call("ping") == {}


def test_waiting_in_a_queue_extends_the_deadline(daemon):
    queued = threading.Event()

    def slowly(params):
        queued.wait(0.2)
        return daemon.grant(params["bytes"])

    daemon.handlers["reserve"] = slowly
    with connect(daemon.path, timeout_s=0.1) as client:
        assert client.call("reserve", {"worker": 1, "bytes": 5, "wait_s": 1})["bytes"] == 5


def test_a_grant_that_comes_too_late_is_given_back(daemon):
    go = threading.Event()

    def late(params):
        go.wait(5)
        return daemon.grant(params["bytes"])

    daemon.handlers["reserve"] = late
    with connect(daemon.path) as client:
        with pytest.raises(DaemonTimeout):
            client.call("reserve", {"worker": 1, "bytes": 5}, timeout_s=0.05)
        go.set()
        daemon.wait(lambda: bool(daemon.of("void")))
        assert daemon.booked == 0


def test_a_silent_daemon_does_not_hold_connect(tmp_path):
    path = str(tmp_path / "umad.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        with pytest.raises(DaemonTimeout):
            connect(path, timeout_s=0.05)


def test_threads_share_one_connection(daemon):
    daemon.handlers["status"] = lambda _: {"thread": 0}
    daemon.handlers["events"] = lambda params: {"next": params["since"], "events": []}
    with connect(daemon.path) as client, ThreadPoolExecutor(8) as pool:

        def many(thread):
            return [client.call("events", {"since": thread * 1000 + i})["next"] for i in range(100)]

        for thread, answers in enumerate(pool.map(many, range(8))):
            assert answers == [thread * 1000 + i for i in range(100)]
    assert len(daemon.of("hello")) == 1


@pytest.mark.slow
def test_one_slow_call_does_not_hold_up_another(daemon, silent):
    daemon.handlers["status"] = lambda _: silent
    with connect(daemon.path) as client, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(client.call, "status", timeout_s=0.5)
        daemon.wait(lambda: bool(daemon.of("status")))
        assert client.call("ping", timeout_s=0.2) == {}
        with pytest.raises(DaemonTimeout):
            slow.result()
        assert client.call("ping", timeout_s=0.2) == {}


def test_a_lost_connection_ends_calls_and_comes_back(daemon, silent):
    daemon.handlers["status"] = lambda _: silent
    with connect(daemon.path) as client, ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(client.call, "status") for _ in range(2)]
        daemon.wait(lambda: len(daemon.of("status")) == 2)
        daemon.cut()
        for call in calls:
            with pytest.raises(DaemonLost):
                call.result()
        daemon.wait(lambda: len(daemon.of("hello")) == 2)
        assert client.call("ping", timeout_s=2) == {}


def test_garbage_from_the_daemon_ends_the_connection(tmp_path):
    path = str(tmp_path / "umad.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def answer():
            peer, _ = listener.accept()
            with peer:
                peer.recv(4096)
                peer.sendall(b"\xc1")
                peer.recv(4096)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(DaemonLost, match="MessagePack"):
            connect(path)
        thread.join()


@pytest.mark.slow
def test_without_a_daemon_a_call_fails_soon(daemon):
    with connect(daemon.path) as client:
        daemon.stop()
        begin_s = monotonic()
        with pytest.raises(DaemonUnavailable):
            client.call("ping")
        with pytest.raises(DaemonUnavailable, match="systemctl start umad"):
            client.call("ping")
        assert monotonic() - begin_s < 1


def test_a_closed_client_says_so(daemon):
    client = connect(daemon.path)
    client.close()
    client.close()
    with pytest.raises(DaemonUnavailable, match="closed"):
        client.call("ping")
    assert not client.notify("progress", {"worker": 1, "stage": "x", "ratio": 0})


def test_notifications_arrive_while_idle_and_in_a_call(daemon, caplog):
    seen = []
    done = threading.Semaphore(0)

    def broken(_):
        raise RuntimeError("my fault")

    def note(params):
        seen.append((params["position"], threading.current_thread().name))
        client.call("ping")  # a callback may call
        done.release()

    def status(_):
        daemon.tell("queued", worker=1, what="admit", position=2, reason="")
        return {}

    daemon.handlers["status"] = status
    with connect(daemon.path) as client:
        client.on("queued", broken)
        client.on("queued", note)
        daemon.tell("queued", worker=1, what="admit", position=1, reason="")
        assert done.acquire(timeout=5)
        client.call("status")
        assert done.acquire(timeout=5)
    assert seen == [(1, "umad-client"), (2, "umad-client")]
    assert "my fault" in caplog.text


def test_a_full_socket_drops_reports_and_delays_nobody(daemon):
    began, stuck = threading.Event(), threading.Event()
    daemon.handlers["status"] = lambda _: began.set() or (stuck.wait(5) and {})
    report = {"worker": 1, "stage": "x" * 200, "ratio": 0.5}
    with connect(daemon.path) as client, ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.call, "status")
        assert began.wait(5)
        for _ in range(100_000):
            begin_s = monotonic()
            if not client.notify("progress", report):
                break
        assert monotonic() - begin_s < 0.05
        late = pool.submit(client.call, "ping")
        stuck.set()
        assert call.result() == {}
        assert late.result() == {}


def test_a_child_uses_a_connection_of_its_own(daemon):
    with connect(daemon.path) as client, client.worker("llama", quota="1MiB") as worker:
        burst = worker.admit(MIB)
        read_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            outcome = b"bad"
            try:
                assert not client.connected
                assert client.call("ping") == {}
                burst.release()  # the parent's: nothing happens
                try:
                    worker.admit(1)
                except LeaseNotFound:
                    outcome = b"own"
            finally:
                os.write(write_fd, outcome)
                os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(read_fd, 10) == b"own"
        os.close(read_fd)
        os.close(write_fd)
        assert len(daemon.of("hello")) == 2
        assert daemon.booked == MIB
        assert client.call("ping") == {}
        burst.release()
        assert daemon.booked == 0


def test_a_child_waits_for_no_lock_of_its_parents(daemon):
    with connect(daemon.path) as client:
        with client.lock:  # as another thread might hold it at that moment
            pid = os.fork()
            if pid == 0:
                signal.alarm(5)
                code = 1
                try:
                    client.on("reloaded", print)
                    assert client.call("ping") == {}
                    code = 0
                finally:
                    os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0


def test_allow_works_without_a_daemon_and_finds_it_later(make_daemon, until):
    daemon = make_daemon()
    with connect(daemon.path, on_unavailable="allow") as client:
        assert not client.connected
        worker = client.worker("llama", quota="1GiB")
        assert worker.id is None
        model = worker.load(lambda: bytearray(MIB))
        assert len(model) == MIB
        with worker.forward(MIB), worker.admit("2MiB") as burst:
            assert not burst.booked
        daemon.start()
        until(lambda: worker.id is not None)
        assert daemon.of("register")[0]["held"] == worker.held_bytes
        assert worker.admit(MIB).booked
        worker.close()


def test_deny_refuses_a_worker_without_a_daemon(daemon):
    with connect(daemon.path) as client:
        daemon.stop()
        with pytest.raises(DaemonUnavailable):
            client.worker("llama", quota=1)


def test_a_request_of_the_daemon_is_refused_politely(daemon):
    with connect(daemon.path) as client:
        daemon.ask("evict")
        daemon.wait(lambda: bool(daemon.answers))
        assert daemon.answers[0].error["code"] == "unknown_method"
        assert client.call("ping") == {}


@pytest.mark.parametrize(
    ("method", "params", "undone"),
    [
        ("init_lock", {"worker": 7}, "init_unlock"),
        ("admit", {"worker": 7, "bytes": 5}, "release"),
        ("register", {"model": "llama", "quota": 5}, "unregister"),
    ],
)
def test_whatever_is_granted_too_late_is_undone(daemon, method, params, undone):
    go = threading.Event()
    normal = getattr(daemon, f"do_{method}")

    def late(params):
        go.wait(5)
        return normal(params)

    daemon.handlers[method] = late
    with connect(daemon.path) as client:
        with pytest.raises(DaemonTimeout):
            client.call(method, params, timeout_s=0.02)
        go.set()
        daemon.wait(lambda: bool(daemon.of(undone)))


def test_a_daemon_that_stops_reading_is_left_at_the_deadline(daemon, until):
    began, stuck = threading.Event(), threading.Event()
    daemon.handlers["status"] = lambda _: began.set() or (stuck.wait(5) and {})
    report = {"worker": 1, "stage": "x" * 200, "ratio": 0.5}
    with connect(daemon.path) as client, ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.call, "status")
        assert began.wait(5)
        while client.notify("progress", report):
            pass
        with pytest.raises(DaemonTimeout, match="took no bytes"):
            client.call("ping", timeout_s=0.1)
        with pytest.raises(DaemonLost):
            call.result()
        stuck.set()
        until(lambda: client.connected)
        assert client.call("ping") == {}
