"""Quotas that people change at any moment, against what is booked for those that are loaded."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.core.drive import Drive
from tests.core.fakes import MB, engine
from umad.errors import UmadError

NAMES = st.sampled_from(["a", "b", "c"])
SIZES = st.integers(1, 900).map(lambda size: size * MB)
LOADED = ("loading", "ready", "draining")


class Quotas(RuleBasedStateMachine):
    """Clients ask by the quotas and peaks that they registered with; people set others."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[str, tuple[int, int]] = {}  # quota and peak, as its client knows them
        self.workers: dict[str, int] = {}
        self.leases: dict[str, dict[str, Any]] = {}
        self.held: set[str] = set()

    @initialize()
    def start(self) -> None:
        self.drive = Drive(engine('[memory]\nreserve = "1GiB"\nbudget = "2GiB"\n'))
        self.drive.connect(7)
        self.drive.look({7: 0})

    def ask(self, method: str, **params: Any) -> dict[str, Any] | None:
        answer = self.drive.answer(self.drive.ask(7, method, **params))
        return None if isinstance(answer, UmadError) else answer

    @rule(name=NAMES, quota=SIZES, more=st.integers(0, 200))
    def register(self, name: str, quota: int, more: int) -> None:
        if name not in self.workers:
            self.known[name] = (quota, quota + more * MB)
            answer = self.ask("register", model=name, quota=quota, peak=quota + more * MB)
            assert answer is not None
            self.workers[name] = answer["worker"]

    @rule(name=NAMES, share=st.floats(0.01, 1.0), parts=st.integers(0, 3))
    def reserve(self, name: str, share: float, parts: int) -> None:
        if name in self.workers and name not in self.leases:
            size = max(4, int(self.known[name][1] * share))
            asked = {"parts": [size // parts] * parts} if parts else {"bytes": size}
            answer = self.ask("reserve", worker=self.workers[name], **asked)
            if answer is not None:
                assert answer["bytes"] >= size // 4 * 3
                self.leases[name] = {"lease": answer["lease"], "token": answer["token"]}

    @rule(name=NAMES)
    def commit(self, name: str) -> None:
        if name in self.leases and self.ask("commit", measured=0, **self.leases[name]):
            self.held.add(name)

    @rule(name=NAMES)
    def release(self, name: str) -> None:
        if name in self.leases:
            self.held.discard(name)
            assert self.ask("release", **self.leases.pop(name)) is not None

    @rule(name=NAMES, quota=SIZES, peak=st.none() | SIZES)
    def set_quota(self, name: str, quota: int, peak: int | None) -> None:
        more = {} if peak is None else {"peak": peak}
        self.ask("set_quota", name=name, quota=quota, **more)

    @rule()
    def look(self) -> None:
        self.drive.now_s += 0.2
        self.drive.look({7: 0})

    @rule()
    def restart(self) -> None:
        """The clients come back to a daemon that knows nothing, with what they hold."""
        self.start()
        for name, (quota, peak) in self.known.items():
            params: dict[str, Any] = {"model": name, "quota": quota, "peak": peak}
            if name in self.leases:
                params |= {"held": 0} if name in self.held else {"loading": max(1, quota // 2)}
            answer = self.ask("register", **params)
            assert answer is not None
            self.workers[name] = answer["worker"]
            if name in self.leases:
                self.leases[name] = {"lease": answer["lease"], "token": answer["token"]}

    @invariant()
    def what_loaded_workers_may_hold_is_booked(self) -> None:
        drive = self.drive
        drive.engine.state.check()
        shown = drive.engine.status(drive.now_s)
        loaded = [one for one in shown["workers"] if one["state"] in LOADED]
        assert all(one["quota"] <= one["booked"] for one in loaded)
        assert {one["name"] for one in loaded} == self.leases.keys()
        for process in shown["processes"]:
            cold = (one for one in shown["workers"] if one["state"] not in LOADED)
            may = process["limit"] - process["baseline"]
            may -= sum(max(one["quota"], one["booked"]) for one in cold)
            assert may <= sum(one["booked"] for one in loaded)


TestQuotas = Quotas.TestCase
TestQuotas.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
