import pytest

from umad.core.ledger import Ledger, Pool, Shortage
from umad.errors import InvariantBroken
from umad.values import Lease, LeaseKind, LeaseState

LOAD, BURST = LeaseKind.LOAD, LeaseKind.BURST


def ledger(budget: int = 1000) -> Ledger:
    made = Ledger()
    made.set_pool(Pool("system", budget))
    return made


def granted(lease: Lease | Shortage) -> Lease:
    assert isinstance(lease, Lease)
    return lease


def reserve(books: Ledger, worker: int, *sizes: int, kind: LeaseKind = LOAD) -> Lease | Shortage:
    return books.reserve(worker, kind, tuple(("system", size) for size in sizes), 10.0)


def test_a_reservation_counts_at_once() -> None:
    books = ledger()
    granted(reserve(books, 1, 600))
    assert books.booked("system") == 600
    assert reserve(books, 2, 500) == Shortage("system", 500, 400, 1000, ever=True)
    assert books.booked("system") == 600


def test_more_than_the_budget_can_never_fit() -> None:
    short = reserve(ledger(), 1, 1001)
    assert isinstance(short, Shortage)
    assert not short.ever


def test_parts_are_booked_together_or_not_at_all() -> None:
    books = ledger()
    assert isinstance(reserve(books, 1, 300, 300, 300, 300), Shortage)
    assert books.booked("system") == 0
    assert granted(reserve(books, 1, 300, 300, 300)).bytes == 900


def test_what_has_no_deadline_is_not_extended() -> None:
    books = Ledger()
    books.set_pool(Pool("system", 100))
    with pytest.raises(InvariantBroken, match="no deadline"):
        books.extend(books.restore(1, "system", 10), 5.0)


def test_commit_shrinks_and_ends_the_deadline() -> None:
    books = ledger()
    lease = granted(reserve(books, 1, 400, 400))
    kept = books.commit(lease, 500)
    assert (kept.state, kept.bytes, kept.deadline_s) == (LeaseState.COMMITTED, 500, None)
    assert books.booked("system") == 500
    with pytest.raises(InvariantBroken):
        books.commit(kept, 400)


def test_released_bytes_stay_booked_until_they_are_seen_to_be_gone() -> None:
    books = ledger()
    lease = books.commit(granted(reserve(books, 1, 800)), 800)
    books.release(lease)
    assert books.booked("system") == 800
    books.settle([1], LOAD, still_there=300)
    assert books.booked("system") == 300
    books.settle([1], LOAD, still_there=300)
    assert books.booked("system") == 300
    books.settle([1], LOAD, still_there=0)
    assert books.booked("system") == 0
    assert not books.leases


def test_settling_never_frees_what_is_in_use() -> None:
    books = ledger()
    granted(reserve(books, 1, 500))
    books.release(granted(reserve(books, 1, 200)))
    books.settle([1], LOAD, still_there=0)
    assert books.booked("system") == 500


def test_a_lease_is_released_once() -> None:
    books = ledger()
    lease = books.release(granted(reserve(books, 1, 100)))
    with pytest.raises(InvariantBroken):
        books.release(lease)


def test_a_worker_gets_back_what_it_has_just_released() -> None:
    books = ledger()
    burst = granted(reserve(books, 1, 900, kind=BURST))
    books.release(burst)
    again = books.reclaim(1, 600, 20.0)
    assert again is not None
    assert again.token != burst.token
    assert books.booked("system") == 900
    assert books.reclaim(1, 600, 20.0) is None
    assert books.reclaim(2, 100, 20.0) is None
    books.check()


def test_a_child_pool_takes_its_bytes_from_its_parent() -> None:
    books = ledger(1000)
    books.set_pool(Pool("gtt", 700, "system"))
    granted(books.reserve(1, LOAD, (("gtt", 600),), None))
    assert (books.booked("gtt"), books.booked("system")) == (600, 600)
    assert books.shortage([("gtt", 200)]) == Shortage("gtt", 200, 100, 700, ever=True)
    assert books.shortage([("system", 500)]) == Shortage("system", 500, 400, 1000, ever=True)
    # Two parts that fit alone and not together, since both are the same DRAM.
    assert isinstance(books.shortage([("gtt", 100), ("system", 350)]), Shortage)
    books.check()


def test_a_shrunk_budget_grants_nothing_until_the_books_fit_again() -> None:
    books = ledger()
    lease = granted(reserve(books, 1, 800))
    books.set_pool(Pool("system", 500))
    assert reserve(books, 2, 1) == Shortage("system", 1, 0, 500, ever=True)
    books.drop(1)
    assert lease.id not in books.leases
    granted(reserve(books, 2, 1))


def test_restore_books_what_is_a_fact() -> None:
    books = ledger(100)
    lease = books.restore(1, "system", 300)
    assert (lease.state, books.booked("system")) == (LeaseState.COMMITTED, 300)
    books.check()


def test_deadlines() -> None:
    books = ledger()
    assert books.next_deadline_s() is None
    lease = granted(reserve(books, 1, 10))
    assert books.next_deadline_s() == 10.0
    assert books.expired(9.9) == []
    assert books.expired(10.0) == [lease]


@pytest.mark.parametrize("damage", ["booked", "lost owner", "foreign lease", "sum", "empty part"])
def test_check_finds_planted_damage(damage: str) -> None:
    books = ledger()
    lease = granted(reserve(books, 1, 10))
    books.check()
    if damage == "booked":
        books._booked["system"] += 1
    elif damage == "lost owner":
        books._of_worker.clear()
    elif damage == "foreign lease":
        books._of_worker[2] = books._of_worker.pop(1)
    elif damage == "sum":
        books._of_worker[1].active += 1
    else:
        books._leases[lease.id] = Lease(lease.id, 1, LOAD, lease.state, (("system", 0),), 1)
    with pytest.raises(InvariantBroken):
        books.check()
