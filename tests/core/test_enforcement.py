"""Workers with an account of their own: who is blamed, what is closed, what comes back."""

from dataclasses import replace
from typing import Any

import pytest

from tests.core.drive import Drive
from tests.core.fakes import MB, engine, identity
from umad.core.actions import Action, CloseAccount, OpenAccount, Reply, SetLimit
from umad.core.pace import FAST_PACE_S
from umad.errors import LeaseNotFound, NeverFits, QuotaDenied, WorkerRevoked
from umad.values import AccountFigures


@pytest.fixture
def drive() -> Drive:
    return Drive(engine())


def of(actions: list[Action], kind: type) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def figures(used: int, returned: int = 0) -> AccountFigures:
    return AccountFigures(used=used, peak=used, refused=0, returned=returned)


def two(drive: Drive) -> None:
    """Workers 1 and 2 of pid 7, quota 300 MiB each, with accounts 0 and 1."""
    drive.loaded(7, "greedy", 300 * MB, guard=True)
    drive.loaded(7, "good", 300 * MB, guard=True)


def test_a_guarded_worker_gets_an_account_and_the_page(drive: Drive) -> None:
    drive.connect(7)
    answer = drive.call(7, "register", model="llama", quota=300 * MB, guard=True)
    assert answer["account"] == 0
    [opened] = of(drive.last, OpenAccount)
    assert opened == OpenAccount(identity(7), 0, 0, again=False)
    [reply] = of(drive.last, Reply)
    assert reply.page == identity(7)
    assert drive.last.index(opened) < drive.last.index(reply)
    other = drive.call(7, "register", model="qwen", quota=MB, guard=True)
    assert other["account"] == 1
    assert "account" not in drive.call(7, "register", model="plain", quota=MB)


def test_the_limit_follows_the_books_and_comes_before_the_grant(drive: Drive) -> None:
    drive.connect(7)
    worker = drive.call(7, "register", model="llama", quota=300 * MB, peak=900 * MB, guard=True)[
        "worker"
    ]

    def told() -> list[int]:
        limits = of(drive.last, SetLimit)
        assert all(drive.last.index(limit) == index for index, limit in enumerate(limits))
        return [limit.limit for limit in limits]

    lease = drive.call(7, "reserve", worker=worker)
    assert told() == [900 * MB]
    drive.call(7, "commit", lease=lease["lease"], token=lease["token"], measured=MB)
    assert told() == [300 * MB]
    burst = drive.call(7, "admit", worker=worker, bytes=50 * MB)
    assert told() == [350 * MB]
    drive.call(7, "release", lease=burst["lease"], token=burst["token"])
    assert told() == [300 * MB]
    drive.call(7, "ping")
    assert told() == []
    drive.call(7, "unregister", worker=worker)
    assert told() == [0]


def test_a_worker_over_its_account_is_fenced_alone_and_its_bytes_come_back(drive: Drive) -> None:
    two(drive)
    drive.look({7: 500 * MB}, accounts={1: figures(400 * MB), 2: figures(100 * MB)})
    assert of(drive.last, CloseAccount) == [CloseAccount(identity(7), 0)]
    assert drive.event("revoked")["worker"] == "greedy"
    assert drive.event("revoked")["source"] == "account page"
    assert [note.params["worker"] for note in drive.notified("revoke")] == [1]
    assert drive.engine.pace(drive.now_s).look_s == FAST_PACE_S
    assert isinstance(drive.refused(7, "admit", worker=1, bytes=MB), WorkerRevoked)
    drive.call(7, "admit", worker=2, bytes=MB)

    drive.now_s += 0.012
    drive.look({7: 110 * MB}, accounts={1: figures(400 * MB, 395 * MB), 2: figures(100 * MB)})
    stopped = drive.event("stopped")
    assert (stopped["fence"], stopped["worker"]) == ("return", "greedy")
    assert stopped["seen_to_gone_s"] == pytest.approx(0.012)
    assert stopped["seen_to_kill_s"] is None
    assert stopped["left_bytes"] == 110 * MB
    assert drive.kills() == []
    drive.look({7: 110 * MB}, accounts={2: figures(100 * MB)})
    assert drive.booked() == 301 * MB
    assert drive.engine.status(drive.now_s)["workers"][0]["state"] == "fenced"
    # The slot of a fenced worker is not given to the next one while its thread may live on.
    fresh = drive.call(7, "register", model="greedy", quota=MB, guard=True)
    assert fresh["account"] == 2
    drive.call(7, "unregister", worker=1)
    drive.look({7: 110 * MB}, accounts={2: figures(100 * MB)})
    assert drive.call(7, "register", model="next", quota=MB, guard=True)["account"] == 0


def test_who_is_fenced_is_granted_nothing_it_still_waited_for(drive: Drive) -> None:
    two(drive)
    waiting = drive.ask(7, "admit", worker=1, bytes=1700 * MB, wait_s=10.0)
    assert drive.answer(waiting) is None
    drive.look({7: 700 * MB}, safe=4096 * MB, accounts={1: figures(400 * MB), 2: figures(MB)})
    assert drive.event("revoked")["worker"] == "greedy"
    assert isinstance(drive.answer(waiting), WorkerRevoked)
    assert drive.engine.status(drive.now_s)["queue"] == []


def test_bytes_that_do_not_come_back_by_the_deadline_cost_the_process(drive: Drive) -> None:
    two(drive)
    drive.look({7: 500 * MB}, accounts={1: figures(400 * MB), 2: figures(100 * MB)})
    drive.now_s += 0.09
    drive.look({7: 500 * MB}, accounts={1: figures(400 * MB), 2: figures(100 * MB)})
    assert drive.kills() == []
    drive.now_s += 0.01
    drive.look({7: 500 * MB}, accounts={1: figures(400 * MB), 2: figures(100 * MB)})
    assert drive.kills() == [7]
    drive.engine.kill_sent(identity(7), drive.now_s)
    drive.exit(7)
    assert drive.event("stopped")["fence"] == "sigkill"
    assert drive.booked() == 0


def test_what_no_account_counts_is_the_whole_process_fault(drive: Drive) -> None:
    two(drive)
    drive.look({7: 700 * MB}, accounts={1: figures(100 * MB), 2: figures(100 * MB)})
    assert drive.event("revoked")["worker"] == "good,greedy"
    assert of(drive.last, CloseAccount) == []
    drive.now_s += 0.05
    drive.look({7: 700 * MB}, accounts={1: figures(100 * MB), 2: figures(100 * MB)})
    assert drive.kills() == [7]


def test_the_blamed_worker_protects_its_process(drive: Drive) -> None:
    two(drive)
    drive.look({7: 900 * MB}, accounts={1: figures(800 * MB), 2: figures(100 * MB)})
    assert drive.event("revoked")["worker"] == "greedy"
    assert drive.events().count("revoked") == 1


def test_a_page_that_cannot_be_read_leaves_the_process_to_be_judged(drive: Drive) -> None:
    two(drive)
    drive.look({7: 650 * MB}, accounts={})
    assert drive.event("revoked")["worker"] == "good,greedy"


def test_a_fenced_worker_that_dies_with_its_process(drive: Drive) -> None:
    two(drive)
    drive.look({7: 500 * MB}, accounts={1: figures(400 * MB)})
    drive.exit(7)
    assert drive.event("stopped")["fence"] == "revoke"
    assert drive.booked() == 0


def test_a_fenced_worker_that_leaves_by_itself_is_no_case_any_more(drive: Drive) -> None:
    two(drive)
    drive.look({7: 500 * MB}, accounts={1: figures(400 * MB)})
    drive.call(7, "unregister", worker=1)
    drive.now_s += 0.05
    drive.look({7: 100 * MB}, accounts={2: figures(100 * MB)})
    assert drive.kills() == []
    assert not list(drive.engine.state.watchdog.cases)


def test_a_fenced_worker_that_was_cut_off_still_gives_its_slot_back(drive: Drive) -> None:
    two(drive)
    drive.look({7: 500 * MB}, accounts={1: figures(400 * MB), 2: figures(100 * MB)})
    drive.now_s += 0.012
    drive.look({7: 110 * MB}, accounts={1: figures(400 * MB, 395 * MB), 2: figures(100 * MB)})
    fresh = drive.call(7, "register", model="greedy", quota=MB, guard=True)
    drive.engine.disconnected(7, drive.now_s)
    drive.connect(7)
    again = {"model": "greedy", "quota": 300 * MB, "guard": True}
    assert drive.call(7, "register", **again, account=0)["worker"] == 1
    assert isinstance(drive.refused(7, "admit", worker=1, bytes=MB), WorkerRevoked)
    back = drive.call(7, "register", **again, account=fresh["account"])
    assert back["worker"] == fresh["worker"], "who took its name is another"
    drive.call(7, "unregister", worker=1)
    drive.look({7: 110 * MB}, accounts={2: figures(100 * MB)})
    assert drive.call(7, "register", model="next", quota=MB, guard=True)["account"] == 0


def test_after_a_restart_a_worker_keeps_its_slot(drive: Drive) -> None:
    drive.connect(7)
    answer = drive.call(
        7, "register", model="b", quota=300 * MB, guard=True, account=5, held=100 * MB
    )
    assert answer["account"] == 5
    [opened] = of(drive.last, OpenAccount)
    assert opened == OpenAccount(identity(7), 5, 300 * MB, again=True)
    assert drive.call(7, "register", model="c", quota=MB, guard=True)["account"] == 0
    # Somebody has it: another one.
    assert drive.call(7, "register", model="d", quota=MB, guard=True, account=5)["account"] == 1


def test_a_worker_that_was_cut_off_for_a_moment_keeps_its_account(drive: Drive) -> None:
    drive.loaded(7, "a", 300 * MB, guard=True)
    drive.engine.disconnected(7, drive.now_s)
    drive.connect(7, connection=70)
    again = drive.call(70, "register", model="a", quota=300 * MB, guard=True, account=0, held=MB)
    assert again["account"] == 0
    assert of(drive.last, OpenAccount) == []


def test_without_a_free_slot_a_worker_is_judged_by_its_process(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umad.core.registration.ACCOUNTS_MAX", 1)
    drive.connect(7)
    assert drive.call(7, "register", model="a", quota=MB, guard=True)["account"] == 0
    assert drive.call(7, "register", model="b", quota=MB, guard=True).get("account") is None


def test_a_quota_is_lowered_and_the_next_look_judges_by_it(drive: Drive) -> None:
    two(drive)
    drive.call(7, "set_quota", worker=1, quota=100 * MB)
    assert of(drive.last, SetLimit) == [SetLimit(identity(7), 0, 100 * MB)]
    assert drive.booked() == 400 * MB
    drive.look({7: 400 * MB}, accounts={1: figures(290 * MB), 2: figures(100 * MB)})
    assert drive.event("revoked")["limit_bytes"] == 100 * MB


def test_a_quota_is_raised_only_where_it_fits(drive: Drive) -> None:
    two(drive)
    assert isinstance(drive.refused(7, "set_quota", worker=1, quota=4096 * MB), NeverFits)
    assert isinstance(drive.refused(7, "set_quota", worker=1, quota=1900 * MB), QuotaDenied)
    drive.call(7, "set_quota", worker=1, quota=1000 * MB)
    assert drive.booked() == 1300 * MB
    assert drive.engine.status(drive.now_s)["workers"][0]["quota"] == 1000 * MB
    assert isinstance(drive.refused(7, "set_quota", worker=99, quota=MB), LeaseNotFound)


def test_only_an_admin_sets_quotas(drive: Drive) -> None:
    worker = drive.loaded(7, "a", 100 * MB)
    client = drive.engine.state.clients[7]
    client.permission = type(client.permission).WORKER
    assert drive.refused(7, "set_quota", worker=worker, quota=MB).code == "access_denied"


def test_figures_say_what_is_still_held() -> None:
    assert figures(10, 4).held == 6
    assert figures(4, 10).held == 0
    assert replace(figures(10), closed=True).closed
