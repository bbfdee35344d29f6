"""The queue: order, bounds on passing, and what those who wait are told."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from tests.core.drive import Drive
from tests.core.fakes import MB, engine
from umad.core.ledger import Ledger
from umad.core.record import dump, rebuild
from umad.core.waiting import Queue, Waiter
from umad.errors import Drained, QuotaDenied

BOUNDS = """
[memory]
reserve = "1GiB"
budget = "2GiB"
[leases]
overtake_max = 3
overtake_s = "10s"
"""


@pytest.fixture
def drive() -> Drive:
    return Drive(engine(BOUNDS))


def waiter(key: int, priority: int = 0) -> Waiter:
    return Waiter(1, key, key, "reserve", 0.0, 10.0, (("system", 5),), priority=priority)


@given(some.lists(some.integers(-3, 3), max_size=30))
def test_by_priority_and_in_order_within_one(priorities):
    queue = Queue(100)
    for key, priority in enumerate(priorities):
        queue.add(waiter(key, priority))
    found = [(one.priority, one.request) for one in queue]
    assert found == sorted(found, key=lambda one: (-one[0], one[1]))


def test_who_stands_elsewhere_than_it_was_told_is_found():
    queue = Queue(10)
    for key in (1, 2, 3):
        assert queue.add(waiter(key)) == key - 1
    assert list(queue.moved()) == []
    assert queue.add(waiter(4, priority=1)) == 0
    assert [one.request for one in queue.moved()] == [1, 2, 3]
    queue.remove(waiter(4, priority=1))
    assert [(one.request, one.position) for one in queue.moved()] == [(1, 0), (2, 1), (3, 2)]
    assert [one.request for one in queue.pop_worker(1)] == [1]
    assert len(queue.pop_connection(1)) == 2
    assert queue.head() is None


def blocked(drive: Drive, wait_s: float = 60.0) -> int:
    """A load of 600 MB waits where 548 MB are free; its request."""
    drive.loaded(7, "holder", 1500 * MB)
    drive.connect(8)
    worker = drive.call(8, "register", model="large", quota=600 * MB)["worker"]
    return drive.ask(8, "reserve", worker=worker, wait_s=wait_s)


def small(drive: Drive, number: int, priority: int = 0, size: int = 10 * MB) -> int:
    """Asks for a small load; its request."""
    if 9 not in drive.engine.state.clients:
        drive.connect(9)
    worker = drive.call(9, "register", model=f"small{number}", quota=size, priority=priority)
    return drive.ask(9, "reserve", worker=worker["worker"], wait_s=60.0)


def test_the_small_pass_a_large_one_so_many_times(drive):
    large = blocked(drive)
    for number in range(3):
        assert drive.answer(small(drive, number)) is not None
    request = small(drive, 3)
    assert drive.notified("queued")[0].params["position"] == 1
    assert drive.notified("queued")[0].params["reason"] == "large waits before it"
    entries = drive.engine.status(drive.now_s)["queue"]
    assert [(one["worker"], one["passed"]) for one in entries] == [("large", 3), ("small3", 0)]
    drive.exit(7)
    assert drive.answer(large) is not None
    assert drive.answer(request) is not None


def test_the_small_pass_a_large_one_for_so_long(drive):
    blocked(drive)
    assert drive.answer(small(drive, 0)) is not None
    drive.pass_time(10.0)
    assert drive.answer(small(drive, 1)) is None


def test_who_stands_behind_in_the_line_passes_when_room_appears(drive):
    blocked(drive)  # 548 MB are free
    waiting = [small(drive, number, size=size * MB) for number, size in [(0, 560), (1, 555)]]
    smallest = small(drive, 2, size=10 * MB)
    assert drive.answer(smallest) is not None  # it passes all three
    drive.call(7, "set_quota", worker=1, quota=1480 * MB)  # 558 MB
    assert [drive.answer(one) is not None for one in waiting] == [False, True]
    passed = [one.passed for one in drive.engine.state.loads]
    assert passed == [2, 2]


def test_a_higher_priority_goes_first_and_is_no_passing(drive):
    large = blocked(drive)
    urgent = small(drive, 1, priority=5, size=590 * MB)
    told = {one.connection: one.params["position"] for one in drive.notified("queued")}
    assert told == {9: 0, 8: 1}
    drive.call(7, "set_quota", worker=1, quota=1450 * MB)
    assert drive.answer(urgent) is not None
    assert drive.answer(large) is None
    assert drive.notified("queued")[0].params["position"] == 0
    assert [one.passed for one in drive.engine.state.loads] == [0]


@pytest.mark.slow
@given(some.lists(some.tuples(some.integers(1, 60), some.floats(0.0, 2.0)), max_size=60))
@settings(max_examples=40, deadline=None)
def test_a_large_load_is_never_starved(arrivals):
    """Small loads come and go for ever; the large one is passed by no more than the bound."""
    drive = Drive(engine(BOUNDS))
    large = blocked(drive, wait_s=300.0)
    later = 0
    for number, (size, pause_s) in enumerate(arrivals):
        later += drive.answer(small(drive, number, size=size * MB)) is not None
        drive.look({7: 0, 8: 0, 9: 0})
        assert drive.answer(large) is None
        drive.pass_time(pause_s)
    assert later <= 3
    drive.exit(9)
    drive.call(7, "set_quota", worker=1, quota=1400 * MB)
    assert drive.answer(large) is not None


def test_a_line_is_kept_with_all_that_was_told_of_it(drive):
    blocked(drive)
    small(drive, 1, size=560 * MB)
    small(drive, 2, priority=5, size=570 * MB)
    drive.ask(7, "admit", worker=1, bytes=600 * MB, wait_s=9.0)
    drive.ask(9, "admit", worker=3, bytes=601 * MB, wait_s=9.0)
    drive.pass_time(9.0)
    drive.ask(7, "admit", worker=1, bytes=602 * MB, wait_s=9.0)
    record = dump(drive.engine)
    assert dump(rebuild(record)) == record


def test_a_pool_that_there_is_not(drive):
    drive.connect(7)
    drive.engine.state.ledger = Ledger()  # memory was never read
    worker = drive.call(7, "register", model="llama", quota=MB, pool="vram")["worker"]
    drive.look({7: 0})
    error = drive.refused(7, "reserve", worker=worker, wait_s=9.0)
    assert error.message == "there is no pool 'vram' on this machine; it has: system"


def forward(drive: Drive, pid: int, worker: int, size: int, wait_s: float = 5.0) -> int:
    return drive.ask(pid, "admit", worker=worker, bytes=size, wait_s=wait_s)


def test_forwards_wait_for_a_load_beyond_its_bound_where_that_helps(drive):
    """They never leave 600 MB free, since one begins before another ends."""
    worker = drive.loaded(7, "busy", 1000 * MB)
    first = drive.call(7, "admit", worker=worker, bytes=500 * MB)
    drive.connect(8)
    large = drive.call(8, "register", model="large", quota=600 * MB)["worker"]
    request = drive.ask(8, "reserve", worker=large, wait_s=60.0)
    assert drive.answer(forward(drive, 7, worker, 500 * MB)) is not None  # within the bound
    drive.pass_time(10.0)
    waits = forward(drive, 7, worker, 20 * MB)
    assert drive.answer(waits) is None
    assert "kept for large, which has waited 10.0 s" in drive.notified("queued")[0].params["reason"]
    # What is given back is not taken again at once either.
    drive.call(7, "release", lease=first["lease"], token=first["token"])
    assert drive.answer(forward(drive, 7, worker, 20 * MB, wait_s=0.0)).code == "quota_denied"
    drive.look({7: 900 * MB})
    assert drive.answer(request) is None  # 548 MB are free, the other forward is at work
    drive.pass_time(5.0)
    assert isinstance(drive.answer(waits), QuotaDenied)
    lease = drive.engine.state.ledger.of_worker(worker)[-1]
    drive.call(7, "release", lease=lease.id, token=lease.token)
    drive.look({7: 400 * MB})
    assert drive.answer(request) is not None
    assert drive.answer(forward(drive, 7, worker, 20 * MB)) is not None


def test_forwards_do_not_wait_for_a_load_that_they_cannot_help(drive):
    worker = drive.loaded(7, "busy", 1500 * MB)
    drive.connect(8)
    large = drive.call(8, "register", model="large", quota=600 * MB)["worker"]
    drive.ask(8, "reserve", worker=large, wait_s=60.0)
    drive.pass_time(20.0)
    assert drive.answer(forward(drive, 7, worker, 20 * MB)) is not None


def test_a_more_important_forward_waits_for_no_load(drive):
    busy = drive.loaded(7, "busy", 1000 * MB, priority=1)
    drive.call(7, "admit", worker=busy, bytes=500 * MB)
    drive.connect(8)
    large = drive.call(8, "register", model="large", quota=600 * MB)["worker"]
    drive.ask(8, "reserve", worker=large, wait_s=60.0)
    drive.pass_time(20.0)
    assert drive.answer(forward(drive, 7, busy, 20 * MB)) is not None


def test_no_load_begins_while_drained_and_forwards_go_on(drive):
    worker = drive.loaded(7, "llama", 100 * MB)
    drive.connect(8)
    cold = drive.call(8, "register", model="qwen", quota=100 * MB)["worker"]
    assert drive.call(8, "drain") == {"drained": True}
    assert drive.events() == ["drained"]
    assert drive.call(8, "drain") == {"drained": True}
    assert drive.events() == []
    assert isinstance(drive.refused(8, "reserve", worker=cold), Drained)
    request = drive.ask(8, "reserve", worker=cold, wait_s=30.0)
    assert drive.engine.status(drive.now_s)["drained"]
    assert drive.answer(forward(drive, 7, worker, MB)) is not None
    assert drive.call(8, "resume") == {"drained": False}
    assert drive.answer(request) is not None


def test_what_fitted_on_an_idle_machine_fits_again_and_again(drive):
    """C12: an increment above the baseline, fifty times, to the byte."""
    worker = drive.loaded(7, "llama", 420 * MB)
    free = drive.engine.status(drive.now_s)["pools"][0]["free"]
    for _ in range(50):
        burst = drive.call(7, "admit", worker=worker, bytes=1600 * MB)
        drive.call(7, "release", lease=burst["lease"], token=burst["token"])
        drive.look({7: 420 * MB})
        assert drive.engine.status(drive.now_s)["pools"][0]["free"] == free
        assert drive.booked() == 420 * MB


def test_a_grant_never_goes_to_somebody_who_left(drive):
    """C22: released and cancelled in one moment; the next ones run, and no byte is lost."""
    holder = drive.loaded(7, "holder", 2000 * MB)
    lease = drive.engine.state.ledger.of_worker(holder)[0]
    waiting = {}
    for pid, size in [(1, 1200), (2, 800), (3, 2000)]:
        drive.connect(pid)
        worker = drive.call(pid, "register", model=f"m{pid}", quota=size * MB)["worker"]
        waiting[pid] = drive.ask(pid, "reserve", worker=worker, wait_s=60.0)
    drive.call(7, "release", lease=lease.id, token=lease.token)
    drive.last = drive.engine.disconnected(1, drive.now_s)
    drive.look({7: 0, 1: 0, 2: 0, 3: 0})
    assert drive.answer(waiting[1]) is None
    second = drive.answer(waiting[2])
    assert second is not None
    assert drive.booked() == 800 * MB
    drive.exit(2)
    assert drive.answer(waiting[3]) is not None
    drive.exit(3)
    assert drive.booked() == 0


MOVES = some.lists(
    some.tuples(
        some.sampled_from(["ask", "leave", "end", "time"]), some.integers(1, 5), some.integers(1, 9)
    ),
    max_size=80,
)


@pytest.mark.slow
@given(MOVES)
@settings(max_examples=100, deadline=None)
def test_no_waiter_hangs_whatever_ends_when(moves):
    """C22's fuzz: at the end all is free, and everybody was answered once or has left."""
    drive = Drive(engine(BOUNDS))
    state = drive.engine.state
    unanswered: dict[int, int] = {}
    for what, pid, size in moves:
        if pid not in state.clients:
            drive.connect(pid)
            drive.ask(pid, "register", model=f"m{pid}", quota=MB)
        move(drive, unanswered, what, pid, size)
        forget_answered(drive, unanswered)
        drive.look(dict.fromkeys(range(1, 6), 0))
        forget_answered(drive, unanswered)
        head = state.bursts.head()
        assert head is None or head.bytes > 2048 * MB - drive.booked()
    drive.pass_time(6.0)
    forget_answered(drive, unanswered)
    assert not unanswered
    for pid in range(1, 6):
        drive.exit(pid)
    assert drive.booked() == 0


def move(drive: Drive, unanswered: dict[int, int], what: str, pid: int, size: int) -> None:
    """One client asks for a forward, leaves, or ends one; or time passes."""
    mine = min(drive.engine.state.clients[pid].workers, default=0)
    leases = drive.engine.state.ledger.of_worker(mine)
    if what == "time":
        drive.pass_time(size / 3)
    elif what == "leave":
        drive.last = drive.engine.disconnected(pid, drive.now_s)
        unanswered.pop(pid, None)
    elif what == "ask" and mine and pid not in unanswered:
        wanted = size * 200 * MB
        unanswered[pid] = drive.ask(pid, "admit", worker=mine, bytes=wanted, wait_s=5.0)
    elif what == "end" and leases:
        drive.ask(pid, "release", lease=leases[0].id, token=leases[0].token)


def forget_answered(drive: Drive, unanswered: dict[int, int]) -> None:
    for pid, request in list(unanswered.items()):
        if drive.answer(request) is not None:
            del unanswered[pid]
