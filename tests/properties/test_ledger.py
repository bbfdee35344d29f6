"""The ledger against a plain dict, step by step."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from umad.core.ledger import Ledger, Pool
from umad.values import Lease, LeaseKind, LeaseState

SIZES = st.integers(min_value=1, max_value=400)
WORKERS = st.integers(min_value=1, max_value=4)


class Books(RuleBasedStateMachine):
    """``model`` is what must be booked: bytes by lease id, the plain truth."""

    reserved = Bundle("reserved")
    committed = Bundle("committed")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.ledger.set_pool(Pool("system", 1000))
        self.ledger.set_pool(Pool("gtt", 600, "system"))
        self.model: dict[int, tuple[int, str, int, bool]] = {}
        self.tokens: set[int] = set()

    def booked(self, pool: str) -> int:
        return sum(
            size for _, name, size, _ in self.model.values() if name == pool or pool == "system"
        )

    @rule(target=reserved, worker=WORKERS, size=SIZES, pool=st.sampled_from(["system", "gtt"]))
    def reserve(self, worker: int, size: int, pool: str) -> object:
        fits = all(
            self.booked(name) + size <= self.ledger.pools[name].budget for name in {pool, "system"}
        )
        lease = self.ledger.reserve(worker, LeaseKind.BURST, ((pool, size),), None)
        assert isinstance(lease, Lease) == fits
        if isinstance(lease, Lease):
            assert lease.token not in self.tokens
            self.tokens.add(lease.token)
            self.model[lease.id] = (worker, pool, size, False)
        return lease

    @rule(worker=WORKERS, sizes=st.lists(SIZES, min_size=2, max_size=5))
    def reserve_parts_that_do_not_fit(self, worker: int, sizes: list[int]) -> None:
        if self.booked("system") + sum(sizes) > self.ledger.pools["system"].budget:
            parts = tuple(("system", size) for size in sizes)
            assert not isinstance(self.ledger.reserve(worker, LeaseKind.LOAD, parts, None), Lease)

    @rule(target=committed, lease=consumes(reserved), share=st.floats(0.01, 1.0))
    def commit(self, lease: object, share: float) -> object:
        if not isinstance(lease, Lease) or lease.id not in self.model:
            return None
        size = max(1, int(lease.bytes * share))
        kept = self.ledger.commit(lease, size)
        worker, pool, _, _ = self.model[lease.id]
        self.model[lease.id] = (worker, pool, size, False)
        return kept

    @rule(lease=consumes(reserved) | consumes(committed))
    def release(self, lease: object) -> None:
        if isinstance(lease, Lease) and lease.id in self.model:
            self.ledger.release(self.ledger.leases[lease.id])
            worker, pool, size, _ = self.model[lease.id]
            self.model[lease.id] = (worker, pool, size, True)

    @rule(worker=WORKERS, still_there=st.integers(0, 800))
    def settle(self, worker: int, still_there: int) -> None:
        self.ledger.settle([worker], LeaseKind.BURST, still_there)
        releasing = [
            key for key, entry in sorted(self.model.items()) if entry[0] == worker and entry[3]
        ]
        gone = sum(self.model[key][2] for key in releasing) - still_there
        for key in releasing:
            owner, pool, size, _ = self.model[key]
            freed = min(max(gone, 0), size)
            gone -= freed
            if freed == size:
                del self.model[key]
            else:
                self.model[key] = (owner, pool, size - freed, True)

    @rule(worker=WORKERS)
    def die(self, worker: int) -> None:
        mine = [key for key, entry in self.model.items() if entry[0] == worker]
        assert self.ledger.drop(worker) == sum(self.model[key][2] for key in mine)
        for key in mine:
            del self.model[key]

    @rule(budget=st.integers(0, 1200))
    def resize(self, budget: int) -> None:
        self.ledger.set_pool(Pool("system", budget))

    @rule(worker=WORKERS, size=SIZES)
    def reclaim(self, worker: int, size: int) -> None:
        lease = self.ledger.reclaim(worker, size, None)
        if lease is None:
            return
        source = next(
            key
            for key, entry in sorted(self.model.items())
            if entry[0] == worker and entry[3] and entry[2] >= size
        )
        owner, pool, had, _ = self.model[source]
        if had == size:
            del self.model[source]
        else:
            self.model[source] = (owner, pool, had - size, True)
        self.model[lease.id] = (worker, pool, size, False)

    @invariant()
    def books_equal_the_model(self) -> None:
        self.ledger.check()
        assert self.ledger.booked("system") == self.booked("system") >= 0
        assert self.ledger.booked("gtt") == self.booked("gtt") >= 0
        for worker in range(1, 5):
            owned = sum(size for owner, _, size, _ in self.model.values() if owner == worker)
            assert self.ledger.booked_by(worker) == owned
        for lease in self.ledger.leases.values():
            assert (lease.state is LeaseState.RELEASING) == self.model[lease.id][3]


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
