"""A small scripted daemon over a real socket, speaking through umad.wire."""

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from umad.errors import LeaseNotFound, RemoteProtocolError, UmadError
from umad.wire.connection import Connection
from umad.wire.messages import Notification, Request, Response, check_params

SILENT = object()  # a handler that returns this leaves its request open
WAIT_S = 5.0


class Daemon:
    """Books leases in a dict.  ``handlers`` replaces single methods, ``calls`` records all."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.generation = 0
        self.handlers: dict[str, Callable[[dict[str, Any]], Any]] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.leases: dict[int, tuple[int, int]] = {}  # lease -> (token, bytes)
        self.leaked = 0
        self.answers: list[Response] = []
        self.changed = threading.Condition()
        self._ids = itertools.count(1)
        self._peers: dict[socket.socket, Connection] = {}
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None

    def start(self) -> "Daemon":
        self.generation += 1
        Path(self.path).unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(16)
        self._spawn(self._accept, self._listener)
        return self

    def stop(self) -> None:
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            Path(self.path).unlink(missing_ok=True)
            self._listener = None
        self.cut()
        for thread in self._threads:
            thread.join(WAIT_S)
        self._threads.clear()

    def cut(self) -> None:
        """End every connection, but go on listening."""
        with self.changed:
            for peer in self._peers:
                with contextlib.suppress(OSError):
                    peer.shutdown(socket.SHUT_RDWR)

    def tell(self, method: str, **params: Any) -> None:
        with self.changed:
            for peer, connection in self._peers.items():
                peer.sendall(connection.send_notification(method, params))

    def ask(self, method: str) -> None:
        with self.changed:
            for peer, connection in self._peers.items():
                peer.sendall(connection.send_request(method, {})[1])

    def restart_ids(self) -> None:
        """Number workers, leases and tokens from the start, as a new daemon may."""
        self._ids = itertools.count(1)

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_S), self.calls

    def of(self, method: str) -> list[dict[str, Any]]:
        return [params for name, params in self.calls if name == method]

    @property
    def booked(self) -> int:
        return sum(size for _, size in self.leases.values())

    def grant(self, size: int) -> dict[str, Any]:
        lease, token = next(self._ids), next(self._ids)
        self.leases[lease] = (token, size)
        return {"lease": lease, "token": token, "bytes": size, "deadline_s": 60.0}

    def _spawn(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = listener.accept()
                self._spawn(self._serve, peer)

    def _serve(self, peer: socket.socket) -> None:
        connection = Connection("server")
        with self.changed:
            self._peers[peer] = connection
        with peer, contextlib.suppress(OSError, RemoteProtocolError):
            while data := peer.recv(65536):
                for message in connection.feed(data):
                    self._answer(peer, connection, message)
        with self.changed:
            del self._peers[peer]
            self.changed.notify_all()

    def _answer(self, peer: socket.socket, connection: Connection, message: Any) -> None:
        if isinstance(message, Response):
            with self.changed:
                self.answers.append(message)
                self.changed.notify_all()
            return
        assert isinstance(message, Request | Notification)
        params = message.params
        try:
            params = check_params(message.method, message.params)
            if message.method in self.handlers:
                result = self.handlers[message.method](params)
            else:
                with self.changed:
                    result = getattr(self, f"do_{message.method}", lambda _: {})(params)
            error = None
        except UmadError as refusal:
            result, error = None, refusal.to_wire()
        with self.changed:
            self.calls.append((message.method, params))
            if isinstance(message, Request) and result is not SILENT:
                peer.sendall(connection.send_response(message.id, result=result, error=error))
            self.changed.notify_all()

    def do_hello(self, _: dict[str, Any]) -> Any:
        return {
            "version": 1,
            "daemon": "test",
            "generation": self.generation,
            "recovering": False,
            "limits": {},
        }

    def do_register(self, params: dict[str, Any]) -> Any:
        answer = {"worker": next(self._ids), "generation": self.generation, "baseline": 0}
        if "held" in params:
            answer |= self.grant(params["held"])
        elif "loading" in params and not self.leases:  # else it has that load in its books
            answer |= self.grant(params["loading"]) | {"init_token": next(self._ids)}
        return answer

    def do_reserve(self, params: dict[str, Any]) -> Any:
        return self.grant(params["bytes"])

    do_admit = do_reserve

    def do_commit(self, params: dict[str, Any]) -> Any:
        self.leases[params["lease"]] = (params["token"], params["measured"])
        return {"bytes": params["measured"]}

    def do_release(self, params: dict[str, Any]) -> Any:
        if self.leases.get(params["lease"], (None,))[0] != params["token"]:
            raise LeaseNotFound("no such lease")
        self.leaked += params["leaked"]
        return {"bytes": self.leases.pop(params["lease"])[1]}

    do_void = do_release

    def do_forward_done(self, params: dict[str, Any]) -> None:
        self.leases.pop(params.get("lease"), None)

    def do_init_lock(self, _: dict[str, Any]) -> Any:
        return {"token": next(self._ids), "deadline_s": 60.0, "position": 0}


@pytest.fixture
def until() -> Callable[[Callable[[], object]], None]:
    """Waits for what no event of the test daemon tells."""

    def wait(condition: Callable[[], object]) -> None:
        pause, deadline_s = threading.Event(), monotonic() + WAIT_S
        while not condition():
            assert monotonic() < deadline_s
            pause.wait(0.002)

    return wait


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path / "umad.sock").start()
    yield daemon
    daemon.stop()


@pytest.fixture
def silent() -> object:
    return SILENT


@pytest.fixture
def make_daemon(tmp_path: Path) -> Iterator[Callable[[], Daemon]]:
    """A daemon that is not started yet."""
    made: list[Daemon] = []

    def make() -> Daemon:
        made.append(Daemon(tmp_path / "umad.sock"))
        return made[-1]

    yield make
    for daemon in made:
        daemon.stop()
