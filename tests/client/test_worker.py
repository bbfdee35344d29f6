"""A worker's life: register, load, forward, burst, unload, and every way it may go wrong."""

import gc
import os
import threading
import weakref

import pytest

from umad.client import connect
from umad.client.memory import process_bytes
from umad.errors import (
    DaemonUnavailable,
    InvalidParams,
    LeaseNotFound,
    QuotaDenied,
    QuotaExceeded,
    Recovering,
    WaitedTooLong,
    WorkerRevoked,
)

MIB = 1 << 20


class Model:
    """Something with weights that can be referenced weakly."""

    def __init__(self, size=8 * MIB):
        self.weights = bytearray(os.urandom(MIB) * (size // MIB))


@pytest.fixture
def client(daemon):
    with connect(daemon.path, timeout_s=2) as client:
        yield client


def methods(daemon):
    return [name for name, _ in daemon.calls]


def test_a_worker_registers_and_unregisters(daemon, client):
    with client.worker("llama", quota="40GiB", peak=46 << 30, instance=1, priority=3) as worker:
        assert worker.name == "llama/1"
        assert worker.id is not None
    (sent,) = daemon.of("register")
    assert (sent["quota"], sent["peak"], sent["priority"]) == (40 << 30, 46 << 30, 3)
    assert sent["thread"] == threading.get_native_id()
    assert len(daemon.of("unregister")) == 1


@pytest.mark.parametrize("quota", [True, 1.0, float("nan"), None, 0, -1, "40", "4gib", [], 2**63])
def test_a_quota_that_is_none_is_refused_before_it_is_sent(daemon, client, quota):
    with pytest.raises(InvalidParams, match="quota"):
        client.worker("llama", quota=quota)
    assert daemon.of("register") == []


def test_load_goes_through_its_steps_in_order(daemon, client):
    with client.worker("llama", quota="64MiB", peak="100MiB") as worker:
        model = worker.load(Model, wait_s=1)
        assert methods(daemon)[2:] == ["reserve", "init_lock", "commit", "init_unlock"]
        assert daemon.of("reserve")[0]["bytes"] == 100 * MIB
        measured = daemon.of("commit")[0]["measured"]
        assert 7 * MIB <= measured < 12 * MIB
        assert worker.held_bytes == measured == daemon.booked
        with pytest.raises(InvalidParams, match="unload it first"):
            worker.load(Model)
        del model
    daemon.wait(lambda: bool(daemon.of("unregister")))


def test_unload_gives_memory_back_before_it_says_so(daemon, client):
    with client.worker("llama", quota="64MiB") as worker:
        model = worker.load(lambda: Model(32 * MIB))
        seen = []

        def release(params):
            seen.append(process_bytes())
            return daemon.do_release(params)

        daemon.handlers["release"] = release
        loaded = process_bytes()
        ring = [model]
        ring.append(ring)  # a cycle holds it until the collector runs
        del model, ring
        assert worker.unload() >= 0
        assert seen[0] <= loaded - 30 * MIB
        assert (daemon.booked, daemon.leaked) == (0, 0)
        assert worker.unload() == 0
        worker.load(lambda: (1, 2))
        assert worker.unload() >= 0
        assert len(daemon.of("release")) == 2


def test_a_model_without_bytes_is_loaded_too(daemon, client, monkeypatch):
    monkeypatch.setattr("umad.client.worker.process_bytes", lambda: 7)
    with client.worker("llama", quota="64MiB") as worker:
        assert not worker.loaded
        model = worker.load(Model)
        assert worker.held_bytes == 0
        assert worker.loaded
        del model
        assert not worker.loaded


def test_a_dropped_model_is_released_once_and_counted(daemon, client):
    with client.worker("llama", quota="64MiB") as worker:
        model = worker.load(Model)
        assert daemon.booked
        del model
        gc.collect()
        daemon.wait(lambda: daemon.leaked == 1)
        assert daemon.booked == 0
        assert worker.held_bytes == 0
        assert worker.unload() == 0
        again = worker.load(Model)
    assert again.weights
    assert len(daemon.of("release")) == 1


def test_a_failed_load_drops_its_memory_and_voids(daemon, client):
    at_void = []

    def void(params):
        at_void.append(process_bytes())
        return daemon.do_void(params)

    daemon.handlers["void"] = void
    kept = []

    def loader():
        weights = Model(64 * MIB)
        try:
            raise ValueError(len(weights.weights))
        except ValueError as error:
            raise MemoryError from error

    before = process_bytes()
    with client.worker("llama", quota="64MiB") as worker:
        with pytest.raises(MemoryError) as caught:
            worker.load(loader)
        kept.append(caught.value)  # keeping the error must not keep the tensors
        assert at_void[0] - before < 8 * MIB
        assert methods(daemon)[-2:] == ["init_unlock", "void"]
        assert daemon.booked == 0
        worker.load(Model)


def test_more_than_the_quota_is_refused_and_dropped(daemon, client):
    def commit(_):
        raise QuotaExceeded("8 MiB is above 1 MiB")

    daemon.handlers["commit"] = commit
    born = []

    def loader():
        model = Model()
        born.append(weakref.ref(model))
        return model

    with client.worker("llama", quota="1MiB") as worker:
        with pytest.raises(MemoryError):
            worker.load(loader)
        assert born[0]() is None
        assert daemon.booked == 0


def test_no_room_and_no_turn_leave_nothing_booked(daemon, client):
    def refuse(error):
        def handler(_):
            raise error

        return handler

    with client.worker("llama", quota="1MiB") as worker:
        daemon.handlers["init_lock"] = refuse(WaitedTooLong("busy"))
        with pytest.raises(WaitedTooLong):
            worker.load(Model)
        assert daemon.booked == 0
        daemon.handlers["reserve"] = refuse(QuotaDenied("no room"))
        with pytest.raises(QuotaDenied):
            worker.load(Model)
        assert "init_unlock" not in methods(daemon)


def test_a_daemon_that_recovers_is_asked_again(daemon, client):
    answers = iter([Recovering("a moment", retry_after_s=0.01), None])

    def admit(params):
        error = next(answers)
        if error:
            raise error
        return daemon.grant(params["bytes"])

    with client.worker("llama", quota="1MiB") as worker:
        daemon.handlers["admit"] = admit
        with worker.admit(MIB, wait_s=1) as burst:
            assert burst.booked
        answers = iter([Recovering("a moment", retry_after_s=0.01)])
        with pytest.raises(Recovering):
            worker.admit(MIB, wait_s=0)


def test_forward_reports_and_ends_its_burst(daemon, client):
    with client.worker("llama", quota="1MiB") as worker:
        with worker.forward("2MiB", predicted=7, batch=2, wait_s=0) as forward:
            assert daemon.booked == 2 * MIB
            forward.tokens = 5
            forward.peak = 9
        daemon.wait(lambda: daemon.booked == 0)
        with worker.forward():
            pass
        daemon.wait(lambda: len(daemon.of("forward_done")) == 2)
    first, second = daemon.of("forward_done")
    assert (first["predicted"], first["tokens"], first["batch"], first["peak"]) == (7, 5, 2, 9)
    assert first["seconds"] > 0
    assert "lease" in first
    assert "lease" not in second
    assert daemon.of("release") == []
    gc.collect()
    assert daemon.leaked == 0


def test_an_explicit_release_in_a_forward_ends_it_once(daemon, client):
    with client.worker("llama", quota="1MiB") as worker:
        with worker.admit(MIB, ttl_s=3) as burst:
            burst.release()
            burst.release()
        assert len(daemon.of("release")) == 1
        assert daemon.of("admit")[0]["ttl_s"] == 3


def revoke(daemon, worker):
    daemon.tell(
        "revoke",
        worker=worker.id,
        reason="over quota",
        quota=1,
        measured=2,
        source="statm",
        grace_s=0.1,
    )


def test_a_revoked_worker_stops_before_and_after_a_forward(daemon, client):
    told = threading.Event()
    reasons = []

    def on_revoke(params):
        reasons.append((params["reason"], threading.current_thread().name))
        told.set()

    with (
        client.worker("llama", quota="1MiB", on_revoke=on_revoke) as worker,
        client.worker("bert", quota="1MiB") as neighbour,
    ):
        # The end of the forward raises, so it is part of the block.
        with pytest.raises(WorkerRevoked):  # noqa: PT012, SIM117
            with worker.forward():
                revoke(daemon, worker)
                assert worker.revoked.wait(5)
        assert told.wait(5)
        assert reasons == [("over quota", "umad-client")]
        for act in (lambda: worker.forward().__enter__(), lambda: worker.admit(1)):
            with pytest.raises(WorkerRevoked):
                act()
        with pytest.raises(WorkerRevoked):
            worker.load(Model)
        assert not neighbour.revoked.is_set()
        with neighbour.forward():
            pass


def test_a_revoke_during_a_load_drops_the_model(daemon, client):
    with client.worker("llama", quota="1MiB") as worker:

        def loader():
            revoke(daemon, worker)
            assert worker.revoked.wait(5)
            return Model()

        with pytest.raises(WorkerRevoked):
            worker.load(loader)
        assert daemon.booked == 0


@pytest.mark.slow
def test_a_restart_of_the_daemon_rebuilds_its_books(daemon, client):
    with client.worker("llama", quota="64MiB") as worker:
        model = worker.load(Model)
        held = worker.held_bytes
        old_burst = worker.admit(MIB)
        daemon.stop()
        with worker.forward():  # inference goes on
            pass
        with pytest.raises(DaemonUnavailable):
            worker.admit(MIB)
        daemon.leases.clear()
        daemon.restart_ids()
        daemon.start()
        daemon.wait(lambda: len(daemon.of("register")) == 2)
        assert daemon.of("register")[1]["held"] == held
        daemon.do_init_lock({})  # takes a number, so that the next lease is the old one's twin
        with worker.admit(MIB) as burst:
            assert burst._hold.lease == old_burst._hold.lease
            old_burst.release()  # of a daemon that is gone: must not end a lease of the new one
            assert daemon.booked == held + MIB
        assert daemon.booked == held
        model.weights = b""
        worker.unload()
        assert (daemon.booked, daemon.leaked) == (0, 0)


def test_who_was_revoked_before_a_restart_hears_of_it_and_does_not_come_again(
    daemon, client, until
):
    def refuse(_):
        raise WorkerRevoked("it was over its quota before the daemon restarted")

    heard = []
    worker = client.worker("m", quota=MIB, on_revoke=heard.append)
    other = client.worker("other", quota=MIB)
    daemon.handlers["register"] = refuse
    daemon.stop()
    daemon.start()
    until(lambda: len(heard) == 1)
    assert "before the daemon restarted" in heard[0]["reason"]
    assert worker.revoked.is_set()
    until(other.revoked.is_set)
    with pytest.raises(WorkerRevoked, match="before the daemon restarted"):
        worker.load(object)
    del daemon.handlers["register"]
    count = len(daemon.of("register"))
    daemon.stop()
    daemon.start()
    daemon.wait(lambda: len(daemon.of("hello")) == 3)
    until(lambda: client.connected)
    client.call("ping")
    assert len(daemon.of("register")) == count
    assert len(heard) == 1


def test_a_restart_in_the_middle_of_a_load_books_what_was_loaded(daemon, client):
    with client.worker("llama", quota="64MiB") as worker:

        def loader():
            daemon.stop()
            daemon.leases.clear()
            daemon.start()
            return Model()

        model = worker.load(loader)
        assert worker.held_bytes == daemon.booked >= 7 * MIB
        [_, again] = daemon.of("register")
        assert again["loading"] == 64 * MIB
        assert len(daemon.of("reserve")) == 1, "the load was booked again by the registration"
        with worker.forward():
            pass
        model.weights = b""
        worker.unload()
        assert (daemon.booked, daemon.leaked) == (0, 0)


def test_a_load_that_fails_after_a_restart_leaves_nothing(daemon, client, until):
    with client.worker("llama", quota="64MiB") as worker:

        def loader():
            daemon.stop()
            daemon.leases.clear()
            daemon.start()
            until(lambda: daemon.booked == 64 * MIB)
            raise ValueError("the file is damaged")

        with pytest.raises(ValueError, match="damaged"):
            worker.load(loader)
        daemon.wait(lambda: daemon.booked == 0)
        assert len(daemon.of("init_unlock")) == 1
        assert worker.load(Model).weights


@pytest.mark.parametrize("fails", [False, True])
def test_a_load_that_ends_while_the_daemon_takes_it_back(daemon, client, fails):
    """Without waiting for the daemon: it hears of it when it has taken the worker back."""
    begun, go = threading.Event(), threading.Event()

    def register(params):
        begun.set()
        assert go.wait(5)
        return daemon.do_register(params)

    def loader():
        daemon.stop()
        daemon.leases.clear()
        daemon.handlers["register"] = register
        daemon.start()
        assert begun.wait(5)
        if fails:
            raise ValueError
        return Model()

    client.on_unavailable = "allow"
    with client.worker("llama", quota="64MiB") as worker:
        if fails:
            with pytest.raises(ValueError):  # noqa: PT011
                worker.load(loader)
        else:
            model = worker.load(loader)
            assert model.weights
        go.set()
        daemon.wait(lambda: len(daemon.of("register")) == 2)
        assert daemon.of("register")[1]["loading"] == 64 * MIB
        daemon.wait(lambda: len(daemon.of("init_unlock")) == 1)
        daemon.wait(lambda: daemon.booked == worker.held_bytes)
        assert (worker.held_bytes > 0) is not fails


def test_a_daemon_that_dies_before_the_load_begins_ends_it(daemon, client):
    def init_lock(_):
        daemon.cut()
        daemon.restart_ids()
        return daemon.do_init_lock({})

    with client.worker("llama", quota="64MiB") as worker:
        daemon.handlers["init_lock"] = init_lock
        with pytest.raises(DaemonUnavailable):
            worker.load(lambda: pytest.fail("nothing may be loaded"))


def test_a_connection_that_is_lost_during_a_load_leaves_its_booking(daemon, client):
    with client.worker("llama", quota="64MiB") as worker:

        def loader():
            daemon.cut()
            return Model()

        model = worker.load(loader)
        assert worker.held_bytes == daemon.booked >= 7 * MIB
        client.call("ping")
        assert len(daemon.of("reserve")) == 1
        assert daemon.of("unregister") == [], "the daemon took it back with its booking"
        model.weights = b""
        worker.unload()
        assert (daemon.booked, daemon.leaked) == (0, 0)


def test_an_unload_while_the_daemon_takes_the_worker_back_leaves_nothing_booked(daemon, client):
    begun, go = threading.Event(), threading.Event()

    def register(params):
        begun.set()
        assert go.wait(5)
        return daemon.do_register(params)

    with client.worker("llama", quota="64MiB") as worker:
        model = worker.load(Model)
        daemon.stop()
        daemon.leases.clear()
        daemon.handlers["register"] = register
        daemon.start()
        assert begun.wait(5)
        model.weights = b""
        worker.unload()
        go.set()
        daemon.wait(lambda: len(daemon.of("register")) == 2)
        assert daemon.of("register")[1]["held"]
        daemon.wait(lambda: daemon.booked == 0)
        assert daemon.leaked == 0


def test_a_release_without_a_daemon_is_made_up_for(daemon, client):
    with client.worker("llama", quota="64MiB") as worker:
        burst = worker.admit(MIB)
        refused = threading.Event()

        def gone(_):
            refused.set()
            raise VersionMismatch("not yet")

        from umad.errors import VersionMismatch

        daemon.handlers["hello"] = gone
        daemon.cut()
        assert refused.wait(5)
        burst.release()
        assert daemon.booked == MIB
        del daemon.handlers["hello"]
        daemon.wait(lambda: daemon.booked == 0)
        assert daemon.leaked == 0


@pytest.mark.slow
def test_a_worker_that_is_not_taken_back_is_offered_again(daemon, client, caplog):
    with client.worker("llama", quota="64MiB") as worker:
        refusals = iter([Recovering("not yet")])

        def register(params):
            for error in refusals:
                raise error
            return daemon.do_register(params)

        daemon.handlers["register"] = register
        daemon.cut()
        daemon.wait(lambda: len(daemon.of("register")) == 3)
        assert "was not taken back: not yet" in caplog.text
        with worker.admit(MIB):
            pass


def test_progress_is_reported_and_checked(daemon, client):
    with client.worker("llama", quota="64MiB") as worker:
        worker.progress("reading", 0.5)
        daemon.wait(lambda: bool(daemon.of("progress")))
        assert daemon.of("progress") == [{"worker": worker.id, "stage": "reading", "ratio": 0.5}]
        with pytest.raises(InvalidParams, match="ratio"):
            worker.progress("reading", 1.5)


@pytest.mark.slow
def test_a_long_forward_asks_for_more_time_when_half_has_passed(daemon, client):
    lasts_s = [60.0]

    def admit(params):
        return {**daemon.grant(params["bytes"]), "deadline_s": lasts_s[0]}

    daemon.handlers["admit"] = admit
    daemon.handlers["extend"] = lambda _: {"deadline_s": 60.0}
    with client.worker("llama", quota="64MiB") as worker:
        with worker.forward(MIB) as forward:
            forward.extend()
        assert daemon.of("extend") == []
        lasts_s[0] = 0.0
        with worker.forward(MIB) as forward:
            forward.extend()
            forward.extend()  # it has a minute now
        assert len(daemon.of("extend")) == 1
        with worker.forward() as forward:  # within the quota: nothing was lent
            forward.extend()
        assert len(daemon.of("extend")) == 1


def test_a_burst_that_cannot_be_extended_goes_on(daemon, client, caplog):
    def extend(_):
        raise LeaseNotFound("it has expired")

    daemon.handlers["admit"] = lambda params: {**daemon.grant(params["bytes"]), "deadline_s": 0}
    daemon.handlers["extend"] = extend
    with client.worker("llama", quota="64MiB") as worker:
        burst = worker.admit(MIB)
        burst.extend()
        burst.extend()
        assert len(daemon.of("extend")) == 1, "it is not asked for again"
        assert "was not extended: it has expired" in caplog.text
        other = worker.admit(MIB)
        daemon.stop()
        other.extend()  # a daemon that comes back books it anew
        other.release()


def test_a_thousand_dropped_bursts_are_released_and_counted(daemon, client):
    with client.worker("llama", quota="64MiB") as worker:
        for _ in range(1000):
            worker.admit(MIB)
        gc.collect()
        daemon.wait(lambda: len(daemon.of("release")) == 1000)
        assert (daemon.booked, daemon.leaked) == (0, 1000)


def test_bursts_in_a_cycle_wait_for_the_collector_or_their_ttl(daemon, client):
    class Ring:
        def __init__(self, burst):
            self.burst, self.me = burst, self

    with client.worker("llama", quota="64MiB") as worker:
        gc.disable()
        try:
            for _ in range(50):
                Ring(worker.admit(MIB, ttl_s=0.5))
            assert daemon.booked == 50 * MIB  # only the daemon's ttl can end them now
            assert {params["ttl_s"] for params in daemon.of("admit")} == {0.5}
        finally:
            gc.enable()
        gc.collect()
        daemon.wait(lambda: daemon.leaked == 50)
