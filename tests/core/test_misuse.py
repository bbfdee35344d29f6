"""What a clumsy or hostile client asks in an order that nobody meant."""

import pytest

from tests.core.drive import Drive
from tests.core.fakes import MB, engine, identity, peer
from umad.core import registration
from umad.core.access import Permission
from umad.core.actions import Notify
from umad.errors import NameTaken, Overloaded
from umad.values import Outsider

PROGRAM = Outsider(identity(70), "llama-server", 0, identity(7))


@pytest.fixture
def drive() -> Drive:
    drive = Drive(engine('[memory]\nreserve = "1GiB"\nbudget = "2GiB"\n'))
    drive.connect(7)
    drive.look()
    return drive


def program(drive: Drive) -> dict[str, int]:
    """A program with a peak, settling; its lease."""
    worker = drive.call(
        7, "register", model="p", quota=100 * MB, peak=200 * MB, settle_s=0.0, process=70,
        outsider=PROGRAM,
    )["worker"]  # fmt: skip
    lease = drive.call(7, "reserve", worker=worker)
    ticket = {"lease": lease["lease"], "token": lease["token"]}
    drive.call(7, "commit", **ticket, measured=0)
    return {"worker": worker, **ticket}


@pytest.mark.parametrize("what", ["admit", "release", "unregister"])
def test_a_program_that_settles_survives_whatever_its_launcher_asks(
    drive: Drive, what: str
) -> None:
    held = program(drive)
    params = {
        "admit": {"worker": held["worker"], "bytes": 1},
        "release": {"lease": held["lease"], "token": held["token"]},
        "unregister": {"worker": held["worker"]},
    }[what]
    drive.ask(7, what, **params)
    for _ in range(3):
        drive.now_s += 1
        drive.look({70: 60 * MB})
    booked = sum(lease.bytes for lease in drive.engine.state.ledger.leases.values())
    assert booked <= 100 * MB + 1 or what == "release"


def test_a_program_under_quota_cannot_take_its_own_name_back(drive: Drive) -> None:
    program(drive)
    drive.engine.disconnected(7, drive.now_s)
    drive.engine.connected(70, peer(70))
    error = drive.refused(70, "register", model="p", quota=100 * MB)
    assert isinstance(error, NameTaken)


def test_a_second_reserve_takes_the_place_of_the_first(drive: Drive) -> None:
    worker = drive.call(7, "register", model="a", quota=1900 * MB)["worker"]
    other = drive.call(7, "register", model="b", quota=900 * MB)["worker"]
    drive.call(7, "reserve", worker=worker)
    first = drive.ask(7, "reserve", worker=other, wait_s=100.0)
    assert drive.answer(first) is None
    second = drive.ask(7, "reserve", worker=other, wait_s=100.0)
    assert isinstance(drive.answer(first), Exception)
    assert drive.answer(second) is None
    assert len(drive.engine.state.loads) == 1


def test_a_worker_whose_wait_was_cut_off_is_waiting_no_more(drive: Drive) -> None:
    drive.connect(8)
    drive.call(8, "reserve", worker=drive.call(8, "register", model="a", quota=1900 * MB)["worker"])
    waiting = drive.call(7, "register", model="b", quota=900 * MB)["worker"]
    drive.ask(7, "reserve", worker=waiting, wait_s=100.0)
    assert drive.engine.state.members[waiting].state == "waiting"
    drive.engine.disconnected(7, drive.now_s)
    assert drive.engine.state.members[waiting].state == "registered"


def test_a_quota_is_not_raised_beyond_a_load_under_way(drive: Drive) -> None:
    worker = drive.call(7, "register", model="a", quota=100 * MB, peak=120 * MB)["worker"]
    lease = drive.call(7, "reserve", worker=worker)
    error = drive.refused(7, "set_quota", worker=worker, quota=1000 * MB)
    assert isinstance(error, Overloaded)
    assert error.retryable
    drive.call(7, "commit", lease=lease["lease"], token=lease["token"], measured=50 * MB)
    assert drive.call(7, "set_quota", worker=worker, quota=1000 * MB) == {"quota": 1000 * MB}


def test_drain_lets_off_who_was_asked_to_go(drive: Drive) -> None:
    drive.call(7, "register", model="old", quota=1500 * MB, evict=True)
    [key] = drive.engine.state.members
    lease = drive.call(7, "reserve", worker=key)
    drive.call(7, "commit", lease=lease["lease"], token=lease["token"], measured=1400 * MB)
    drive.now_s += 1000
    drive.look({7: 1400 * MB})
    rival = drive.call(7, "register", model="new", quota=1500 * MB)["worker"]
    drive.ask(7, "reserve", worker=rival, wait_s=100.0)
    assert drive.engine.state.members[key].draining is not None
    drive.ask(7, "drain")
    told = [action.method for action in drive.last if isinstance(action, Notify)]
    assert "evict_cancelled" in told
    assert drive.engine.state.members[key].draining is None


def test_a_model_has_the_instances_of_one_user(drive: Drive) -> None:
    for uid in (1000, 1001):
        client = drive.connect(8 if uid == 1000 else 9, uid)
        drive.engine.state.clients[client].permission = Permission.WORKER
    drive.call(8, "register", model="llama", quota=MB)
    assert isinstance(drive.refused(9, "register", model="llama", instance=9, quota=MB), NameTaken)
    drive.call(7, "register", model="llama", instance=1, quota=MB)  # root may


def test_processes_are_bounded(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "PROCESSES_MAX", 2)
    program(drive)
    drive.connect(8)
    drive.call(8, "register", model="a", quota=MB)
    drive.connect(9)
    error = drive.refused(9, "register", model="b", quota=MB)
    assert isinstance(error, Overloaded)
    assert "2 processes are registered" in error.message
    drive.call(8, "register", model="c", quota=MB)  # one that is known costs nothing more
    drive.exit(8)
    drive.call(9, "register", model="b", quota=MB)


def test_programs_of_one_user_are_bounded(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "OUTSIDE_PER_USER_MAX", 1)
    program(drive)
    child = Outsider(identity(71), "other", 0, identity(7))
    more = {"model": "q", "quota": MB, "process": 71, "outsider": child}
    error = drive.refused(7, "register", **more)
    assert isinstance(error, Overloaded)
    assert "1 programs of uid 0" in error.message
    drive.call(7, "register", model="a", quota=MB)  # by its own word
    drive.connect(8, uid=1000)
    drive.engine.state.clients[8].permission = Permission.WORKER
    theirs = Outsider(identity(72), "theirs", 1000, identity(8))
    drive.call(8, "register", model="r", quota=MB, process=72, outsider=theirs)
    drive.exit(70)
    drive.look({7: 0})
    drive.call(7, "register", **more)


def test_whose_child_it_is_speaks_for_a_program_again(drive: Drive) -> None:
    held = program(drive)
    drive.engine.disconnected(7, drive.now_s)
    drive.connect(7)
    again = drive.call(7, "register", model="p", quota=MB, process=70, outsider=PROGRAM)
    assert drive.events() == ["rejoined"]
    assert (again["worker"], again["lease"]) == (held["worker"], held["lease"])
