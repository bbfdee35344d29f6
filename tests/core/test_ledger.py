import asyncio
import random
from collections import Counter
from collections.abc import Iterator

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


class Interrupted(tuple[tuple[str, int], ...]):
    """Parts of which the third is never reached."""

    def __iter__(self) -> Iterator[tuple[str, int]]:
        yield from list(super().__iter__())[:2]
        raise asyncio.CancelledError


def test_c19_what_is_interrupted_at_its_third_part_has_booked_nothing() -> None:
    books = ledger()
    granted(reserve(books, 1, 10))
    unknown = (("system", 100), ("system", 100), ("nowhere", 100))
    with pytest.raises(KeyError):
        books.reserve(2, LOAD, unknown, 10.0)
    with pytest.raises(asyncio.CancelledError):
        books.reserve(2, LOAD, Interrupted([("system", 100)] * 4), 10.0)
    assert (books.booked("system"), len(books.leases)) == (10, 1)
    books.check()


def test_c19_in_ten_thousand_random_sequences_the_leases_are_what_is_booked() -> None:
    chance = random.Random(19)
    done: Counter[str] = Counter()
    for _ in range(10_000):
        books = Ledger()
        books.set_pool(Pool("system", 1000))
        books.set_pool(Pool("device", 600, parent="system"))
        for at in range(chance.randint(3, 12)):
            done[one_step(books, chance, float(at))] += 1
            for pool in ("system", "device"):
                held = sum(
                    size
                    for lease in books.leases.values()
                    for name, size in lease.parts
                    if pool in (name, books.pools[name].parent)
                )
                assert 0 <= books.booked(pool) == held <= books.pools[pool].budget
    assert min(done.values()) > 1000, done


def one_step(books: Ledger, chance: random.Random, now_s: float) -> str:
    """Something that may happen; what it was.  Whatever fails leaves the books as they were."""
    worker, lease = chance.randint(1, 3), None
    if books.leases:
        lease = books.leases[chance.choice(list(books.leases))]
    match chance.choice(
        ["reserve"] * 3 + ["commit", "release", "settle", "drop", "fail", "cancel"]
    ):
        case "reserve":
            sizes = [chance.choice([0, 1, 100, 300]) + 1 for _ in range(chance.randint(1, 4))]
            pool, before = chance.choice(["system", "device"]), books.booked("system")
            found = books.reserve(worker, LOAD, tuple((pool, one) for one in sizes), now_s + 3)
            if isinstance(found, Shortage):
                assert books.booked("system") == before
                return "denied"
            return "reserved"
        case "commit" if lease is not None and lease.state is LeaseState.RESERVED:
            books.commit(lease, chance.randint(1, lease.bytes))
            return "committed"
        case "release" if lease is not None and lease.state is not LeaseState.RELEASING:
            books.release(lease)
            return "released"
        case "settle":
            books.settle([worker], LOAD, chance.choice([0, 50, 500]))
            return "settled"
        case "drop":
            books.drop(worker)
            return "dropped"
        case "fail":
            with pytest.raises(KeyError):
                books.reserve(worker, LOAD, (("system", 1), ("nowhere", 1)), now_s)
            return "failed"
        case "cancel":
            with pytest.raises(asyncio.CancelledError):
                books.reserve(worker, LOAD, Interrupted([("device", 1)] * 4), now_s)
            return "cancelled"
    return "nothing"
