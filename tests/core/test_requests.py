import pytest

from tests.core.drive import Drive
from tests.core.fakes import MB, engine, identity, settings
from umad.core import deadlines
from umad.core.access import Access
from umad.core.actions import Refuse, Watch
from umad.core.engine import Engine
from umad.core.switching import idle_s
from umad.errors import (
    AccessDenied,
    Fenced,
    InvalidParams,
    LeaseNotFound,
    MemoryUnknown,
    NameTaken,
    NeverFits,
    Overloaded,
    QuotaDenied,
    QuotaExceeded,
    UnknownMethod,
    WaitedTooLong,
    WorkerRevoked,
)
from umad.units import GIB
from umad.values import AccountFigures


@pytest.fixture
def drive() -> Drive:
    return Drive(engine())


def test_a_load_books_its_peak_then_its_quota(drive: Drive) -> None:
    drive.connect(7)
    answer = drive.call(7, "register", model="llama", quota=300 * MB, peak=900 * MB)
    assert Watch(identity(7)) in drive.last
    worker = answer["worker"]
    lease = drive.call(7, "reserve", worker=worker)
    assert (lease["bytes"], drive.booked()) == (900 * MB, 900 * MB)
    kept = drive.call(7, "commit", lease=lease["lease"], token=lease["token"], measured=280 * MB)
    assert (kept["bytes"], drive.booked()) == (300 * MB, 300 * MB)
    assert drive.events() == ["loaded"]


def test_a_load_that_measures_above_its_quota_is_not_committed(drive: Drive) -> None:
    drive.connect(7)
    worker = drive.call(7, "register", model="llama", quota=300 * MB, peak=900 * MB)["worker"]
    lease = drive.call(7, "reserve", worker=worker)
    error = drive.refused(
        7, "commit", lease=lease["lease"], token=lease["token"], measured=301 * MB
    )
    assert isinstance(error, QuotaExceeded)
    assert error.details == {"measured_bytes": 301 * MB, "quota_bytes": 300 * MB}


def test_void_keeps_the_bytes_until_they_are_seen_to_be_gone(drive: Drive) -> None:
    drive.connect(7)
    worker = drive.call(7, "register", model="llama", quota=300 * MB)["worker"]
    lease = drive.call(7, "reserve", worker=worker)
    drive.call(7, "void", lease=lease["lease"], token=lease["token"])
    assert drive.booked() == 300 * MB
    drive.look({7: 120 * MB})
    assert drive.booked() == 120 * MB
    drive.look({7: None})  # a broken reading frees nothing
    assert drive.booked() == 120 * MB
    drive.look({7: 0})
    assert drive.booked() == 0
    drive.call(7, "reserve", worker=worker)  # it may load again


def test_a_refusal_says_what_is_asked_free_and_held(drive: Drive) -> None:
    drive.loaded(7, "llama", 1500 * MB)
    drive.connect(8)
    worker = drive.call(8, "register", model="qwen", quota=700 * MB)["worker"]
    error = drive.refused(8, "reserve", worker=worker)
    assert error.code == "quota_denied"
    assert error.retryable
    assert error.details == {
        "asked_bytes": 700 * MB,
        "free_bytes": 548 * MB,
        "pool": "system",
        "binding": "budget",
        "holders": [{"worker": "llama", "bytes": 1500 * MB}],
        "going": [],
        "would_go": [],
    }
    assert error.message.startswith("no idle model can make room: ")


def test_what_can_never_fit_is_refused_at_once_even_with_a_wait(drive: Drive) -> None:
    drive.connect(7)
    error = drive.refused(7, "register", model="llama", quota=3000 * MB)
    assert isinstance(error, NeverFits)
    worker = drive.call(7, "register", model="llama", quota=300 * MB, peak=900 * MB)["worker"]
    error = drive.refused(7, "admit", worker=worker, bytes=1 << 40, wait_s=60.0)
    assert isinstance(error, NeverFits)
    assert error.details["budget_bytes"] == 2048 * MB


@pytest.mark.parametrize(
    "params",
    [
        {"quota": 300 * MB, "peak": 200 * MB},
        {"quota": 300 * MB, "pool": "vram"},
    ],
)
def test_a_registration_that_makes_no_sense(drive: Drive, params: dict[str, int]) -> None:
    drive.connect(7)
    assert drive.refused(7, "register", model="llama", **params).code in (
        "invalid_params",
        "never_fits",
    )
    assert not drive.engine.state.members


def test_a_reservation_above_the_registered_peak_is_refused(drive: Drive) -> None:
    drive.connect(7)
    worker = drive.call(7, "register", model="llama", quota=300 * MB)["worker"]
    assert isinstance(drive.refused(7, "reserve", worker=worker, bytes=301 * MB), QuotaExceeded)
    parts = [100 * MB, 100 * MB, 100 * MB]
    assert drive.call(7, "reserve", worker=worker, parts=parts)["bytes"] == 300 * MB
    assert isinstance(drive.refused(7, "reserve", worker=worker), InvalidParams)


def test_a_name_belongs_to_one_live_worker(drive: Drive) -> None:
    drive.loaded(7, "llama", 100 * MB)
    drive.connect(8)
    assert isinstance(drive.refused(8, "register", model="llama", quota=MB), NameTaken)
    drive.call(8, "register", model="llama", instance=1, quota=MB)


def test_workers_and_leases_of_others_are_out_of_reach(drive: Drive) -> None:
    worker = drive.loaded(7, "llama", 100 * MB)
    lease = drive.engine.state.ledger.of_worker(worker)[0]
    drive.connect(8)
    for method, params in [
        ("unregister", {"worker": worker}),
        ("admit", {"worker": worker, "bytes": MB}),
        ("release", {"lease": lease.id, "token": lease.token}),
    ]:
        assert isinstance(drive.refused(8, method, **params), AccessDenied)
    assert isinstance(drive.refused(7, "release", lease=lease.id, token=lease.token + 1), Fenced)
    assert isinstance(drive.refused(7, "release", lease=99, token=99), LeaseNotFound)
    assert isinstance(drive.refused(7, "unregister", worker=99), LeaseNotFound)
    assert isinstance(drive.refused(7, "commit", lease=lease.id, token=9, measured=MB), Fenced)


def test_a_commit_whose_answer_was_lost_is_said_again(drive: Drive) -> None:
    worker = drive.loaded(7, "llama", 100 * MB)
    lease = drive.engine.state.ledger.of_worker(worker)[0]
    before = drive.call(7, "status")
    again = drive.call(7, "commit", lease=lease.id, token=lease.token, measured=MB)
    assert again == {"bytes": 100 * MB}
    assert drive.call(7, "status") == before


def test_only_a_load_is_committed(drive: Drive) -> None:
    worker = drive.loaded(7, "llama", 100 * MB)
    burst = drive.call(7, "admit", worker=worker, bytes=MB)
    burst = {"lease": burst["lease"], "token": burst["token"]}
    assert isinstance(drive.refused(7, "commit", measured=MB, **burst), InvalidParams)


def test_a_burst_lasts_as_long_as_its_forward_says_that_it_goes_on(drive: Drive) -> None:
    worker = drive.loaded(7, "llama", 100 * MB)
    burst = drive.call(7, "admit", worker=worker, bytes=MB)
    burst = {"lease": burst["lease"], "token": burst["token"]}
    ttl_s = drive.engine.state.settings.leases.burst_ttl
    drive.pass_time(ttl_s - 1)
    assert drive.call(7, "extend", **burst) == {"deadline_s": ttl_s}
    drive.pass_time(ttl_s - 1)
    assert drive.events() == []
    drive.pass_time(1)
    assert drive.events() == ["lease_expired"]
    assert isinstance(drive.refused(7, "extend", **burst), LeaseNotFound)


def test_a_model_in_a_long_forward_is_not_idle(drive: Drive) -> None:
    worker = drive.loaded(7, "llama", 100 * MB)
    member = drive.engine.state.members[worker]
    drive.pass_time(60.0)
    assert idle_s(member, drive.now_s) == 60.0
    drive.tell(7, "progress", worker=worker, stage="serving", ratio=1.0)
    assert idle_s(member, drive.now_s) == 0.0
    other = drive.call(7, "register", model="cold", quota=MB)["worker"]
    drive.tell(7, "progress", worker=other, stage="reading", ratio=0.5)
    assert drive.engine.state.members[other].worked_s == 0.0


def test_only_its_owner_extends_a_burst_and_nobody_a_load(drive: Drive) -> None:
    worker = drive.loaded(7, "llama", 100 * MB)
    burst = drive.call(7, "admit", worker=worker, bytes=MB)
    drive.connect(8)
    stale = {"lease": burst["lease"], "token": burst["token"] + 1}
    assert isinstance(drive.refused(7, "extend", **stale), Fenced)
    mine = {"lease": burst["lease"], "token": burst["token"]}
    assert isinstance(drive.refused(8, "extend", **mine), AccessDenied)
    load = drive.engine.state.ledger.of_worker(worker)[0]
    assert isinstance(drive.refused(7, "extend", lease=load.id, token=load.token), InvalidParams)


def test_an_unknown_peer_may_only_read(drive: Drive) -> None:
    drive.connect(9, uid=1234)
    drive.call(9, "status")
    drive.call(9, "ping")
    error = drive.refused(9, "register", model="llama", quota=MB)
    assert isinstance(error, AccessDenied)
    assert "umad" in error.message


def test_a_method_that_the_engine_does_not_have(drive: Drive) -> None:
    drive.connect(9)
    [refusal] = drive.engine.request(9, 1, "fly", {}, drive.now_s)
    assert isinstance(refusal, Refuse)
    assert isinstance(refusal.error, UnknownMethod)


def test_a_burst_ends_with_its_forward_and_is_there_again_at_once(drive: Drive) -> None:
    worker = drive.loaded(7, "llama", 100 * MB)
    free = drive.engine.status(drive.now_s)["pools"][0]["free"]
    for _ in range(50):
        burst = drive.call(7, "admit", worker=worker, bytes=1900 * MB)
        drive.tell(
            7,
            "forward_done",
            worker=worker,
            lease=burst["lease"],
            token=burst["token"],
            predicted=MB,
            peak=MB,
            tokens=3,
            batch=1,
            seconds=0.01,
        )
    assert drive.booked() == 2000 * MB  # given back by word
    drive.look({7: 50 * MB})
    assert drive.booked() == 100 * MB  # and seen to be gone
    assert drive.engine.status(drive.now_s)["pools"][0]["free"] == free
    assert drive.engine.state.members[worker].forwards == 50


def test_what_a_forward_gave_back_is_not_handed_out_again_below_the_reserve(drive: Drive) -> None:
    worker = drive.loaded(7, "llama", 100 * MB)
    burst = drive.call(7, "admit", worker=worker, bytes=500 * MB)
    drive.call(7, "release", lease=burst["lease"], token=burst["token"])
    drive.look({7: 600 * MB}, safe=GIB - MB)  # the machine's other tenants have grown
    assert isinstance(drive.refused(7, "admit", worker=worker, bytes=400 * MB), QuotaDenied)
    drive.look({7: 600 * MB}, safe=2 * GIB)
    burst = drive.call(7, "admit", worker=worker, bytes=400 * MB)
    drive.call(7, "release", lease=burst["lease"], token=burst["token"])
    drive.look({7: 600 * MB}, safe=None)
    assert isinstance(drive.refused(7, "admit", worker=worker, bytes=300 * MB), MemoryUnknown)


def test_a_burst_expires(drive: Drive) -> None:
    worker = drive.loaded(7, "llama", 100 * MB)
    drive.call(7, "admit", worker=worker, bytes=MB, ttl_s=1.0)
    assert deadlines.next_s(drive.engine.state) == drive.now_s + 1.0
    drive.pass_time(1.0)
    assert drive.event("lease_expired")["bytes"] == MB
    drive.look({7: 50 * MB})
    assert drive.booked() == 100 * MB


def test_a_load_that_never_commits_expires(drive: Drive) -> None:
    drive.connect(7)
    worker = drive.call(7, "register", model="llama", quota=100 * MB)["worker"]
    drive.call(7, "reserve", worker=worker)
    drive.pass_time(1801)
    drive.look({7: 0})
    assert drive.booked() == 0
    drive.call(7, "reserve", worker=worker)


def test_a_leaked_lease_is_counted(drive: Drive) -> None:
    worker = drive.loaded(7, "llama", 100 * MB)
    burst = drive.call(7, "admit", worker=worker, bytes=MB)
    drive.call(7, "release", lease=burst["lease"], token=burst["token"], leaked=True)
    assert drive.events() == []
    lease = drive.engine.state.ledger.of_worker(worker)[0]
    drive.call(7, "release", lease=lease.id, token=lease.token, leaked=True)
    assert drive.events() == ["leaked", "unloaded"]
    assert drive.engine.state.counters["leases_leaked"] == 2


def test_who_waits_is_granted_in_order_when_bytes_are_back(drive: Drive) -> None:
    drive.loaded(7, "llama", 1500 * MB)
    waiting = []
    for pid in (8, 9):
        drive.connect(pid)
        worker = drive.call(pid, "register", model=f"m{pid}", quota=600 * MB)["worker"]
        waiting.append(drive.ask(pid, "reserve", worker=worker, wait_s=30.0))
        assert drive.notified("queued")[0].params["position"] == len(waiting) - 1
    assert len(drive.engine.status(drive.now_s)["queue"]) == 2
    drive.exit(7)
    assert [bool(drive.answer(request)) for request in waiting] == [True, True]
    assert drive.booked() == 1200 * MB


def test_a_wait_has_a_bound_and_a_reason(drive: Drive) -> None:
    drive.loaded(7, "llama", 1500 * MB)
    drive.connect(8)
    worker = drive.call(8, "register", model="qwen", quota=600 * MB)["worker"]
    request = drive.ask(8, "reserve", worker=worker, wait_s=3.0)
    drive.pass_time(3.0)
    error = drive.answer(request)
    assert isinstance(error, QuotaDenied)
    assert error.details["free_bytes"] == 548 * MB
    assert error.details["waited_s"] == 3.0
    assert "waited 3.0 s" in error.message
    drive.exit(7)
    drive.call(8, "reserve", worker=worker)


def test_the_waits_of_a_lost_connection_are_forgotten(drive: Drive) -> None:
    drive.loaded(7, "llama", 1500 * MB)
    for pid in (8, 9):
        drive.connect(pid)
        worker = drive.call(pid, "register", model=f"m{pid}", quota=600 * MB)["worker"]
        request = drive.ask(pid, "reserve", worker=worker, wait_s=30.0)
    drive.last = drive.engine.disconnected(8, drive.now_s)
    drive.exit(7)
    assert drive.answer(request) is not None
    assert drive.booked() == 600 * MB


def test_the_queue_has_an_end(drive: Drive) -> None:
    drive.engine.state.loads.limit = 0
    drive.engine.state.inits.limit = 0
    drive.loaded(7, "llama", 1500 * MB)
    drive.connect(8)
    worker = drive.call(8, "register", model="qwen", quota=600 * MB)["worker"]
    assert isinstance(drive.refused(8, "reserve", worker=worker, wait_s=3.0), Overloaded)
    drive.call(7, "init_lock", worker=1)
    assert isinstance(drive.refused(8, "init_lock", worker=worker, wait_s=3.0), Overloaded)


def test_the_init_mutex_has_one_holder_and_a_line(drive: Drive) -> None:
    workers, requests = {}, {}
    for pid in (7, 8, 9):
        drive.connect(pid)
        workers[pid] = drive.call(pid, "register", model=f"m{pid}", quota=MB)["worker"]
    lock = drive.call(7, "init_lock", worker=workers[7])
    assert lock["position"] == 0
    assert isinstance(drive.refused(7, "init_lock", worker=workers[7]), InvalidParams)
    assert isinstance(drive.refused(8, "init_lock", worker=workers[8]), WaitedTooLong)
    for pid in (8, 9):
        requests[pid] = drive.ask(pid, "init_lock", worker=workers[pid], wait_s=60.0)
    assert drive.engine.status(drive.now_s)["init"] == {"holder": "m7", "waiting": 2}
    drive.call(7, "init_unlock", worker=workers[7], token=lock["token"])
    second = drive.answer(requests[8])
    assert isinstance(second, dict)
    assert second["token"] > lock["token"]
    # A late word of the first holder changes nothing.
    assert isinstance(
        drive.refused(7, "init_unlock", worker=workers[7], token=lock["token"]), Fenced
    )
    drive.last = drive.engine.disconnected(8, drive.now_s)
    assert drive.answer(requests[9]) is not None


def test_the_init_mutex_is_taken_from_a_silent_holder(drive: Drive) -> None:
    for pid in (7, 8):
        drive.loaded(pid, f"m{pid}", MB)
    lock = drive.call(7, "init_lock", worker=1)
    drive.pass_time(599)
    request = drive.ask(8, "init_lock", worker=2, wait_s=60.0)
    drive.pass_time(1)
    assert drive.events() == ["init_lock_expired"]
    assert drive.answer(request) is not None
    assert isinstance(drive.refused(7, "init_unlock", worker=1, token=lock["token"]), Fenced)


def test_during_recovery_nothing_new_is_granted() -> None:
    drive = Drive(engine(recovering_until_s=2.5))
    drive.connect(7)
    worker = drive.call(7, "register", model="old", quota=300 * MB, held=280 * MB)
    assert drive.booked() == 300 * MB
    assert {"lease", "token"} <= worker.keys()
    drive.connect(8)
    fresh = drive.call(8, "register", model="new", quota=300 * MB)["worker"]
    error = drive.refused(8, "reserve", worker=fresh)
    assert (error.code, error.retry_after_s) == ("recovering", 1.5)
    request = drive.ask(8, "reserve", worker=fresh, wait_s=10.0)
    lock = drive.ask(8, "init_lock", worker=fresh, wait_s=10.0)
    drive.pass_time(1.6)
    assert drive.answer(request) is not None
    assert drive.answer(lock) is not None


def test_a_worker_that_comes_back_in_time_keeps_its_books(drive: Drive) -> None:
    worker = drive.loaded(7, "llama", 300 * MB)
    drive.last = drive.engine.disconnected(7, drive.now_s)
    assert drive.engine.status(drive.now_s)["workers"][0]["state"] == "cut off"
    drive.now_s += 0.5
    drive.connect(7, connection=70)
    again = drive.call(70, "register", model="llama", quota=300 * MB, held=300 * MB)
    assert again["worker"] == worker
    assert again["lease"] == drive.engine.state.ledger.of_worker(worker)[0].id
    assert drive.booked() == 300 * MB
    drive.pass_time(5.0)
    assert drive.booked() == 300 * MB


def test_a_worker_without_a_load_comes_back_without_a_lease(drive: Drive) -> None:
    drive.connect(7)
    drive.call(7, "register", model="llama", quota=300 * MB)
    drive.engine.disconnected(7, drive.now_s)
    drive.connect(7, connection=70)
    assert "lease" not in drive.call(70, "register", model="llama", quota=300 * MB)


def test_a_worker_that_stays_away_loses_its_books_as_its_bytes_go(drive: Drive) -> None:
    drive.loaded(7, "llama", 300 * MB)
    drive.engine.disconnected(7, drive.now_s)
    drive.pass_time(1.0)
    assert drive.event("left")["why"] == "connection lost"
    drive.look({7: 250 * MB})
    assert drive.booked() == 250 * MB
    drive.look({7: 0})
    assert drive.booked() == 0
    assert not drive.engine.state.processes


def test_leases_per_worker_are_bounded(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umad.core.grants.LEASES_PER_WORKER_MAX", 3)
    worker = drive.loaded(7, "llama", 100 * MB)
    for _ in range(2):
        drive.call(7, "admit", worker=worker, bytes=1)
    assert isinstance(drive.refused(7, "admit", worker=worker, bytes=1), Overloaded)


def test_workers_per_connection_are_bounded(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umad.core.registration.WORKERS_PER_CONNECTION_MAX", 1)
    drive.loaded(7, "llama", 100 * MB)
    assert isinstance(drive.refused(7, "register", model="b", quota=MB), Overloaded)


def test_a_revoked_worker_gets_no_burst(drive: Drive) -> None:
    worker = drive.loaded(7, "llama", 100 * MB)
    drive.look({7: 150 * MB})
    assert isinstance(drive.refused(7, "admit", worker=worker, bytes=MB), WorkerRevoked)


def test_events_are_kept_and_sent(drive: Drive) -> None:
    drive.connect(3)
    assert drive.call(3, "events") == {"next": 0, "events": []}
    drive.loaded(7, "llama", 100 * MB)
    assert [note.params["name"] for note in drive.notified("event")] == ["loaded"]
    late = drive.call(3, "events", since=1)
    assert [event["name"] for event in late["events"]] == ["loaded"]


def test_progress_is_shown(drive: Drive) -> None:
    worker = drive.loaded(7, "llama", 100 * MB)
    drive.tell(7, "progress", worker=worker, stage="reading", ratio=0.5)
    shown = drive.engine.status(drive.now_s)["workers"][0]
    assert (shown["stage"], shown["ratio"]) == ("reading", 0.5)


def test_a_wrong_notification_is_counted_not_answered(drive: Drive) -> None:
    drive.connect(7)
    drive.tell(7, "progress", worker=5, stage="reading", ratio=0.5)
    assert drive.last == []
    assert drive.engine.state.counters["refusals_lease_not_found"] == 1


def test_before_the_first_look_nothing_is_granted() -> None:
    drive = Drive(Engine(settings(), Access(0, None, None), generation=1, recovering_until_s=0))
    drive.connect(7)
    worker = drive.call(7, "register", model="llama", quota=MB)["worker"]
    assert drive.refused(7, "reserve", worker=worker).code == "memory_unknown"
    assert drive.call(7, "status")["pools"] == []
    # Who comes back from before a restart is asked to try again: there is no pool to book in.
    error = drive.refused(7, "register", model="old", quota=MB, held=MB)
    assert (error.code, error.retryable) == ("memory_unknown", True)


def test_a_refusal_is_told_of_with_those_that_came_since(drive: Drive) -> None:
    drive.connect(7)
    worker = drive.call(7, "register", model="llama", quota=2000 * MB)["worker"]
    drive.loaded(8, "holder", 1500 * MB)
    drive.refused(7, "reserve", worker=worker)
    first = drive.event("refused")
    assert (first["worker"], first["what"], first["times"]) == ("llama", "reserve", 1)
    assert first["asked_bytes"] == 2000 * MB
    assert "held by holder" in first["why"]
    for _ in range(20):
        drive.now_s += 0.45
        drive.refused(7, "reserve", worker=worker)
        assert drive.events() == []
    drive.now_s += 1.1
    drive.refused(7, "reserve", worker=worker)
    assert drive.event("refused")["times"] == 21


def test_events_are_told_in_parts_backwards(drive: Drive) -> None:
    drive.connect(7)
    for at in range(60):
        drive.call(7, "register", model=f"m{at}", quota=MB)
    last = drive.call(7, "events", since=5)
    assert last["next"] == 60
    assert [event["seq"] for event in last["events"]] == list(range(11, 61))
    assert {event["level"] for event in last["events"]} == {"info"}
    rest = drive.call(7, "events", since=5, before=11)
    assert [event["seq"] for event in rest["events"]] == list(range(6, 11))


def test_what_a_worker_holds_is_its_process_or_its_account(drive: Drive) -> None:
    def holds() -> dict[str, int | None]:
        return {one["name"]: one["holds"] for one in drive.engine.status(drive.now_s)["workers"]}

    alone = drive.loaded(7, "alone", 200 * MB)
    assert holds() == {"alone": None}  # nobody has looked at its process
    drive.look({7: 120 * MB})
    assert holds() == {"alone": 120 * MB}
    drive.loaded(7, "other", 200 * MB)
    drive.look({7: 150 * MB})
    assert holds() == {"alone": None, "other": None}  # nobody can tell whose they are
    accounts = {alone: AccountFigures(100 * MB, 110 * MB, 0, returned=10 * MB)}
    drive.look({7: 150 * MB}, accounts=accounts)
    assert holds() == {"alone": 90 * MB, "other": None}
    [shown] = [one for one in drive.engine.status(0.0)["workers"] if one["id"] == alone]
    assert (shown["charged"], shown["charged_most"]) == (100 * MB, 110 * MB)
