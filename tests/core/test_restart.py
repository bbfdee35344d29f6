"""Account pages that a restarted daemon finds before, or with, the workers they belong to."""

from typing import Any

import pytest

from tests.core.drive import Drive
from tests.core.fakes import MB, engine, identity, process, settings
from umad.core.access import Access
from umad.core.actions import Action, OpenAccount, SetLimit, Unwatch, Watch
from umad.core.engine import Engine
from umad.errors import (
    Fenced,
    InvalidParams,
    MemoryUnknown,
    QuotaDenied,
    Recovering,
    WorkerRevoked,
)
from umad.values import PageFigures
from umad.wire.messages import check_params

# The budget is 2 GiB, 7 is the process whose page is found, 9 another one that asks for memory.
BUDGET = 2048 * MB


def of(actions: list[Action], kind: type) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


@pytest.fixture
def drive() -> Drive:
    """A daemon that has just started again; it waits for former workers until 2.5."""
    made = Drive(engine(recovering_until_s=2.5))
    made.connect(9)
    made.call(9, "register", model="other", quota=MB, peak=BUDGET)
    return made


def find(
    drive: Drive, limits: dict[int, int], *fenced: int, used: int = 0, held: int | None = 0
) -> None:
    page = PageFigures(limits, frozenset(fenced), used)
    drive.last = drive.engine.found(identity(7), "engine", 0, page, process(7, held), drive.now_s)


def after_recovery(drive: Drive, held: int = 0) -> None:
    drive.now_s = 2.5
    drive.look({7: held, 9: 0})


def free(drive: Drive) -> int:
    return int(drive.call(9, "status")["pools"][0]["free"])


def test_what_the_guard_still_hands_out_is_granted_to_nobody(drive: Drive) -> None:
    find(drive, {0: 1200 * MB, 3: 100 * MB, 5: 0}, used=1000 * MB, held=1500 * MB)
    assert of(drive.last, Watch) == [Watch(identity(7))]
    assert drive.event("page_found")["limit_bytes"] == 1300 * MB
    drive.look({7: 1500 * MB, 9: 0})
    assert isinstance(drive.refused(9, "reserve", worker=1, bytes=MB), Recovering)
    after_recovery(drive, 1500 * MB)
    assert free(drive) == BUDGET - 1300 * MB
    denied = drive.refused(9, "reserve", worker=1, bytes=749 * MB)
    assert isinstance(denied, QuotaDenied)
    assert drive.call(9, "reserve", worker=1, bytes=748 * MB)["bytes"] == 748 * MB
    [shown] = [one for one in drive.call(9, "status")["processes"] if one["pid"] == 7]
    assert (shown["unclaimed"], shown["limit"]) == (1300 * MB, None)
    assert shown["baseline"] == 500 * MB  # what no account is charged


def test_its_unused_part_is_kept_free_in_the_machine_too(drive: Drive) -> None:
    find(drive, {0: 1200 * MB}, used=1000 * MB, held=1500 * MB)
    drive.now_s = 2.5
    # 1 GiB of reserve, 300 MiB beyond it: of these, 200 are the account's.
    drive.look({7: 1500 * MB, 9: 0}, safe=1324 * MB)
    assert free(drive) == 100 * MB


def test_a_reading_that_is_broken_keeps_more_free(drive: Drive) -> None:
    find(drive, {0: 200 * MB}, used=100 * MB, held=None)
    drive.now_s = 2.5
    drive.look({7: None, 9: 0}, safe=1324 * MB)
    assert free(drive) == 100 * MB


def test_a_worker_that_comes_back_takes_its_account_and_no_other_can(drive: Drive) -> None:
    find(drive, {0: 300 * MB, 1: 200 * MB}, used=400 * MB, held=450 * MB)
    drive.connect(7)
    drive.now_s = 2.0
    new = drive.call(7, "register", model="new", quota=MB, guard=True)
    assert new["account"] == 2
    back = drive.call(
        7, "register", model="a", quota=300 * MB, guard=True, account=0, held=250 * MB, baseline=50
    )
    assert back["account"] == 0
    assert of(drive.last, OpenAccount)[0].again
    after_recovery(drive, 450 * MB)
    # 300 booked again, 200 still waited for; the new worker has not asked for its quota yet.
    assert free(drive) == BUDGET - 500 * MB


def test_a_process_that_is_half_back_is_not_over_its_limit(drive: Drive) -> None:
    find(drive, {0: 300 * MB, 1: 200 * MB}, used=490 * MB, held=500 * MB)
    drive.connect(7)
    drive.call(
        7, "register", model="a", quota=300 * MB, guard=True, account=0, held=290 * MB, baseline=0
    )
    drive.look({7: 490 * MB, 9: 0})
    assert drive.events() == []


def test_what_a_process_that_is_back_does_not_claim_is_taken_from_it(drive: Drive) -> None:
    find(drive, {0: 300 * MB, 1: 200 * MB})
    drive.connect(7)
    drive.now_s = 2.0
    drive.call(7, "register", model="a", quota=300 * MB, guard=True, account=0, held=MB)
    after_recovery(drive)
    assert "accounts_abandoned" not in drive.events()
    drive.now_s = 3.5  # 1.5 s after the process came back
    drive.look({7: 0, 9: 0})
    assert of(drive.last, SetLimit) == [SetLimit(identity(7), 1, 0)]
    assert drive.event("accounts_abandoned")["limit_bytes"] == 200 * MB
    assert free(drive) == BUDGET - 300 * MB


def test_a_process_that_stays_away_is_waited_for_no_longer_than_a_minute(drive: Drive) -> None:
    find(drive, {0: 300 * MB})
    drive.now_s = 60.9
    drive.look({7: 0, 9: 0})
    assert of(drive.last, SetLimit) == []
    assert free(drive) == BUDGET - 300 * MB
    drive.now_s = 61.0
    drive.look({7: 0, 9: 0})
    assert of(drive.last, SetLimit) == [SetLimit(identity(7), 0, 0)]
    assert of(drive.last, Unwatch) == [Unwatch(identity(7))]
    assert free(drive) == BUDGET


def test_a_process_that_ends_gives_all_back(drive: Drive) -> None:
    find(drive, {0: 300 * MB})
    drive.exit(7)
    after_recovery(drive)
    assert free(drive) == BUDGET


def test_a_worker_that_was_revoked_before_the_restart_stays_revoked(drive: Drive) -> None:
    find(drive, {}, 0)
    drive.connect(7)
    again = {"model": "a", "quota": MB, "guard": True}
    assert isinstance(drive.refused(7, "register", account=0, **again), WorkerRevoked)
    # Under a new account it may begin anew; the old one's thread may still be there.
    assert drive.call(7, "register", **again)["account"] == 1


def test_a_page_that_comes_after_its_workers_changes_nothing(drive: Drive) -> None:
    drive.connect(7)
    drive.call(7, "register", model="a", quota=MB)
    find(drive, {0: 300 * MB})
    assert drive.last == []
    after_recovery(drive)
    assert free(drive) == BUDGET


def test_accounts_keep_room_in_every_pool_since_nobody_knows_theirs(drive: Drive) -> None:
    find(drive, {0: 300 * MB})
    drive.look({7: 0, 9: 0})
    [books] = [one for one in drive.engine.state.books() if one.identity == identity(7)]
    assert books.by_pool == (("system", 300 * MB),)
    assert drive.engine.state.unclaimed() == 300 * MB


def test_a_word_from_before_the_restart_ends_nothing_of_now() -> None:
    before, now = Drive(engine()), Drive(engine(generation=2))
    words: list[dict[str, Any]] = []
    for drive in (before, now):
        drive.connect(7)
        worker = drive.call(7, "register", model="llama", quota=100 * MB, held=80 * MB)
        lock = drive.call(7, "init_lock", worker=worker["worker"])
        words.append({**worker, "lock": lock["token"]})
    old, new = words
    assert old["lease"] == new["lease"]
    assert isinstance(now.refused(7, "release", lease=old["lease"], token=old["token"]), Fenced)
    unlock = {"worker": new["worker"], "token": old["lock"]}
    assert isinstance(now.refused(7, "init_unlock", **unlock), Fenced)
    assert now.booked() == 100 * MB
    assert now.call(7, "init_unlock", worker=new["worker"], token=new["lock"]) == {}
    assert now.call(7, "release", lease=new["lease"], token=new["token"])["bytes"] == 100 * MB


def test_a_forward_at_work_is_booked_again_whatever_the_budget_says() -> None:
    drive = Drive(engine(recovering_until_s=2.5))
    for pid in (7, 9):
        drive.connect(pid)
    drive.call(9, "register", model="other", quota=1000 * MB, held=900 * MB)
    mine = {"model": "a", "quota": 1000 * MB, "held": 900 * MB, "guard": True, "baseline": 0}
    back = drive.call(7, "register", bursts=[200 * MB, 100 * MB, 800 * MB], **mine)
    assert back["bursts"][1] is not None
    assert back["bursts"][2] is None  # more than the whole budget
    assert of(drive.last, OpenAccount)[0].limit == 1300 * MB
    assert drive.booked() == 2300 * MB
    after_recovery(drive)
    assert isinstance(drive.refused(9, "admit", worker=1, bytes=MB), QuotaDenied)
    drive.now_s += 121.0  # as any other burst, it ends
    drive.look({7: 0, 9: 0})
    assert "lease_expired" in drive.events()


def test_what_a_forward_gives_back_is_not_handed_out_again_in_recovery(drive: Drive) -> None:
    drive.connect(7)
    mine = {"model": "a", "quota": 100 * MB, "held": 100 * MB}
    back = drive.call(7, "register", bursts=[200 * MB], **mine)
    drive.call(7, "release", **back["bursts"][0])
    again = {"worker": back["worker"], "bytes": 200 * MB}
    assert isinstance(drive.refused(7, "admit", **again), Recovering)
    after_recovery(drive, 300 * MB)
    assert drive.call(7, "admit", **again)["bytes"] == 200 * MB


LOADING: dict[str, Any] = {
    "model": "a", "quota": 500 * MB, "peak": 600 * MB, "loading": 600 * MB, "baseline": 50 * MB
}  # fmt: skip


def test_a_load_under_way_goes_on_within_its_limit_and_alone(drive: Drive) -> None:
    find(drive, {0: 600 * MB}, used=300 * MB, held=350 * MB)
    drive.connect(7)
    back = drive.call(7, "register", guard=True, account=0, **LOADING)
    [opened] = of(drive.last, OpenAccount)
    assert (opened.account, opened.limit, opened.again) == (0, 600 * MB, True)
    assert drive.booked() == 600 * MB
    after_recovery(drive, 350 * MB)
    other = drive.call(9, "reserve", worker=1, bytes=100 * MB)
    drive.ask(9, "init_lock", worker=1, wait_s=10.0)
    assert drive.engine.state.mutex.holder is not None
    assert drive.engine.state.mutex.holder.worker == back["worker"]
    ticket = {"lease": back["lease"], "token": back["token"]}
    assert drive.call(7, "commit", measured=480 * MB, **ticket) == {"bytes": 500 * MB}
    unlock = {"worker": back["worker"], "token": back["init_token"]}
    assert drive.call(7, "init_unlock", **unlock) == {}
    assert drive.engine.state.mutex.holder.worker == 1
    assert drive.booked() == 600 * MB
    assert other["bytes"] == 100 * MB


def test_a_load_that_never_ends_expires_after_a_restart_too(drive: Drive) -> None:
    drive.connect(7)
    drive.call(7, "register", **LOADING)
    drive.now_s += drive.engine.state.settings.leases.load_timeout
    drive.look({7: 0, 9: 0})
    assert "lease_expired" in drive.events()
    drive.look({7: 0, 9: 0})
    assert drive.booked() == 0


def test_the_mutex_has_one_holder_after_a_restart(drive: Drive) -> None:
    for pid in (7, 8):
        drive.connect(pid)
    first = drive.call(7, "register", **LOADING)
    second = drive.call(8, "register", **{**LOADING, "model": "b"})
    assert "init_token" in first
    assert "init_token" not in second


def test_a_load_has_the_mutex_again_after_a_cut(drive: Drive) -> None:
    drive.now_s = 3.0
    drive.look({7: 0, 9: 0})
    drive.connect(7)
    mine = {key: LOADING[key] for key in ("model", "quota", "peak")}
    worker = drive.call(7, "register", **mine)["worker"]
    drive.call(7, "reserve", worker=worker)
    old = drive.call(7, "init_lock", worker=worker)
    drive.engine.disconnected(7, drive.now_s)
    drive.connect(7)
    back = drive.call(7, "register", **LOADING)
    assert back["worker"] == worker
    assert "lease" not in back  # the one it has counts
    assert isinstance(drive.refused(7, "init_unlock", worker=worker, token=old["token"]), Fenced)
    assert drive.call(7, "init_unlock", worker=worker, token=back["init_token"]) == {}


@pytest.mark.parametrize("wrong", [{"loading": 601 * MB}, {"held": MB}])
def test_a_load_that_could_not_have_been_granted_is_refused(
    drive: Drive, wrong: dict[str, int]
) -> None:
    drive.connect(7)
    assert isinstance(drive.refused(7, "register", **{**LOADING, **wrong}), InvalidParams)
    assert drive.booked() == 0


def comes_back(drive: Drive, reading: int | None, **params: Any) -> None:
    """A worker of 7 registers; its process holds so many bytes, or nobody can read how many."""
    checked = check_params("register", {"quota": 1000 * MB, **params})
    drive.engine.request(7, 1, "register", checked, drive.now_s, process(7, reading))


@pytest.mark.parametrize("reading", [1000 * MB, None])
def test_a_worker_without_a_model_that_comes_back_first_hides_no_bytes(
    drive: Drive, reading: int | None
) -> None:
    drive.connect(7)
    comes_back(drive, reading, model="cold")
    comes_back(drive, 1000 * MB, model="warm", held=900 * MB, baseline=100 * MB)
    assert drive.engine.state.processes[identity(7)].baseline == 100 * MB


def test_a_process_that_cannot_be_read_is_believed_what_it_held_before(drive: Drive) -> None:
    drive.connect(7)
    comes_back(drive, None, model="warm", held=900 * MB, baseline=100 * MB)
    assert drive.engine.state.processes[identity(7)].baseline == 100 * MB


def test_what_a_load_has_taken_is_not_what_its_process_held_before(drive: Drive) -> None:
    drive.connect(7)
    comes_back(drive, 350 * MB, **LOADING)
    assert drive.engine.state.processes[identity(7)].baseline == 50 * MB


@pytest.mark.parametrize("what", ["held", "loading"])
def test_nobody_is_taken_back_before_memory_was_read(what: str) -> None:
    made = Engine(settings(), Access(990, 50, 60), generation=2, recovering_until_s=2.5)
    drive = Drive(made)
    drive.connect(7)
    mine = {"model": "a", "quota": MB, what: MB}
    assert isinstance(drive.refused(7, "register", **mine), MemoryUnknown)
