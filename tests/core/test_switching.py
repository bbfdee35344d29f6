"""Models go for each other: who is asked, who is spared, and that nobody is chased in circles."""

import itertools
import random

import pytest

from tests.core.drive import Drive
from tests.core.fakes import MB, engine, snapshot
from umad.core import deadlines, switching
from umad.core.actions import Reload
from umad.errors import QuotaDenied

CONFIG = """
[memory]
reserve = "1GiB"
budget = "2GiB"
[leases]
residence_min = "2s"
rival_rest = "10s"
evict_timeout = "5s"
"""


@pytest.fixture
def drive() -> Drive:
    return Drive(engine(CONFIG))


def model(drive: Drive, pid: int, size: int, *, idle_s: float = 2.0, **more) -> int:
    """A loaded model that can go, of one process each; the worker."""
    worker = drive.loaded(pid, f"m{pid}", size * MB, **{"evict": True, **more})
    drive.now_s += idle_s
    return worker


def rival(drive: Drive, pid: int, size: int, *, wait_s: float = 30.0, **more) -> int:
    """A model of that size asks for room; its request."""
    if pid not in drive.engine.state.clients:
        drive.connect(pid)
    named = drive.engine.state.named(f"m{pid}")
    if named is None:
        priority = more.pop("priority", 0)
        drive.call(pid, "register", model=f"m{pid}", quota=size * MB, evict=True, priority=priority)
    worker = drive.engine.state.named(f"m{pid}").worker.id
    return drive.ask(pid, "reserve", worker=worker, wait_s=wait_s, **more)


def asked(drive: Drive) -> list[int]:
    """The connections that were asked to go in the last step."""
    return [one.connection for one in drive.notified("evict")]


def cancelled(drive: Drive) -> list[int]:
    return [one.connection for one in drive.notified("evict_cancelled")]


def go(drive: Drive, pid: int) -> None:
    """A model unloads, as it was asked; its bytes are not seen to be gone yet."""
    worker = drive.engine.state.named(f"m{pid}").worker.id
    [lease] = [
        one for one in drive.engine.state.ledger.of_worker(worker) if one.state != "releasing"
    ]
    drive.call(pid, "release", lease=lease.id, token=lease.token)


def state_of(drive: Drive, pid: int) -> str:
    workers = drive.engine.status(drive.now_s)["workers"]
    return next(one["state"] for one in workers if one["name"] == f"m{pid}")


def test_an_idle_model_goes_and_its_bytes_count_when_they_are_seen_to_be_back(drive):
    victim = model(drive, 1, 1500)
    request = rival(drive, 2, 1200)
    [told] = drive.notified("evict")
    assert told.connection == 1
    assert told.params == {
        "worker": victim,
        "reason": "m2 waits for room",
        "for_worker": "m2",
        "deadline_s": 5.0,
    }
    assert (
        drive.notified("queued")[0]
        .params["reason"]
        .startswith("m1 would have to go: 1.2 GiB asked of pool 'system'")
    )
    shown = drive.engine.status(drive.now_s)["workers"][0]
    assert (shown["state"], shown["going_for"], shown["idle_s"]) == ("draining", "m2", 2.0)
    drive.look({1: 1500 * MB, 2: 0})
    assert asked(drive) == []  # once
    entry = drive.engine.status(drive.now_s)["queue"][0]
    assert entry["reason"].startswith("m1 on the way out: ")
    go(drive, 1)
    assert drive.answer(request) is None
    assert state_of(drive, 1) == "cold"
    drive.look({1: 1400 * MB, 2: 0})
    assert drive.answer(request) is None
    assert asked(drive) == []
    drive.look({1: 0, 2: 0})
    assert drive.answer(request) is not None
    assert drive.engine.state.counters["evictions"] == 1


def test_the_machine_must_have_the_room_and_not_the_books_alone(drive):
    model(drive, 1, 500)
    drive.connect(2)
    drive.look({1: 500 * MB}, safe=1500 * MB)  # 476 MB free above the reserve, somebody else's rest
    rival(drive, 2, 1000)
    assert asked(drive) == []  # 976 MB would be free then
    assert "no idle model can make room" in drive.notified("queued")[0].params["reason"]
    drive.look({1: 500 * MB}, safe=1600 * MB)
    assert asked(drive) == [1]


def test_what_was_promised_and_is_not_there_is_no_room_for_a_rival(drive):
    model(drive, 1, 900)
    # 300 MB above the reserve, and 800 MB of the model's own are still to come: 500 too few.
    drive.look({1: 100 * MB}, safe=1324 * MB)
    rival(drive, 2, 600)
    assert asked(drive) == []
    rival(drive, 3, 400)
    assert asked(drive) == [1]


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"pin": True}, "no idle"),
        ({"evict": False}, "no idle"),
        ({"priority": 1}, "no idle"),
        ({"idle_s": 0.5}, "m1 can go in 1.5 s"),
    ],
)
def test_who_is_never_asked(drive, how, why):
    model(drive, 1, 1500, **how)
    rival(drive, 2, 1200)
    assert asked(drive) == []
    assert drive.notified("queued")[0].params["reason"].startswith(why)


def test_a_more_important_model_goes_once_nobody_has_wanted_it_for_long(drive):
    rest_s = drive.engine.state.settings.leases.rival_rest
    model(drive, 1, 1500, priority=1, idle_s=rest_s - 0.5)
    rival(drive, 2, 1200)
    assert asked(drive) == []
    drive.pass_time(0.5)
    assert asked(drive) == [1]


def test_umad_serves_own_workers_are_never_asked(drive):
    drive.loaded(1, "runtime", 1500 * MB, evict=True)
    drive.now_s += 5.0
    rival(drive, 2, 1200)
    assert asked(drive) == []


def test_one_that_loads_or_works_or_waits_to_work_is_never_asked(drive):
    worker = model(drive, 1, 900)
    model(drive, 3, 900)
    lease = drive.call(1, "admit", worker=worker, bytes=100 * MB)
    go(drive, 3)
    drive.look({1: 0, 3: 0})
    loading = drive.call(3, "reserve", worker=2)
    rival(drive, 2, 600)
    assert asked(drive) == []
    drive.call(1, "release", lease=lease["lease"], token=lease["token"])
    forward = drive.ask(1, "admit", worker=worker, bytes=500 * MB, wait_s=9.0)
    assert drive.answer(forward) is None
    drive.look({1: 900 * MB, 3: 0, 2: 0})
    assert asked(drive) == []
    drive.call(3, "commit", lease=loading["lease"], token=loading["token"], measured=MB)
    drive.look({1: 900 * MB, 3: 0, 2: 0})
    assert asked(drive) == []  # one is busy, the other too young
    drive.now_s += 2.0
    drive.look({1: 900 * MB, 3: 0, 2: 0})
    assert asked(drive) == [3]


def test_a_refusal_without_a_wait_asks_nobody_and_says_when_it_may_help(drive):
    model(drive, 1, 1500, idle_s=0.5)
    request = rival(drive, 2, 1200, wait_s=0.0)
    error = drive.answer(request)
    assert isinstance(error, QuotaDenied)
    assert (error.retry_after_s, error.details["would_go"]) == (1.5, ["m1"])
    drive.now_s += 1.5
    error = drive.answer(rival(drive, 2, 1200, wait_s=0.0))
    assert error.message.startswith("m1 would have to go: ")
    assert asked(drive) == []
    error = drive.answer(rival(drive, 2, 1200, wait_s=0.0, evict=False))
    assert error.message.startswith("no other model goes for it: ")
    rival(drive, 2, 1200, evict=False)
    assert asked(drive) == []


def test_a_victim_that_is_wanted_is_spared_where_another_can_go(drive):
    model(drive, 1, 900, idle_s=1.0)
    model(drive, 3, 900)
    rival(drive, 2, 900)
    assert asked(drive) == [1]
    drive.tell(1, "keep", worker=1)
    assert (cancelled(drive), asked(drive)) == ([1], [3])
    assert drive.engine.state.counters["evictions_rescued"] == 1
    # Nobody else is left, and the first is not asked for the same one again: it goes on.
    drive.tell(3, "keep", worker=2)
    assert (cancelled(drive), asked(drive)) == ([], [])
    assert state_of(drive, 3) == "draining"
    drive.tell(1, "keep", worker=1)  # not asked: nothing happens
    assert drive.last == []


def test_who_waits_no_more_lets_its_victims_off(drive):
    model(drive, 1, 1500)
    rival(drive, 2, 1200, wait_s=3.0)
    assert asked(drive) == [1]
    drive.pass_time(3.0)
    assert cancelled(drive) == [1]
    assert state_of(drive, 1) == "ready"
    # The same two: not again within the rest.  Somebody else may.
    assert drive.answer(rival(drive, 2, 1200, wait_s=0.0)).retry_after_s == 7.0
    rival(drive, 4, 1200)
    assert asked(drive) == [1]


def test_a_victim_that_misses_its_deadline_is_asked_no_more(drive):
    model(drive, 1, 900, idle_s=1.0)
    model(drive, 3, 900)
    request = rival(drive, 2, 900)
    assert asked(drive) == [1]
    assert deadlines.next_s(drive.engine.state) == drive.now_s + 5.0
    drive.pass_time(5.0)
    assert (drive.event("evict_missed")["worker"], cancelled(drive), asked(drive)) == (
        "m1",
        [1],
        [3],
    )
    drive.pass_time(5.0)
    assert asked(drive) == []
    drive.pass_time(20.0)
    error = drive.answer(request)
    assert isinstance(error, QuotaDenied)
    assert "waited 30.0 s for reserve" in error.message


def test_who_never_goes_is_asked_more_and_more_rarely(drive):
    model(drive, 1, 1500)
    model(drive, 3, 1)  # its way out does not help
    asked_s = []
    while len(asked_s) < 9:
        rival(drive, 2, 1200, wait_s=300.0)
        asked_s += [drive.now_s] * bool(asked(drive))
        drive.pass_time(2.5)
        asked_s += [drive.now_s] * bool(asked(drive))
    gaps = [later - sooner for sooner, later in itertools.pairwise(asked_s)]
    assert gaps == [15.0, 25.0, 45.0, 85.0, 165.0, 325.0, 325.0, 325.0]  # and the time it had
    drive.pass_time(5.0)
    error = drive.answer(rival(drive, 2, 1200, wait_s=0.0))
    assert error.message.startswith("m1 can go in 5 min: ")
    assert error.retry_after_s == 10.0  # somebody else may make room before
    go(drive, 1)
    drive.look({1: 0, 2: 0, 3: 0})
    assert drive.engine.state.named("m1").misses == 0


def test_a_victim_at_work_has_as_long_as_a_forward_may_take(drive):
    model(drive, 1, 1500)
    request = rival(drive, 2, 1200, wait_s=200.0)
    asked_s = drive.now_s
    drive.pass_time(1.0)
    drive.tell(1, "keep", worker=1)
    drive.pass_time(60.0)
    drive.tell(1, "keep", worker=1)  # once more gives no more
    assert state_of(drive, 1) == "draining"
    drive.pass_time(asked_s + 120.0 - drive.now_s - 0.5)
    assert drive.events() == []
    drive.pass_time(0.5)
    assert drive.event("evict_missed")["worker"] == "m1"
    assert drive.answer(request) is None


def test_a_victim_at_work_that_people_asked_has_its_deadline(drive):
    model(drive, 1, 1500)
    drive.connect(9)
    drive.call(9, "evict", name="m1")
    drive.tell(1, "keep", worker=1)
    drive.pass_time(5.0)
    assert drive.event("evict_missed")["worker"] == "m1"


def test_a_victim_that_loses_its_connection_is_asked_no_more(drive):
    model(drive, 1, 900, idle_s=1.0)
    model(drive, 3, 900)
    rival(drive, 2, 900)
    drive.last = drive.engine.disconnected(1, drive.now_s)
    drive.look({1: 900 * MB, 3: 900 * MB, 2: 0})
    assert asked(drive) == [3]
    drive.engine.connected(1, drive.engine.state.clients[3].peer)
    assert drive.engine.state.named("m1").draining is None


def test_what_leaks_is_not_waited_for(drive):
    model(drive, 1, 900)
    model(drive, 3, 900, idle_s=3.0)
    request = rival(drive, 2, 900)
    go(drive, 1)
    drive.look({1: 900 * MB, 3: 900 * MB, 2: 0})
    assert asked(drive) == []
    drive.now_s += 6.0
    drive.look({1: 900 * MB, 3: 900 * MB, 2: 0})
    assert drive.event("leaking")["worker"] == "m1"
    assert asked(drive) == [3]
    go(drive, 3)
    drive.look({1: 900 * MB, 3: 0, 2: 0})
    assert drive.answer(request) is not None


def test_nobody_goes_on_a_machine_that_cannot_be_read_or_was_drained(drive):
    model(drive, 1, 1500)
    drive.look({1: 1500 * MB}, safe=None)
    rival(drive, 2, 1200)
    assert asked(drive) == []
    drive.call(1, "drain")
    drive.look({1: 1500 * MB, 2: 0})
    assert asked(drive) == []
    drive.call(1, "resume")
    drive.look({1: 1500 * MB, 2: 0})
    assert asked(drive) == [1]


def test_without_any_look_nobody_is_asked() -> None:
    drive = Drive(engine(CONFIG))
    drive.engine.state.snapshot = None
    rival(drive, 2, 1200)
    assert drive.notified("queued")[0].params["reason"] == "memory has not been read yet"
    assert asked(drive) == []


def test_a_model_on_its_way_out_finishes_its_forwards(drive):
    """Even while room is kept for the load it goes for: else it could never go."""
    victim = model(drive, 1, 1400)
    busy = drive.loaded(3, "busy", 100 * MB)
    rival(drive, 2, 1500, wait_s=200.0)
    drive.engine.state.members[victim].draining.deadline_s = 999.0
    drive.call(3, "admit", worker=busy, bytes=50 * MB)
    drive.pass_time(30.0)
    assert drive.answer(drive.ask(3, "admit", worker=busy, bytes=MB, wait_s=1.0)) is None
    assert isinstance(drive.answer(drive.ask(1, "admit", worker=victim, bytes=MB)), dict)


def test_idleness_counts_from_the_end_of_the_last_forward(drive):
    report = {"predicted": 0, "peak": 0, "tokens": 1, "batch": 1, "seconds": 3.0}
    worker = model(drive, 1, 900, idle_s=10.0)
    drive.tell(1, "forward_done", worker=worker, **report)
    member = drive.engine.state.members[worker]
    assert switching.idle_s(member, drive.now_s + 1.0) == 1.0
    model(drive, 3, 900, idle_s=2.0)
    rival(drive, 2, 900)
    assert asked(drive) == [1]  # 12 s since it was loaded, 2 s like the other: the older number


def test_the_cost_of_a_load_is_what_the_last_one_took(drive):
    drive.connect(1)
    worker = drive.call(1, "register", model="m1", quota=900 * MB, evict=True)["worker"]
    lease = drive.call(1, "reserve", worker=worker)
    drive.now_s += 100.0
    drive.call(1, "init_lock", worker=worker)
    drive.now_s += 40.0
    drive.call(1, "commit", lease=lease["lease"], token=lease["token"], measured=MB)
    assert drive.engine.status(drive.now_s)["workers"][0]["load_s"] == 40.0
    model(drive, 3, 900, idle_s=2.0)
    rival(drive, 2, 900)
    assert asked(drive) == [3]


def test_alternating_rivals_swap_no_more_than_the_bounds_allow(drive):
    """C25: two models, room for one, asked for in turn ten times a second for 30 s."""
    drive.connect(1)
    drive.connect(2)
    for pid in (1, 2):
        drive.call(pid, "register", model=f"m{pid}", quota=1500 * MB, evict=True)
    loaded, swaps, denied = 0, [], 0
    for step in range(300):
        pid = 1 + step % 2
        drive.now_s += 0.1
        if loaded == pid:
            continue
        request = rival(drive, pid, 1500, wait_s=0.05)
        if asked(drive):
            go(drive, loaded)
            drive.look({1: 0, 2: 0})
        answer = drive.answer(request)
        if isinstance(answer, dict):
            drive.call(pid, "commit", lease=answer["lease"], token=answer["token"], measured=MB)
            loaded = pid
            swaps.append(drive.now_s)
            continue
        drive.pass_time(0.05)
        error = drive.answer(request)
        assert isinstance(error, QuotaDenied)
        assert error.retry_after_s <= 10.0
        denied += 1
    gaps = [after - before for before, after in itertools.pairwise(swaps)]
    assert len(swaps) > 3
    assert all(gap >= 2.0 for gap in gaps)
    assert denied > 100


@pytest.mark.parametrize("seed", range(200))
def test_a_request_for_the_victim_does_not_revive_it(seed):
    """C24: room for one; requests for the victim come whenever they like."""
    chance = random.Random(seed)
    drive = Drive(engine(CONFIG))
    model(drive, 1, 1500, idle_s=chance.uniform(2.0, 9.0))
    request = rival(drive, 2, 1200, wait_s=2.0)
    began_s = drive.now_s
    leaves_s = began_s + chance.uniform(0.0, 3.0)  # some are too late
    gone = False
    answer = drive.answer(request)
    while answer is None:
        drive.now_s += chance.uniform(0.001, 0.02)
        step = chance.choice(["keep", "reserve", "look", "time", "go"])
        if step == "keep":
            drive.tell(1, "keep", worker=1)
        elif step == "reserve" and gone:  # it wants to come back at once
            rival(drive, 1, 1500, wait_s=0.0)
        elif step == "look":
            drive.look({1: 0 if gone else 1500 * MB, 2: 0})
        elif step == "go" and not gone and drive.now_s >= leaves_s:
            go(drive, 1)
            gone = True
        else:
            drive.last = drive.engine.advance(drive.now_s)
        assert drive.now_s - began_s < 2.1, "it neither was granted nor timed out"
        answer = drive.answer(request)
    if isinstance(answer, QuotaDenied):
        assert "waited 2.0 s" in answer.message
        if not gone:
            assert state_of(drive, 1) == "ready"  # let off, and usable again
    else:
        assert gone
        assert answer["bytes"] == 1200 * MB
    assert not drive.engine.state.loads


# --- what people ask ---


def test_people_ask_a_model_to_go_and_to_come_back(drive):
    worker = model(drive, 1, 900)
    drive.connect(9)
    assert drive.call(9, "evict", name="m1") == {"state": "draining", "deadline_s": 5.0}
    assert drive.notified("evict")[0].params["for_worker"] == ""
    drive.now_s += 1.0
    assert drive.call(9, "evict", name="m1") == {"state": "draining", "deadline_s": 4.0}
    assert asked(drive) == []
    drive.tell(1, "keep", worker=worker)
    assert state_of(drive, 1) == "draining"  # nothing spares it
    go(drive, 1)
    assert drive.call(9, "evict", name="m1") == {"state": "cold", "deadline_s": 0.0}
    assert drive.call(9, "load", name="m1") == {"state": "cold"}
    assert drive.notified("load")[0].params == {"worker": worker}
    drive.look({1: 0})
    drive.call(1, "reserve", worker=worker)
    assert drive.refused(9, "evict", name="m1").code == "overloaded"
    assert drive.call(9, "load", name="m1") == {"state": "loading"}
    assert drive.notified("load") == []
    drive.call(9, "drain")
    assert drive.refused(9, "load", name="m1").code == "drained"


def test_who_people_cannot_ask(drive):
    drive.connect(9)
    assert drive.refused(9, "evict", name="m1").code == "lease_not_found"
    drive.loaded(1, "m1", MB)
    assert "neither loads nor unloads" in drive.refused(9, "load", name="m1").message
    model(drive, 2, 1)
    drive.last = drive.engine.disconnected(2, drive.now_s)
    assert drive.refused(9, "evict", name="m2").code == "overloaded"
    drive.connect(5, uid=1234)
    drive.engine.state.clients[5].permission = drive.engine.state.access.of(
        drive.engine.state.clients[5].peer
    )
    for method, params in [("pin", {"name": "m1", "pin": True}), ("drain", {}), ("reload", {})]:
        assert drive.refused(5, method, **params).code == "access_denied"


def test_a_pinned_model_stays_and_one_that_is_pinned_on_its_way_out_too(drive):
    model(drive, 1, 1500)
    rival(drive, 2, 1200)
    drive.connect(9)
    assert drive.call(9, "pin", name="m1", pin=True) == {"pin": True}
    assert (cancelled(drive), state_of(drive, 1)) == ([1], "ready")
    assert "unpin it first" in drive.refused(9, "evict", name="m1").message
    assert drive.call(9, "pin", name="m1", pin=False) == {"pin": False}
    assert drive.events() == ["unpinned"]
    assert drive.call(9, "evict", name="m1")["state"] == "draining"
    drive.last = drive.engine.disconnected(1, drive.now_s)
    drive.call(9, "pin", name="m1", pin=True)
    assert cancelled(drive) == []  # there is nobody to be told


def test_a_victim_that_people_want_gone_goes_whoever_leaves_the_line(drive):
    model(drive, 1, 1500)
    rival(drive, 2, 1200, wait_s=1.0)
    drive.connect(9)
    drive.call(9, "evict", name="m1")
    drive.pass_time(1.0)
    assert state_of(drive, 1) == "draining"


def test_the_shell_reads_the_configuration_again(drive):
    drive.connect(9)
    request = drive.ask(9, "reload")
    assert drive.last == [Reload(9, request)]


def test_a_quota_by_name(drive):
    model(drive, 1, 900)
    drive.connect(9)
    assert drive.call(9, "set_quota", name="m1", quota=800 * MB) == {"quota": 800 * MB}
    assert drive.booked() == 800 * MB
    assert drive.refused(9, "set_quota", quota=MB).code == "invalid_params"
    assert drive.refused(9, "set_quota", name="m1", worker=1, quota=MB).code == "invalid_params"
    assert drive.refused(9, "set_quota", name="other", quota=MB).code == "lease_not_found"


# --- the machine is short ---


def below(drive: Drive, free: int, *, at_s: float) -> None:
    drive.now_s += at_s
    drive.look({1: 900 * MB}, safe=free * MB)


def test_a_machine_below_its_reserve_closes_admission_shrinks_then_evicts(drive):
    worker = model(drive, 1, 900)
    below(drive, 1000, at_s=0.2)
    assert drive.events() == ["admission_closed"]
    error = drive.refused(1, "admit", worker=worker, bytes=MB)
    assert error.details["binding"] == "pressure"
    assert drive.engine.status(drive.now_s)["closed"]
    below(drive, 1100, at_s=1.5)
    assert drive.last == []  # above the reserve, and it stays closed
    below(drive, 1152, at_s=0.1)
    below(drive, 1000, at_s=0.1)
    assert drive.events() == ["admission_closed"]
    below(drive, 1000, at_s=0.5)
    assert drive.last == []
    below(drive, 1000, at_s=0.5)
    assert [one.connection for one in drive.notified("shrink")] == [1]
    below(drive, 700, at_s=4.9)
    assert asked(drive) == []  # what was shrunk has had no time to show
    below(drive, 800, at_s=0.1)
    assert asked(drive) == []  # a quarter of the reserve is not gone
    below(drive, 700, at_s=0.1)
    assert asked(drive) == [1]
    below(drive, 700, at_s=0.1)
    assert asked(drive) == []
    go(drive, 1)
    below(drive, 700, at_s=3.0)
    assert asked(drive) == []  # one in a while
    below(drive, 1100, at_s=0.1)
    assert drive.refused(1, "admit", worker=worker, bytes=MB).details["binding"] == "pressure"
    below(drive, 700, at_s=30.0)
    assert "shrinking" in drive.events()  # it lasts
    below(drive, 1152, at_s=0.1)
    assert drive.events() == ["admission_opened"]
    below(drive, 1100, at_s=0.1)
    assert drive.last == []  # no flutter
    drive.look({1: 0}, safe=None)
    assert drive.last == []


@pytest.mark.parametrize("free", [800, 1100])  # below the reserve, and not far enough above it
def test_models_go_for_a_rival_while_admission_is_closed(drive, free):
    model(drive, 1, 900)
    below(drive, 1000, at_s=0.1)
    request = rival(drive, 2, 600)
    assert asked(drive) == [1]
    go(drive, 1)
    drive.look({1: 0, 2: 0}, safe=free * MB)
    assert drive.answer(request) is None
    drive.look({1: 0, 2: 0}, safe=free * MB + 900 * MB)
    assert drive.events() == ["admission_opened"]
    assert drive.answer(request) is not None


def test_who_is_cut_off_goes_for_nobody_while_admission_is_closed(drive):
    model(drive, 1, 900)
    drive.last = drive.engine.disconnected(1, drive.now_s)
    below(drive, 1000, at_s=0.1)
    rival(drive, 2, 1500)
    below(drive, 700, at_s=0.8)
    below(drive, 700, at_s=0.5)
    assert [one.connection for one in drive.notified("shrink")] == [2]
    below(drive, 700, at_s=6.0)
    assert asked(drive) == []  # nobody can


def test_one_goes_at_a_time_when_the_machine_is_short(drive):
    model(drive, 1, 400)
    model(drive, 2, 400)
    drive.connect(9)
    below(drive, 700, at_s=0.1)
    below(drive, 700, at_s=1.0)
    drive.call(9, "evict", name="m1")
    below(drive, 700, at_s=5.0)
    assert asked(drive) == []  # one is on its way
    below(drive, 700, at_s=0.1)
    assert asked(drive) == [2]  # it has missed its deadline
    drive.engine.state.members[2].draining.deadline_s += 60.0
    below(drive, 700, at_s=10.0)
    assert asked(drive) == []


def test_only_a_new_reading_of_the_system_pool_counts(drive):
    look = snapshot(drive.now_s, {})
    look.pools.clear()
    drive.last = drive.engine.observe(look, drive.now_s)
    assert drive.last == []


def test_other_settings_are_in_effect_at_once(drive):
    model(drive, 1, 900, idle_s=0.5)
    other = engine(CONFIG.replace("2s", "100ms").replace("2GiB", "1GiB")).state.settings
    drive.last = drive.engine.reconfigure(other, drive.now_s)
    assert (drive.events(), [one.method for one in drive.notified("reloaded")]) == (
        ["reloaded"],
        ["reloaded"],
    )
    drive.look({1: 900 * MB})
    assert drive.engine.status(drive.now_s)["pools"][0]["budget"] == 1024 * MB
    rival(drive, 2, 500)
    assert asked(drive) == [1]
