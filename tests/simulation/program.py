"""Processes with models, their connections and what befalls them: crashes, forks, stops, cuts."""

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from tests.simulation.machine import Body, Bytes
from tests.simulation.model import CALM_S, Model, anyway
from tests.simulation.steps import Ask, Lost, Steps
from tests.simulation.world import World
from umad.errors import UmadError
from umad.units import GIB
from umad.values import AccountFigures


class Program:
    """One process after another of one name."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.name = world, f"p{number}"
        self.random = draw = Random(f"{world.scenario.seed}/{number}")
        self.people = Random(f"{world.scenario.seed}/{number}/people")
        faults = world.scenario.faults
        self.guarded = draw.random() < 0.6
        self.liar = draw.choice(("", "", "", "keeps", "greedy", "deaf", "stale"))
        if "lie" not in faults:
            self.liar = ""
        self.alive = False
        self.connection: int | None = None
        self.epoch = 0  # of its connections
        self.stopped_until_s = 0.0
        self.body = Body(world.new_identity(), 0)
        self.models = [
            Model(self, f"{self.name}m{index}", Random(f"{world.scenario.seed}/{number}/{index}"))
            for index in range(draw.randint(1, 3))
        ]
        world.after(draw.uniform(0, CALM_S), self.begin)
        if "crash" in faults:
            self._often(20 * 3600, self.crash)
        if "stop" in faults:
            self._often(15 * 3600, self.freeze)
        if "fork" in faults:
            self._often(15 * 3600, self.fork)
        if "cut" in faults:
            self._often(10 * 3600, self.cut)
        if "quota" in faults:
            self._often(4 * 3600, self.regulate)

    def _often(self, mean_s: float, deed: Callable[[], None]) -> None:
        def again() -> None:
            if self.alive:
                deed()
            self._often(mean_s, deed)

        rate = self.world.scenario.trouble / mean_s
        self.world.after(self.random.expovariate(rate), again)

    # ------------------------------------------------------------ its process

    def begin(self) -> None:
        """A process starts."""
        baseline = int(self.random.uniform(0.2, 1.5) * GIB)
        self.body = Body(self.world.new_identity(), baseline)
        self.alive, self.stopped_until_s = True, 0.0
        for model in self.models:
            model.reset()
            self.body.blocks.append(model.block)
        self.world.machine.bodies[self.body.identity] = self.body
        self.world.spawn(self, self._link())
        for model in self.models:
            model.task = self.world.spawn(self, model.main())

    def die(self, body: Body) -> None:
        """The process ends, by whatever; its children may live on for a while."""
        if body is not self.body or not self.alive:
            return
        world = self.world
        world.note(self.name, "dies")
        self.alive, body.own = False, False
        if not body.family:
            world.machine.bodies.pop(body.identity, None)
        first, second = self._closed, self._reaped
        if self.random.random() < 0.5:
            first, second = second, first
        first(body)
        world.after(self.random.uniform(0, 0.05), second, body)
        world.after(self.random.uniform(1, 10), self.begin)
        for child in list(body.family):
            world.after(self.random.uniform(0.5, 60), world.child_ends, body, child)

    def _closed(self, body: Body) -> None:
        if self.connection is not None and body is self.body:
            self.world.hang_up(self.connection)

    def _reaped(self, body: Body) -> None:
        self.world.ended(body.identity)

    def crash(self) -> None:
        """A bug of its own."""
        self.die(self.body)

    def freeze(self) -> None:
        """SIGSTOP, and SIGCONT after a while."""
        self.world.note(self.name, "is stopped")
        self.stopped_until_s = self.world.now_s + self.random.choice((0.5, 5, 70, 200))

    def fork(self) -> None:
        """A child with memory of its own, within what its parent may hold."""
        spare = sum(model.quota - model.size for model in self.models if model.lease)
        if spare <= 0 or self.liar or len(self.body.family) > 1:
            return
        child, block = self.world.new_identity(), Bytes()
        block.move(spare // 4, self.world.now_s, 0.5)
        self.body.family[child] = block
        self.world.after(self.random.uniform(5, 3600), self.world.child_ends, self.body, child)

    def cut(self) -> None:
        """The connection ends and nothing else."""
        if self.connection is not None:
            self.world.hang_up(self.connection)

    def regulate(self) -> None:
        """People give one of its models another quota; it learns nothing of that."""
        model = self.people.choice(self.models)
        if model.worker is not None:
            lower = (model.quota + model.size) // 2  # its forks stay within it
            quota = self.people.choice((lower, model.quota, int(model.quota * 1.4)))
            ask = {"worker": model.worker, "quota": quota}
            self.world.spawn(self, anyway("set_quota", ask))

    # ------------------------------------------------------------ its socket

    def lost(self) -> None:
        """The connection is gone: all its workers are to be registered again."""
        self.epoch += 1
        for model in self.models:
            model.worker = None
            if model.lease:
                model.stale = [model.lease, *model.stale[:3]]
        if self.alive:
            self.world.spawn(self, self._link())

    def _link(self) -> Steps:
        epoch = self.epoch
        yield self.random.uniform(0.01, 0.4)
        while self.epoch == epoch and self.connection is None:
            self.connection = self.world.connect(self)
            if self.connection is None:
                yield 0.25
        for model in self.models:
            yield from self._register(model, epoch)
        if self.liar == "stale":
            for model in self.models:
                for lease in model.stale:
                    if lease not in (model.lease, model.owed[1]):
                        yield from anyway("release", lease, refused=True)

    def register_again(self, model: Model) -> None:
        """One worker that was fenced begins anew."""
        self.world.spawn(self, self._register(model, self.epoch))

    def _register(self, model: Model, epoch: int) -> Steps:
        while self.epoch == epoch:
            params = self._registration(model)
            try:
                answer = yield Ask("register", params)
            except Lost:
                return
            except UmadError as error:
                if error.code == "worker_revoked":
                    model.revoked = True
                    if model.task is not None:
                        self.world.wake(model.task)
                    return
                yield max(0.1, error.retry_after_s or 1.0)
                continue
            self._registered(model, params, answer)
            yield from model.pay()
            return

    def _registered(
        self, model: Model, params: Mapping[str, Any], answer: Mapping[str, Any]
    ) -> None:
        model.worker, model.slot = answer["worker"], answer.get("account")
        loaded = "held" in params
        if answer["generation"] != model.generation and not loaded:
            model.lease = {}  # of one that has not begun to load the new daemon knows nothing
        model.generation = answer["generation"]
        if "bursts" in params:
            model.burst_lease = answer["bursts"][0] or {}
        if "lease" in answer:
            model.lease = {"lease": answer["lease"], "token": answer["token"]}
        elif loaded:
            model.draining = True  # its booking is gone: so must the model be
            model.lease = {}
        if "loading" in params:
            model.lock = {}
            if "init_token" in answer:
                until_s = self.world.now_s + self.world.settings.leases.init_timeout
                model.lock = {"token": answer["init_token"], "until_s": until_s}
        if model.task is not None:
            self.world.wake(model.task)

    def _registration(self, model: Model) -> dict[str, Any]:
        params: dict[str, Any] = {
            "model": model.name,
            "quota": model.quota,
            "peak": model.peak,
            "priority": model.priority,
            "pin": model.pin,
            "guard": self.guarded,
            "evict": True,
        }
        if model.state in ("ready", "serving"):
            params |= {"held": model.size, "baseline": self.body.baseline}
            if model.lent and model.generation != self.world.generation:
                params["bursts"] = [model.lent]
        if model.state == "loading":
            params |= {"loading": model.peak, "baseline": self.body.baseline}
        if self.guarded and model.slot is not None:
            params["account"] = model.slot
        return params

    def notified(self, method: str, params: Mapping[str, Any]) -> None:
        """A word of the daemon, heard when the process runs."""
        if self.stopped_until_s > self.world.now_s:
            wait_s = self.stopped_until_s - self.world.now_s
            self.world.after(wait_s, self._hear, self.epoch, method, params)
        else:
            self._hear(self.epoch, method, params)

    def _hear(self, epoch: int, method: str, params: Mapping[str, Any]) -> None:
        if epoch != self.epoch or not self.alive:
            return
        for model in self.models:
            if model.worker is not None and model.worker == params.get("worker"):
                model.notified(method)

    # -------------------------------------------------------------- its guard

    def used(self, slot: int) -> int | None:
        """What an account is charged."""
        now_s = self.world.now_s
        return next((one.block.at(now_s) for one in self.models if one.slot == slot), None)

    def count(self, accounts: dict[int, AccountFigures]) -> None:
        """What its account page says now."""
        if not (self.alive and self.guarded):
            return
        now_s = self.world.now_s
        for model in self.models:
            if model.worker is None or model.slot is None:
                continue
            held = model.block.at(now_s)
            closed = (self.body.identity, model.slot) in self.world.fenced
            accounts[model.worker] = AccountFigures(held, held, 0, 0, closed, closed)

    def fence(self, slot: int) -> None:
        """The guard takes the tensors of one account away."""
        for model in self.models:
            if model.slot == slot:
                model.block.move(0, self.world.now_s, self.random.uniform(0.01, 0.08))
