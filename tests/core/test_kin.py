"""Families: whose bytes are counted as whose, who is killed, and when the books are closed."""

from typing import Any

import pytest

from tests.core.drive import Drive
from tests.core.fakes import MB, engine, identity
from umad.core import kin
from umad.core.actions import Event, Look
from umad.core.watchdog import LEAKING_AFTER_S
from umad.units import GIB
from umad.values import AccountFigures

POLICY = '[memory]\nreserve = "1GiB"\nbudget = "2GiB"\n[enforcement]\nleak_policy = "kill"\n'


@pytest.fixture
def drive() -> Drive:
    return Drive(engine())


def search(drive: Drive, families: dict[int, set[int]]) -> None:
    drive.last = drive.engine.searched(
        {
            identity(pid): frozenset(identity(member) for member in members)
            for pid, members in families.items()
        },
        drive.now_s,
    )


def shown(drive: Drive) -> dict[str, Any]:
    status = drive.engine.status(drive.now_s)
    return {**status["processes"][0], "worker_state": status["workers"][0]["state"]}


def orphan(drive: Drive) -> None:
    """Worker "a" of pid 7 with 500 MiB booked; 7 has ended, its child 70 holds 400 MiB."""
    drive.loaded(7, "a", 500 * MB)
    search(drive, {7: {70}})
    drive.engine.state.processes[identity(7)].baseline = 60 * MB
    drive.exit(7)


def test_a_search_is_due_every_second_and_whenever_something_depends_on_it(drive: Drive) -> None:
    assert not drive.engine.search_due(drive.now_s), "nobody is registered"
    drive.loaded(7, "a", 300 * MB)
    assert drive.engine.search_due(drive.now_s), "a new process may have children"
    search(drive, {7: {70}})
    assert not drive.engine.search_due(drive.now_s + 0.9)
    assert drive.engine.search_due(drive.now_s + 1.0)
    drive.look({7: 900 * MB})
    assert not drive.engine.search_due(drive.now_s)
    assert drive.engine.search_due(drive.now_s + 0.05), "whom would a kill hit?"


def test_a_member_that_registers_counts_by_itself(drive: Drive) -> None:
    drive.loaded(7, "a", 300 * MB)
    search(drive, {7: {70, 71}})
    assert kin.counted(drive.engine.state) == {identity(7): {identity(70), identity(71)}}
    drive.loaded(71, "b", 300 * MB)
    assert kin.counted(drive.engine.state) == {identity(7): {identity(70)}}
    known = kin.known(drive.engine.state)
    assert known[identity(7)].members == {identity(70), identity(71)}
    assert known[identity(71)].members == frozenset()


def test_a_search_knows_of_no_process_that_is_not_registered(drive: Drive) -> None:
    search(drive, {9: {90}})
    assert drive.engine.state.processes == {}


def test_a_breach_costs_the_whole_family_and_nobody_beside(drive: Drive) -> None:
    drive.loaded(7, "a", 300 * MB)
    drive.loaded(8, "b", 300 * MB)
    search(drive, {7: {71, 70}, 8: {80}})
    drive.look({7: 900 * MB, 8: MB})
    drive.now_s += 0.05
    drive.look({7: 900 * MB, 8: MB})
    assert drive.kills() == [7, 70, 71]
    search(drive, {7: {71, 72}, 8: {80, 81}})
    assert drive.kills() == [72], "born between the last search and the kill"
    drive.exit(7)
    assert drive.kills() == []
    search(drive, {7: set(), 8: {80}})
    assert drive.event("stopped")["fence"] == "sigkill"
    assert list(drive.engine.state.processes) == [identity(8)]


def test_what_a_dead_process_leaves_behind_stays_booked_until_it_is_gone(drive: Drive) -> None:
    orphan(drive)
    told = drive.event("orphaned")
    assert (told["worker"], told["pid"], told["pids"]) == ("a", 7, [70])
    assert told["booked_bytes"] == 500 * MB
    assert [type(action) for action in drive.last] == [Event, Look]
    assert drive.engine.limits() == {}, "what is over 0 needs no closer look"
    drive.look({7: 400 * MB})
    assert drive.events() == []
    assert drive.booked() == 400 * MB, "as much as is seen to be there"
    assert shown(drive)["verdict"] == shown(drive)["worker_state"] == "orphaned"
    assert (shown(drive)["family"], shown(drive)["limit"]) == ([70], 0)
    assert drive.engine.search_due(drive.now_s)
    drive.now_s += 0.05
    drive.look({7: 400 * MB})
    assert drive.kills() == [70]
    assert shown(drive)["verdict"] == "killed"
    drive.look({7: 150 * MB})
    assert drive.booked() == 150 * MB, "it is dying"
    drive.now_s += 0.02
    search(drive, {7: set()})
    assert drive.booked() == 0
    stopped = drive.event("stopped")
    assert (stopped["reason"], stopped["fence"]) == ("orphaned", "sigkill")
    assert stopped["freed_bytes"] == 400 * MB
    assert drive.engine.state.counters["orphaned"] == 1
    assert drive.engine.state.counters["revocations"] == 0
    assert drive.engine.state.processes == {}


def test_a_worker_that_had_left_before_is_orphaned_too(drive: Drive) -> None:
    worker = drive.loaded(7, "a", 500 * MB)
    drive.call(7, "unregister", worker=worker)
    search(drive, {7: {70}})
    drive.exit(7)
    assert (drive.event("orphaned")["worker"], drive.booked()) == ("a", 500 * MB)


def test_the_kill_of_a_member_is_no_case_of_its_own(drive: Drive) -> None:
    orphan(drive)
    drive.look({7: 400 * MB})
    drive.now_s += 0.05
    drive.look({7: 400 * MB})
    drive.engine.kill_sent(identity(70), drive.now_s + 1.0)
    case = drive.engine.state.watchdog.case(identity(7))
    assert case is not None
    assert case.killed_s == drive.now_s
    assert drive.exit(70) == [], "of members only a search tells"


def test_an_orphan_that_goes_by_itself(drive: Drive) -> None:
    orphan(drive)
    drive.look({7: 400 * MB})
    search(drive, {7: set()})
    assert drive.event("stopped")["fence"] == "exit"
    orphan(drive)
    search(drive, {7: set()})
    assert drive.events() == ["exited"], "nothing was ever seen of it"
    assert drive.booked() == 0


def test_an_orphan_that_cannot_be_killed_keeps_its_bytes(drive: Drive) -> None:
    orphan(drive)
    drive.look({7: 400 * MB})
    drive.now_s += 0.05
    drive.look({7: 400 * MB})
    drive.now_s += 5.0
    drive.look({7: 400 * MB})
    assert "unkillable" in drive.events()
    assert "leaking" not in drive.events(), "it claimed nothing"
    assert shown(drive)["verdict"] == "unkillable"
    assert drive.booked() == 400 * MB
    search(drive, {7: {70}})
    assert not drive.engine.search_due(drive.now_s + 0.5), "that can wait now"
    # The name is free for another start, and there is room for it beside the rest.
    drive.loaded(9, "a", 300 * MB)
    search(drive, {7: set(), 9: set()})
    assert drive.booked() == 300 * MB


def test_a_fenced_worker_of_a_dead_process_is_orphaned_with_the_rest(drive: Drive) -> None:
    drive.loaded(7, "a", 300 * MB, guard=True)
    search(drive, {7: {70}})
    over = AccountFigures(used=400 * MB, peak=400 * MB, refused=0)
    drive.look({7: 500 * MB}, accounts={1: over})
    assert shown(drive)["worker_state"] == "fenced"
    drive.exit(7)
    assert drive.event("orphaned")["booked_bytes"] == 300 * MB
    assert shown(drive)["worker_state"] == "orphaned"
    drive.now_s += 0.01
    drive.look({7: 300 * MB}, accounts={1: over})
    assert drive.events() == [], "its account is nobody's any more"
    drive.now_s += 0.05
    drive.look({7: 300 * MB}, accounts={1: over})
    assert drive.kills() == [70]


def test_an_orphan_of_one_that_had_booked_nothing(drive: Drive) -> None:
    drive.connect(7)
    drive.call(7, "register", model="a", quota=500 * MB)
    search(drive, {7: {70}})
    drive.exit(7)
    drive.look({7: MB})
    assert shown(drive)["worker_state"] == "orphaned"
    drive.now_s += 0.05
    drive.look({7: MB})
    assert drive.kills() == [70]


def test_a_process_that_had_left_before_leaves_no_orphans(drive: Drive) -> None:
    worker = drive.loaded(7, "a", 300 * MB)
    search(drive, {7: {70}})
    drive.call(7, "unregister", worker=worker)
    drive.look({7: 0})
    drive.exit(7)
    assert drive.events() == []


# --------------------------------------------------------- given back by word


def leak(drive: Drive, *, seconds: float, held: int = 300 * MB) -> list[str]:
    """Looks for so long at a process that holds what it gave back; the events."""
    events: list[str] = []
    for passed_s in (0.0, seconds, 0.0):
        drive.now_s += passed_s
        drive.look({7: held})
        events += drive.events()
    return events


def released(drive: Drive, **more: object) -> None:
    drive.loaded(7, "a", 300 * MB, **more)
    [lease] = drive.engine.state.ledger.leases.values()
    drive.call(7, "release", lease=lease.id, token=lease.token)


def test_by_default_a_leak_is_told_of_and_stays_booked(drive: Drive) -> None:
    released(drive)
    leak(drive, seconds=LEAKING_AFTER_S)
    drive.look({7: 300 * MB})
    assert shown(drive)["worker_state"] == "leaking"
    leak(drive, seconds=10 * LEAKING_AFTER_S)
    assert drive.kills() == []
    assert (drive.booked(), drive.engine.state.counters["leaks"]) == (300 * MB, 1)


def test_by_policy_a_leaking_process_is_told_and_then_killed() -> None:
    drive = Drive(engine(POLICY))
    released(drive)
    leak(drive, seconds=LEAKING_AFTER_S)
    assert drive.event("revoked")["reason"] == "leaking"
    [note] = drive.notified("revoke")
    assert note.params["grace_s"] == LEAKING_AFTER_S
    drive.now_s += LEAKING_AFTER_S - 0.1
    drive.look({7: 300 * MB})
    assert drive.kills() == []
    drive.now_s += 0.1
    drive.look({7: 300 * MB})
    assert drive.kills() == [7]


def test_a_leak_that_ends_in_time_costs_nothing() -> None:
    drive = Drive(engine(POLICY))
    released(drive)
    leak(drive, seconds=LEAKING_AFTER_S)
    drive.now_s += 1.0
    drive.look({7: MB})
    assert "complied" in drive.events()
    assert (drive.kills(), drive.booked()) == ([], 0)


def test_nobody_dies_for_the_leak_of_another() -> None:
    drive = Drive(engine(POLICY))
    released(drive)
    drive.call(7, "register", model="good", quota=100 * MB)
    assert leak(drive, seconds=LEAKING_AFTER_S) == ["leaking"]
    assert leak(drive, seconds=2 * LEAKING_AFTER_S) == []


def test_a_guarded_process_is_not_killed_for_a_leak() -> None:
    drive = Drive(engine(POLICY))
    released(drive, guard=True)
    assert leak(drive, seconds=LEAKING_AFTER_S) == ["leaking"]
    assert leak(drive, seconds=2 * LEAKING_AFTER_S) == []


def test_a_breach_of_the_quota_does_not_wait_for_a_leak_to_end() -> None:
    drive = Drive(engine(POLICY))
    released(drive)
    leak(drive, seconds=LEAKING_AFTER_S)
    drive.now_s += 0.1
    drive.look({7: GIB})
    drive.now_s += 0.05
    drive.look({7: GIB})
    assert drive.kills() == [7]
    drive.exit(7)
    assert drive.event("stopped")["reason"] == "quota_exceeded"


# ------------------------------------------------------------------------ C38


def test_c38_one_that_cannot_be_killed_costs_its_bytes_and_nobody_else() -> None:
    drive = Drive(engine('[memory]\nreserve = "1GiB"\n'))
    drive.loaded(7, "stuck", 4 * GIB)
    drive.loaded(8, "b", 300 * MB)
    stuck = {7: 6 * GIB}
    drive.look({**stuck, 8: 0}, safe=8 * GIB)
    drive.now_s += 0.05
    drive.look({**stuck, 8: 0}, safe=8 * GIB)
    assert drive.kills() == [7]
    drive.engine.kill_sent(identity(7), drive.now_s)
    drive.loaded(9, "c", 300 * MB)
    assert set(drive.engine.limits().values()) == {4 * GIB, 300 * MB}
    drive.now_s += 1.0  # by then it would be gone, if it could
    drive.look({**stuck, 9: GIB}, safe=8 * GIB)
    drive.now_s += 0.05
    drive.look({**stuck, 9: GIB}, safe=8 * GIB)
    assert drive.kills() == [9]
    drive.exit(9)
    drive.now_s += 4.0  # SIGKILL was sent and is pending: state D
    drive.look({**stuck, 8: 0}, safe=8 * GIB)
    assert "unkillable" in drive.events()
    status = drive.engine.status(drive.now_s)
    assert status["counters"]["unkillable"] == 1
    assert status["processes"][0]["verdict"] == "unkillable"
    # Of 14 GiB: 1 in reserve, the 6 that do not come back, and what "b" has not used yet.
    assert status["pools"][0]["free"] == 7 * GIB - 300 * MB
    drive.look({**stuck, 8: 900 * MB}, safe=8 * GIB)
    seen_s = drive.now_s
    assert drive.event("revoked")["worker"] == "b"
    drive.now_s += 0.05
    drive.look({**stuck, 8: 900 * MB}, safe=8 * GIB)
    assert drive.kills() == [8]
    assert drive.now_s - seen_s <= 0.1


def test_pids_are_named_and_not_all_of_them(drive: Drive) -> None:
    drive.loaded(7, "a", 300 * MB)
    search(drive, {7: set(range(100, 200))})
    assert shown(drive)["family"] == list(range(100, 108))
    assert shown(drive)["family_total"] == 100
