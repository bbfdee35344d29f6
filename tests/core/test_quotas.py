"""What a loaded worker may hold without asking is booked for it, however its quota came about."""

from typing import Any

import pytest

from tests.core.drive import Drive
from tests.core.fakes import MB, engine, identity
from umad.core.actions import SetLimit
from umad.errors import InvalidParams, InvariantBroken, NeverFits, QuotaDenied
from umad.values import Outsider

PROGRAM = Outsider(identity(70), "llama-server", 0, identity(7))


@pytest.fixture
def drive() -> Drive:
    made = Drive(engine('[memory]\nreserve = "1GiB"\nbudget = "2GiB"\n'))
    made.connect(7)
    made.look({7: 0})
    return made


def load(drive: Drive, worker: int, **asked: Any) -> dict[str, Any]:
    """A load from its reservation to its commit; the lease."""
    lease = drive.call(7, "reserve", worker=worker, **asked)
    ticket = {"lease": lease["lease"], "token": lease["token"]}
    kept = drive.call(7, "commit", measured=20 * MB, **ticket)
    covered(drive)
    return {**ticket, **kept}


def covered(drive: Drive) -> None:
    """Nobody is loaded who may hold more than is booked."""
    drive.look({7: 20 * MB, 70: 20 * MB})
    state = drive.engine.state
    state.check()
    for key, member in state.members.items():
        if member.state in ("loading", "ready", "draining"):
            assert member.worker.quota <= state.ledger.booked_by(key)
    shown = drive.engine.status(drive.now_s)
    for process in shown["processes"]:
        loaded = [one for one in shown["workers"] if one["pid"] == process["pid"]]
        if loaded and all(one["state"] != "registered" for one in loaded):
            assert process["limit"] - process["baseline"] == process["booked"]


def test_a_quota_raised_without_a_model_is_booked_by_the_next_load(drive: Drive) -> None:
    worker = drive.call(7, "register", model="w", quota=50 * MB, guard=True)["worker"]
    held = load(drive, worker, bytes=50 * MB)
    drive.call(7, "release", lease=held["lease"], token=held["token"])
    drive.call(7, "set_quota", worker=worker, quota=300 * MB)  # its bytes are not back yet
    drive.look({7: 0})
    assert drive.booked() == 0
    lease = drive.call(7, "reserve", worker=worker, bytes=50 * MB)  # as its client knows it
    assert lease["bytes"] == 300 * MB
    assert [one.limit for one in drive.last if isinstance(one, SetLimit)] == [300 * MB]
    kept = drive.call(7, "commit", lease=lease["lease"], token=lease["token"], measured=170 * MB)
    assert kept == {"bytes": 300 * MB}
    covered(drive)
    [shown] = drive.engine.status(drive.now_s)["workers"]
    assert (shown["quota"], shown["booked"], shown["peak"]) == (300 * MB, 300 * MB, 300 * MB)


@pytest.mark.parametrize(
    ("asked", "booked"),
    [
        ({}, 300),
        ({"bytes": 10 * MB}, 200),
        ({"bytes": 250 * MB}, 250),
        ({"parts": [50 * MB, 20 * MB]}, 200),
        ({"parts": [150 * MB, 120 * MB]}, 270),
    ],
)
def test_a_load_books_its_quota_at_least(drive: Drive, asked: Any, booked: int) -> None:
    worker = drive.call(7, "register", model="w", quota=200 * MB, peak=300 * MB)["worker"]
    lease = drive.call(7, "reserve", worker=worker, **asked)
    assert lease["bytes"] == booked * MB == drive.booked()
    covered(drive)
    ticket = {"lease": lease["lease"], "token": lease["token"]}
    assert drive.call(7, "commit", measured=MB, **ticket) == {"bytes": 200 * MB}
    covered(drive)


def test_lower_and_higher_again_in_every_state(drive: Drive) -> None:
    worker = drive.call(7, "register", model="w", quota=100 * MB, peak=150 * MB)["worker"]
    drive.call(7, "set_quota", worker=worker, quota=40 * MB)
    drive.call(7, "set_quota", worker=worker, quota=120 * MB)
    lease = drive.call(7, "reserve", worker=worker, bytes=60 * MB)
    assert lease["bytes"] == 120 * MB
    drive.call(7, "set_quota", worker=worker, quota=30 * MB)
    drive.call(7, "set_quota", worker=worker, quota=110 * MB)
    assert drive.refused(7, "set_quota", worker=worker, quota=121 * MB).code == "overloaded"
    covered(drive)
    drive.call(7, "commit", lease=lease["lease"], token=lease["token"], measured=MB)
    for quota in (30, 110, 500):
        drive.call(7, "set_quota", worker=worker, quota=quota * MB)
        assert drive.booked() == quota * MB
        covered(drive)


def test_a_quota_raised_while_it_waits_is_no_more_than_it_waits_for(drive: Drive) -> None:
    other = drive.call(7, "register", model="other", quota=2000 * MB)["worker"]
    held = load(drive, other)
    worker = drive.call(7, "register", model="w", quota=50 * MB, peak=100 * MB)["worker"]
    waits = drive.ask(7, "reserve", worker=worker, bytes=80 * MB, wait_s=60.0)
    assert drive.answer(waits) is None
    assert drive.refused(7, "set_quota", worker=worker, quota=81 * MB).code == "overloaded"
    drive.call(7, "set_quota", worker=worker, quota=80 * MB)
    drive.call(7, "release", lease=held["lease"], token=held["token"])
    drive.look({7: 0})
    granted = drive.answer(waits)
    assert isinstance(granted, dict)
    assert granted["bytes"] == 80 * MB
    covered(drive)


def test_a_load_of_before_a_restart_books_its_quota_at_least(drive: Drive) -> None:
    """Its client may have asked for less than its quota; what it says is what it asked."""
    back = drive.call(7, "register", model="w", quota=200 * MB, loading=50 * MB)
    assert drive.booked() == 200 * MB
    covered(drive)
    ticket = {"lease": back["lease"], "token": back["token"]}
    assert drive.call(7, "commit", measured=MB, **ticket) == {"bytes": 200 * MB}
    covered(drive)


def test_a_model_of_before_a_restart_books_its_quota(drive: Drive) -> None:
    drive.call(7, "register", model="w", quota=200 * MB, held=50 * MB)
    assert drive.booked() == 200 * MB
    covered(drive)


def test_a_program_books_its_quota_from_its_start_on(drive: Drive) -> None:
    worker = drive.call(
        7, "register", model="p", quota=100 * MB, peak=200 * MB, settle_s=5.0, process=70,
        outsider=PROGRAM,
    )["worker"]  # fmt: skip
    drive.call(7, "set_quota", worker=worker, quota=150 * MB)
    held = load(drive, worker, bytes=60 * MB)
    assert held["bytes"] == 150 * MB
    drive.now_s += 60
    for _ in range(2):
        drive.now_s += 6
        drive.look({7: 0, 70: 90 * MB})
    assert drive.booked() == 150 * MB
    covered(drive)


def test_a_peak_is_set_with_the_quota(drive: Drive) -> None:
    worker = drive.call(7, "register", model="w", quota=50 * MB, peak=60 * MB)["worker"]
    drive.call(7, "set_quota", worker=worker, quota=100 * MB, peak=120 * MB)
    assert drive.call(7, "reserve", worker=worker, bytes=120 * MB)["bytes"] == 120 * MB
    more = {"worker": worker, "quota": 100 * MB}
    assert isinstance(drive.refused(7, "set_quota", **more, peak=99 * MB), InvalidParams)
    assert isinstance(drive.refused(7, "set_quota", **more, peak=4096 * MB), NeverFits)


def test_a_refused_quota_names_itself_and_what_more_it_takes(drive: Drive) -> None:
    worker = drive.call(7, "register", model="llama", quota=40 * MB)["worker"]
    load(drive, worker)
    other = drive.call(7, "register", model="other", quota=1950 * MB)["worker"]
    load(drive, other)
    error = drive.refused(7, "set_quota", name="llama", quota=200 * MB)
    assert isinstance(error, QuotaDenied)
    assert error.message.startswith(
        "a quota of 200.0 MiB for llama takes 160.0 MiB more: 160.0 MiB asked of pool 'system', "
        "58.0 MiB free (bound by budget)"
    )
    assert (error.details["quota_bytes"], error.details["asked_bytes"]) == (200 * MB, 160 * MB)


def test_a_load_that_books_less_than_its_quota_is_a_bug_of_ours(drive: Drive) -> None:
    worker = drive.call(7, "register", model="w", quota=50 * MB)["worker"]
    held = load(drive, worker)
    ledger = drive.engine.state.ledger
    ledger.resize(ledger.leases[held["lease"]], 49 * MB)
    with pytest.raises(InvariantBroken, match="less than the quota"):
        drive.look({7: 0})
