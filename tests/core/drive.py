"""Talks to an engine as clients would, without a socket."""

from typing import Any

from tests.core.fakes import identity, peer, process, snapshot
from umad.core.actions import Action, Event, Kill, Notify, Refuse, Reply
from umad.core.engine import Engine
from umad.errors import UmadError
from umad.values import Outsider
from umad.wire.messages import check_params


class Drive:
    """One engine and its clients; connection n belongs to pid n."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.now_s = 1.0
        self.last: list[Action] = []
        self._request = 0

    def connect(self, pid: int, uid: int = 0, connection: int | None = None) -> int:
        key = pid if connection is None else connection
        self.engine.connected(key, peer(pid, uid))
        return key

    def ask(self, connection: int, method: str, **params: Any) -> int:
        """Send a request; its id.  ``last`` holds what came of it."""
        self._request += 1
        client = self.engine.state.clients[connection]
        outsider: Outsider | None = params.pop("outsider", None)
        reading = process(client.peer.identity.pid, 0) if method == "register" else None
        if outsider is not None:
            reading = process(outsider.identity.pid, params.pop("holds", 0))
        self.last = self.engine.request(
            connection,
            self._request,
            method,
            check_params(method, params),
            self.now_s,
            reading,
            outsider,
        )
        return self._request

    def call(self, connection: int, method: str, **params: Any) -> dict[str, Any]:
        """Send a request and expect its answer at once."""
        answer = self.answer(self.ask(connection, method, **params))
        assert not isinstance(answer, UmadError), answer
        assert answer is not None, "it waits"
        return answer

    def refused(self, connection: int, method: str, **params: Any) -> UmadError:
        """Send a request and expect a refusal at once, and unchanged books."""
        before = dict(self.engine.state.ledger.leases)
        answer = self.answer(self.ask(connection, method, **params))
        assert isinstance(answer, UmadError), answer
        assert dict(self.engine.state.ledger.leases) == before
        return answer

    def answer(self, request: int) -> dict[str, Any] | UmadError | None:
        """What the last step answered to a request."""
        for action in self.last:
            if isinstance(action, Reply) and action.request == request:
                return dict(action.result)
            if isinstance(action, Refuse) and action.request == request:
                return action.error
        return None

    def tell(self, connection: int, method: str, **params: Any) -> None:
        self.last = self.engine.notification(
            connection, method, check_params(method, params), self.now_s
        )

    def look(self, processes: dict[int, int | None] | None = None, **more: Any) -> list[Action]:
        accounts = more.pop("accounts", None)
        self.last = self.engine.observe(
            snapshot(self.now_s, processes, **more), self.now_s, accounts
        )
        return self.last

    def pass_time(self, seconds: float) -> list[Action]:
        self.now_s += seconds
        self.last = self.engine.advance(self.now_s)
        return self.last

    def exit(self, pid: int) -> list[Action]:
        self.last = self.engine.exited(identity(pid), self.now_s)
        return self.last

    def loaded(self, pid: int, model: str, quota: int, **more: Any) -> int:
        """A connected process with one worker whose model is loaded; the worker's id."""
        if pid not in self.engine.state.clients:
            self.connect(pid)
        worker = int(self.call(pid, "register", model=model, quota=quota, **more)["worker"])
        lease = self.call(pid, "reserve", worker=worker)
        self.call(pid, "commit", lease=lease["lease"], token=lease["token"], measured=quota // 2)
        return worker

    def booked(self) -> int:
        return self.engine.state.ledger.booked("system")

    def events(self) -> list[str]:
        return [action.name for action in self.last if isinstance(action, Event)]

    def event(self, name: str) -> dict[str, Any]:
        return next(
            dict(action.fields)
            for action in self.last
            if isinstance(action, Event) and action.name == name
        )

    def kills(self) -> list[int]:
        return [action.identity.pid for action in self.last if isinstance(action, Kill)]

    def notified(self, method: str) -> list[Notify]:
        return [
            action for action in self.last if isinstance(action, Notify) and action.method == method
        ]
