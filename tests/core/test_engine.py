import pytest

from tests.core.drive import Drive
from tests.core.fakes import MB, engine, identity
from umad.core import deadlines
from umad.core.actions import Look, Unwatch
from umad.core.pace import FAST_PACE_S
from umad.errors import InvariantBroken
from umad.units import GIB


@pytest.fixture
def drive() -> Drive:
    return Drive(engine())


def breach(drive: Drive) -> None:
    """Worker greedy of pid 7, quota 300 MiB, is seen with 400."""
    drive.loaded(7, "greedy", 300 * MB)
    drive.look({7: 400 * MB})


def test_a_breach_is_revoked_then_killed_then_gone(drive: Drive) -> None:
    breach(drive)
    assert drive.event("revoked")["measured_bytes"] == 400 * MB
    [note] = drive.notified("revoke")
    assert note.connection == 7
    assert note.params["grace_s"] == 0.05
    assert drive.kills() == []
    assert deadlines.next_s(drive.engine.state) == pytest.approx(drive.now_s + 0.05)
    drive.pass_time(0.05)
    assert drive.last == [Look()]
    drive.look({7: 500 * MB})
    assert drive.kills() == [7]
    drive.engine.kill_sent(identity(7), drive.now_s + 0.001)
    drive.now_s += 0.02
    drive.exit(7)
    stopped = drive.event("stopped")
    assert stopped["fence"] == "sigkill"
    assert stopped["worker"] == "greedy"
    assert stopped["reason"] == "quota_exceeded"
    assert (stopped["limit_bytes"], stopped["measured_bytes"]) == (300 * MB, 400 * MB)
    assert stopped["measured_at_kill_bytes"] == 500 * MB
    assert stopped["seen_to_kill_s"] == pytest.approx(0.051)
    assert stopped["seen_to_gone_s"] == pytest.approx(0.07)
    assert (stopped["freed_bytes"], stopped["left_bytes"]) == (300 * MB, 0)
    assert Unwatch(identity(7)) in drive.last
    assert drive.booked() == 0


def test_who_gives_the_bytes_back_in_time_lives(drive: Drive) -> None:
    breach(drive)
    drive.now_s += 0.05
    drive.look({7: 250 * MB})
    assert drive.kills() == []
    assert drive.events() == ["complied"]
    drive.now_s += 0.2
    drive.look({7: 250 * MB})
    assert drive.events() == []


def test_a_worker_that_dies_of_itself_after_the_revoke(drive: Drive) -> None:
    breach(drive)
    drive.exit(7)
    assert drive.event("stopped")["fence"] == "revoke"
    assert drive.event("stopped")["seen_to_kill_s"] is None


def test_no_evidence_no_kill(drive: Drive) -> None:
    breach(drive)
    drive.now_s += 0.05
    drive.look({7: None})
    assert drive.kills() == []
    drive.now_s += 0.2
    drive.look({7: 400 * MB})
    assert drive.kills() == [7]


def test_without_grace_the_kill_comes_with_the_sample() -> None:
    drive = Drive(engine('[memory]\nbudget = "2GiB"\n[enforcement]\ngrace = "0s"\n'))
    breach(drive)
    assert drive.kills() == [7]


def test_a_loading_worker_is_held_to_its_peak(drive: Drive) -> None:
    drive.connect(7)
    worker = drive.call(7, "register", model="llama", quota=300 * MB, peak=900 * MB)["worker"]
    drive.call(7, "reserve", worker=worker)
    drive.look({7: 850 * MB})
    assert drive.events() == []
    drive.look({7: 1100 * MB})
    assert drive.event("revoked")["reason"] == "peak_exceeded"


def test_a_registered_worker_is_held_to_its_quota_before_it_reserves(drive: Drive) -> None:
    drive.connect(7)
    drive.call(7, "register", model="llama", quota=512 * MB)
    drive.look({7: 500 * MB})
    assert drive.events() == []
    drive.look({7: 600 * MB})
    assert drive.events() == ["revoked"]


def test_a_process_is_held_to_the_sum_of_its_workers(drive: Drive) -> None:
    drive.loaded(7, "a", 300 * MB)
    drive.loaded(7, "b", 300 * MB)
    drive.look({7: 590 * MB})
    assert drive.events() == []
    drive.look({7: 610 * MB})
    assert drive.event("revoked")["worker"] == "a,b"
    assert len(drive.notified("revoke")) == 2


def test_who_was_cut_off_is_still_judged_and_who_left_is_not(drive: Drive) -> None:
    drive.loaded(7, "a", 300 * MB)
    drive.engine.disconnected(7, drive.now_s)
    drive.look({7: 400 * MB})
    assert drive.events() == ["revoked"]
    assert drive.notified("revoke") == []
    drive.loaded(8, "b", 300 * MB)
    drive.call(8, "unregister", worker=2)
    drive.now_s += 0.02
    drive.look({7: 100 * MB, 8: 400 * MB})
    assert drive.events() == ["complied"]


def test_what_a_worker_that_left_still_holds_is_not_held_against_its_sibling(
    drive: Drive,
) -> None:
    drive.loaded(7, "a", 300 * MB)
    drive.loaded(7, "b", 300 * MB)
    drive.call(7, "unregister", worker=1)
    drive.look({7: 590 * MB})
    assert "revoked" not in drive.events()


def test_the_worst_offender_goes_first_and_the_second_waits(drive: Drive) -> None:
    drive.loaded(7, "a", 100 * MB)
    drive.loaded(8, "b", 100 * MB)
    drive.look({7: 200 * MB, 8: 400 * MB})
    drive.now_s += 0.05
    drive.look({7: 200 * MB, 8: 400 * MB})
    assert drive.kills() == [8]
    drive.now_s += 0.05
    drive.look({7: 200 * MB, 8: 400 * MB})
    assert drive.kills() == []
    drive.exit(8)
    drive.now_s += 0.01
    drive.look({7: 200 * MB})
    assert drive.kills() == [7]


def test_a_process_that_cannot_be_killed_does_not_protect_the_next(drive: Drive) -> None:
    drive.loaded(7, "stuck", 100 * MB)
    drive.loaded(8, "b", 100 * MB)
    drive.look({7: 400 * MB})
    drive.now_s += 0.05
    drive.look({7: 400 * MB})
    assert drive.kills() == [7]
    drive.now_s += 5.0
    drive.look({7: 400 * MB, 8: 300 * MB})
    assert drive.event("unkillable")["pid"] == 7
    assert drive.engine.status(drive.now_s)["processes"][0]["verdict"] == "unkillable"
    drive.now_s += 0.05
    drive.look({7: 400 * MB, 8: 300 * MB})
    assert drive.kills() == [8]
    assert drive.booked() == 200 * MB  # what it holds stays booked
    drive.now_s += 5.0
    drive.look({7: 400 * MB})
    assert drive.events().count("unkillable") == 1  # that of pid 8


def test_the_verdict_is_shown(drive: Drive) -> None:
    breach(drive)
    assert drive.engine.status(drive.now_s)["processes"][0]["verdict"] == "revoked"
    drive.now_s += 0.1
    drive.look({7: 400 * MB})
    assert drive.engine.status(drive.now_s)["processes"][0]["verdict"] == "killed"


def test_the_kernel_alone_says_that_a_process_has_ended(drive: Drive) -> None:
    drive.loaded(7, "a", 300 * MB)
    drive.look(gone=(7,))
    assert drive.booked() == 300 * MB  # a tree that stands in for / does not know our processes
    drive.exit(7)
    assert drive.event("exited") == {"pid": 7, "workers": "a", "freed_bytes": 300 * MB}
    assert drive.booked() == 0
    assert drive.exit(7) == []


def test_broken_memory_grants_nothing_and_kills_nobody(drive: Drive) -> None:
    worker = drive.loaded(7, "a", 300 * MB)
    drive.look({7: 100 * MB}, safe=None)
    error = drive.refused(7, "admit", worker=worker, bytes=MB)
    assert (error.code, error.retryable) == ("memory_unknown", True)
    assert drive.engine.status(drive.now_s)["pools"][0]["free"] is None
    assert drive.engine.status(drive.now_s)["pools"][0]["problem"] == "garbage"
    request = drive.ask(7, "admit", worker=worker, bytes=MB, wait_s=5.0)
    drive.look({7: 100 * MB})
    assert drive.answer(request) is not None


def test_a_pool_that_vanished_is_unknown(drive: Drive) -> None:
    from dataclasses import replace

    from tests.core.fakes import snapshot

    worker = drive.loaded(7, "a", 300 * MB)
    drive.engine.observe(replace(snapshot(drive.now_s), pools={}), drive.now_s)
    assert drive.refused(7, "admit", worker=worker, bytes=MB).code == "memory_unknown"


def test_physical_room_binds_below_the_budget(drive: Drive) -> None:
    worker = drive.loaded(7, "a", 300 * MB)
    # 1 GiB reserve; of what is booked and unused, 200 MiB must stay free as well.
    drive.look({7: 100 * MB}, safe=GIB + 250 * MB)
    pool = drive.engine.status(drive.now_s)["pools"][0]
    assert (pool["free"], pool["binding"]) == (50 * MB, "MemAvailable")
    error = drive.refused(7, "admit", worker=worker, bytes=51 * MB)
    assert error.details["binding"] == "MemAvailable"
    drive.call(7, "admit", worker=worker, bytes=50 * MB)


def test_a_budget_that_shrinks_below_a_wait_ends_the_wait(drive: Drive) -> None:
    drive.loaded(7, "a", 1800 * MB)
    request = drive.ask(7, "admit", worker=1, bytes=900 * MB, wait_s=50.0)
    drive.look({7: 10 * MB}, capacity=GIB + 800 * MB)
    answer = drive.answer(request)
    assert answer is not None
    assert getattr(answer, "code", None) == "never_fits"


def test_the_pace_is_fast_while_bytes_come_back(drive: Drive) -> None:
    assert drive.engine.pace(drive.now_s).look_s == 0.2
    worker = drive.loaded(7, "a", 300 * MB)
    drive.call(7, "unregister", worker=worker)
    assert drive.engine.pace(drive.now_s).look_s == FAST_PACE_S
    drive.look({7: 250 * MB})
    assert drive.engine.pace(drive.now_s + 6.0).look_s == 0.2  # it takes long: no hurry
    drive.look({7: 0})
    assert drive.engine.pace(drive.now_s).look_s == 0.2


def test_a_broken_invariant_is_raised(drive: Drive) -> None:
    drive.loaded(7, "a", 300 * MB)
    drive.engine.state.ledger._booked["system"] += 1
    with pytest.raises(InvariantBroken):
        drive.look({7: 1})


def test_nothing_is_due_when_nothing_is_open(drive: Drive) -> None:
    assert deadlines.next_s(drive.engine.state) is None
    assert drive.engine.advance(5.0) == []
    assert drive.engine.disconnected(99, 5.0) == []
    drive.engine.kill_sent(identity(5), 5.0)
