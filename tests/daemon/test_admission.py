"""Admission with real processes: the init mutex, models that go for each other, recovery."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from tests.daemon.running import CONFIG, ROOT, Daemon, Raw, eventually, running
from umad.client import Client, Worker
from umad.errors import Fenced, LeaseNotFound, QuotaDenied, UmadError
from umad.units import MIB

pytestmark = pytest.mark.slow

COUNT = 50


def test_fifty_pass_the_init_mutex_whatever_its_holders_do(folder: Path) -> None:
    """C26: a holder is killed, one stops past its deadline, one forks and ends; never two."""
    log = folder / "log"
    with running(folder, '[leases]\ninit_timeout = "1s"') as daemon:
        command = [sys.executable, "-m", "tests.daemon.herd", daemon.socket, log, str(COUNT)]
        subprocess.run(command, cwd=ROOT, timeout=60, check=True)
        daemon.wait_for("init_lock_expired")
        assert daemon.status()["init"] == {"holder": None, "waiting": 0}
    lines = [line.split() for line in log.read_text().splitlines()]
    entered = {int(token): float(at) for what, token, at, _ in lines if what == "enter"}
    left = {int(token): float(at) for what, token, at, _ in lines if what == "leave"}
    assert sorted(entered) == list(range(1, COUNT + 1))  # everybody, once, in the tokens' order
    assert list(entered.values()) == sorted(entered.values())
    for token, then in pairwise(sorted(entered)):
        end_s = left.get(token, entered[token] + 0.95)  # the second leaves by its deadline
        assert entered[then] >= end_s, f"{then} came before {token} had left"
    assert [words[3] for words in lines if words[0] == "late"] == ["fenced"]
    assert max(left.values()) - min(entered.values()) < 5.0
    for token in (1, 3):  # the kernel tells of their end: the next one need not wait
        assert entered[token + 1] - left[token] < 0.3


class Model:
    """Holds nothing."""


def loaded(client: Client, name: str, quota: str, **more: object) -> tuple[Worker, Model]:
    worker = client.worker(name, quota=quota, **more)
    return worker, worker.load(Model)


def test_one_model_goes_for_another_and_its_place_is_taken(folder: Path) -> None:
    settings = '[leases]\nresidence_min = "0s"'
    asked: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()
    with (
        running(folder, settings) as daemon,
        daemon.client("old") as first,
        daemon.client("new") as second,
    ):
        old, model = loaded(first, "old", "1500MiB", on_evict=asked.put)
        new = second.worker("new", quota="1500MiB", on_evict=asked.put)
        with pytest.raises(QuotaDenied, match="old would have to go") as denied:
            new.load(Model, wait_s=0.0)
        assert denied.value.details["would_go"] == ["old"]
        with pytest.raises(QuotaDenied, match="no other model goes for it"):
            new.load(Model, wait_s=0.0, evict=False)
        came: queue.SimpleQueue[Model] = queue.SimpleQueue()
        thread = threading.Thread(target=lambda: came.put(new.load(Model, wait_s=10.0)))
        thread.start()
        told = asked.get(timeout=5)
        assert (told["for_worker"], told["worker"]) == ("new", old.id)
        assert old.keep()  # nobody else could go
        del model
        old.unload()
        kept = came.get(timeout=5)
        thread.join(5)
        shown = {one["name"]: one["state"] for one in daemon.status()["workers"]}
        assert shown == {"old": "cold", "new": "ready"}
        del kept


def test_what_people_ask_reaches_the_worker(folder: Path) -> None:
    heard: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()

    def note(name: str):
        return lambda told: heard.put((name, told["worker"]))

    with running(folder) as daemon, daemon.client() as client, Raw(daemon.socket) as admin:
        worker = client.worker(
            "m",
            quota="100MiB",
            on_evict=note("evict"),
            on_evict_cancelled=note("cancelled"),
            on_load=note("load"),
        )
        assert admin.call("load", name="m") == {"state": "cold"}
        assert heard.get(timeout=5) == ("load", worker.id)
        model = worker.load(Model)
        assert admin.call("evict", name="m")["state"] == "draining"
        assert heard.get(timeout=5) == ("evict", worker.id)
        assert admin.call("pin", name="m", pin=True) == {"pin": True}
        assert heard.get(timeout=5) == ("cancelled", worker.id)
        assert admin.call("set_quota", name="m", quota=50 * MIB) == {"quota": 50 * MIB}
        assert daemon.booked() == 50 * MIB
        del model


def test_a_configuration_is_read_again_and_a_bad_one_changes_nothing(daemon: Daemon) -> None:
    reloaded = threading.Event()
    with daemon.client() as client, Raw(daemon.socket) as admin:
        client.on("reloaded", lambda _: reloaded.set())
        client.worker("m", quota="1MiB")
        good = CONFIG.format(socket=daemon.socket, more='[leases]\nresidence_min = "1s"')
        daemon.config.write_text(
            good.replace("2GiB", "1GiB").replace("[daemon]", "[daemon]\nconnections_max = 99")
        )
        assert admin.call("reload") == {
            "changed": ["memory.budget", "leases.residence_min"],
            "restart": ["daemon.connections_max"],
        }
        assert reloaded.wait(5)
        eventually(lambda: daemon.status()["pools"][0]["budget"] == 1024 * MIB)
        daemon.config.write_text("[memory]\nbudget = 12\n[nonsense]\n")
        error = admin.call("reload")
        assert error["code"] == "config"
        assert "line 2: memory.budget" in error["message"]
        assert "line 3: nonsense" in error["message"]
        assert daemon.status()["pools"][0]["budget"] == 1024 * MIB
        assert daemon.wait_for("not_reloaded")
        daemon.config.write_text(good)
        assert admin.call("reload")["changed"] == ["memory.budget"]


def test_a_hangup_signal_has_it_read_again_too(daemon: Daemon) -> None:
    good = CONFIG.format(socket=daemon.socket, more="")
    daemon.config.write_text(good.replace("2GiB", "1GiB"))
    os.kill(daemon.pid, signal.SIGHUP)
    eventually(lambda: daemon.status()["pools"][0]["budget"] == 1024 * MIB)
    daemon.config.write_text("[nonsense]")
    os.kill(daemon.pid, signal.SIGHUP)
    assert "nonsense" in daemon.wait_for("not_reloaded")["why"]
    assert daemon.status()["pools"][0]["budget"] == 1024 * MIB


def test_fifty_workers_are_back_before_anything_new_is_granted(daemon: Daemon) -> None:
    """2 s after a kill -9 and a new start the books are what they were; nobody has two places."""
    with ExitStack() as stack:
        clients = [stack.enter_context(daemon.client(f"c{index}")) for index in range(5)]
        held = [
            loaded(client, f"m{index}-{number}", "20MiB")
            for index, client in enumerate(clients)
            for number in range(COUNT // 5)
        ]
        with Raw(daemon.socket) as stranger:
            worker = stranger.call("register", model="stale", quota=MIB)["worker"]
            stale = stranger.call("reserve", worker=worker)
        daemon.kill()
        daemon.start()
        began_s = time.monotonic()
        with Raw(daemon.socket) as peer:
            fresh = peer.call("register", model="fresh", quota=900 * MIB)["worker"]
            peer.call("register", model="late", quota=MIB)
            for method in ("void", "commit"):  # of the daemon before this one
                more = {"measured": 0} if method == "commit" else {}
                error = peer.call(method, lease=stale["lease"], token=stale["token"], **more)
                assert error["code"] in (LeaseNotFound.code, Fenced.code, "access_denied")
            answer = peer.call("reserve", worker=fresh, wait_s=10.0)
            assert answer["bytes"] == 900 * MIB, answer
        state = daemon.status()
        took_s = time.monotonic() - began_s
        names = [worker["name"] for worker in state["workers"] if worker["state"] == "ready"]
        assert len(names) == COUNT
        assert state["pools"][0]["booked"] >= COUNT * 20 * MIB
        assert took_s < 2.0
        assert state["counters"]["grants"] == 1
        for one, _ in held:
            with pytest.raises(UmadError):  # it has its model, and no second place
                one.load(Model, wait_s=0.0)
