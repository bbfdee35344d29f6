"""The link between the front and its engine: MessagePack-RPC over a socket pair, both ways.

Owns the form of what the two say to each other and each one's view of the other:
``LinkPeer`` is one end, ``EngineLink`` is what the front knows of an engine that comes and goes.

| from | message | params |
|---|---|---|
| front | request ``run`` | ``model``, ``job``, ``request`` (id), ``deadline_s`` (of its queuing) |
| | | and, where chunks are wanted, ``stream``: true |
| front | notification ``cancel`` | ``request`` |
| front | request ``ping`` | answered at once, as long as the engine's loop turns |
| front | request ``stop`` | answered when the workers are gone |
| front | request ``reload`` | ``config`` (text); answered when it was read |
| engine | notification ``chunk`` | ``request``, ``device``, ``text`` (that its answer grows by) |
| engine | notification ``state`` | ``model``, ``instance`` and the fields of ``ModelState`` |
| engine | notification ``work`` | ``model``, ``instance`` and the fields of ``Figures`` |
| engine | notification ``reloaded`` | none: the daemon has read its configuration again |

Rules: every ``run`` is answered, cancelled ones too; its chunks come before its answer, at most
one for each token, and together they are the answer's ``text``; a vector travels as little-endian
float32 bytes, the segments of a transcription as JSON; a result says how long its job had waited to
begin (``queued_s``); what was made on another device than the model's own says on which
(``device``), chunks too; the death of one end is an event for the other, never an exception out of
the loop.
"""

import asyncio
import contextlib
import socket
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import structlog

from umad.config import Settings
from umad.errors import (
    InvalidParams,
    LocalProtocolError,
    ModelFailed,
    ModelLoading,
    RemoteProtocolError,
    UmadError,
    WorkerLost,
    from_wire,
)
from umad.serve.figures import sum_of
from umad.wire.connection import Connection
from umad.wire.frames import Limits
from umad.wire.messages import Message, Notification, Request, Response

# Best first.  ``draining``: told to go, at its last job; ``waking``: loaded because somebody wants
# it; ``cold``: not loaded, until somebody does; ``loading``: loaded unasked.
MODEL_STATES: Final = ("ready", "draining", "waking", "cold", "loading", "waiting", "failed")
TAKES_REQUESTS: Final = frozenset({"ready", "draining", "waking", "cold"})
_MESSAGE_BYTES_MIN: Final = 64 << 20
# The front takes 2,000 connections; the rest is room for requests that were cancelled.
_OPEN_REQUESTS_MAX: Final = 1 << 13
OnChunk = Callable[[str, str | None], None]
log = structlog.get_logger()


def link_limits(settings: Settings) -> Limits:
    """The caps of the link; both ends compute them from what no reload changes."""
    return Limits(
        # A job is never larger than the body it came in, but for the names of its fields.
        message_bytes=max(_MESSAGE_BYTES_MIN, settings.serve.body_max + (1 << 20)),
        elements=1 << 16,
        open_requests=_OPEN_REQUESTS_MAX,
    )


@dataclass(frozen=True, slots=True)
class ModelState:
    """Where one instance of a model is.

    ``stage`` and ``ratio`` (0..1) are the load's progress, ``resident`` its bytes once ready,
    ``error`` an error map that says why it is not, ``retry_after_s`` when that may change.
    ``device`` is where a model that is ready runs, ``takes`` how many jobs it can use at once.
    ``device_quota`` says of one on a GPU whether
    its quota binds there: "on", or "off: " and why.
    """

    state: str = "waiting"
    stage: str = ""
    ratio: float = 0.0
    resident: int = 0
    error: Mapping[str, Any] | None = None
    retry_after_s: float | None = None
    device_quota: str = ""
    device: str = ""
    takes: int = 1


class LinkPeer(asyncio.Protocol):
    """One end of the link; lives in one event loop.

    Args:
        role: "client" for the front, "server" for the engine.
        limits: as ``link_limits`` says.
        on_request: gets (id, method, params) and calls ``answer`` now or later.
        on_notification: gets (method, params).
        on_lost: called once, after every open call has failed.
    """

    def __init__(
        self,
        role: Literal["client", "server"],
        limits: Limits,
        *,
        on_request: Callable[[int, str, dict[str, Any]], None] | None = None,
        on_notification: Callable[[str, dict[str, Any]], None] | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self._connection = Connection(role, limits, handshake=False)
        self._on_request = on_request
        self._on_notification = on_notification
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}

    async def open(self, sock: socket.socket) -> None:
        """Begin on this end of a socket pair; the socket belongs to the loop from here on."""
        sock.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=sock)

    async def call(self, method: str, params: Mapping[str, Any]) -> Any:
        """Ask the other end.

        Raises:
            WorkerLost: the other end is gone, or went before it answered.
            UmadError: what it answered.
            LocalProtocolError: the request is too large for the link.
        """
        if self._transport is None:
            raise _lost()
        ident, data = self._connection.send_request(method, params)
        self._transport.write(data)
        answer = self._calls[ident] = asyncio.get_running_loop().create_future()
        return await answer

    def notify(self, method: str, params: Mapping[str, Any]) -> None:
        """Tell the other end; nothing happens when it is gone."""
        if self._transport is not None:
            self._transport.write(self._connection.send_notification(method, params))

    def answer(
        self, ident: int, *, result: Any = None, error: Mapping[str, Any] | None = None
    ) -> None:
        """Answer a request, once; nothing happens when the other end is gone."""
        if self._transport is None:
            return
        try:
            data = self._connection.send_response(ident, result=result, error=error)
        except LocalProtocolError as fault:
            refused = ModelFailed(f"the answer cannot travel: {fault.message}")
            data = self._connection.send_response(ident, error=refused.to_wire())
        self._transport.write(data)

    def close(self) -> None:
        """End the link from this end."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        try:
            for message in self._connection.feed(data):
                self._receive(message)
        except RemoteProtocolError as error:
            log.error("link.broken", reason=error.message)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        self._transport = None
        self._connection.close()
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.done():
                call.set_exception(_lost())
        if self._on_lost is not None:
            self._on_lost()

    def _receive(self, message: Message) -> None:
        if isinstance(message, Response):
            call = self._calls.pop(message.id)
            if call.done():  # cancelled meanwhile
                return
            if message.error is None:
                call.set_result(message.result)
            else:
                call.set_exception(from_wire(message.error))
        elif isinstance(message, Request):
            if self._on_request is None:
                raise RemoteProtocolError(f"this end takes no requests, got {message.method}")
            self._on_request(message.id, message.method, message.params)
        elif isinstance(message, Notification) and self._on_notification is not None:
            self._on_notification(message.method, message.params)


class EngineLink:
    """What the front knows of its engine, and how it asks it for work.

    The supervisor attaches each new engine and sets ``restarts`` and ``back_in_s`` (when a lost
    engine is started again); the application reads and calls ``run``.  ``lost_loading`` are the
    models that the last engine was loading when it ended.
    """

    def __init__(self, settings: Settings) -> None:
        self._limits = link_limits(settings)
        self._instances = _instances(settings)
        self._peer: LinkPeer | None = None
        self._states: dict[str, list[ModelState]] = {}
        self._streams: dict[str, OnChunk] = {}  # by request, while it runs
        self._work: dict[tuple[str, int], dict[str, Any]] = {}  # by model and instance
        self._forget("the inference process is starting")
        self.restarts = 0
        self.back_in_s = 1.0
        self.lost_loading: list[str] = []
        self.on_change: Callable[[str, ModelState], None] = lambda _model, _state: None
        self.on_reloaded: Callable[[], None] = lambda: None

    async def attach(self, sock: socket.socket) -> asyncio.Event:
        """Begin with a new engine; the event is set when it is lost."""
        lost = asyncio.Event()

        def on_lost() -> None:
            self._peer = None
            self.lost_loading = [
                name
                for name, states in self._states.items()
                if any(state.state in ("loading", "waking") for state in states)
            ]
            self._forget("the inference process ended and is being started again")
            lost.set()

        peer = LinkPeer("client", self._limits, on_notification=self._note, on_lost=on_lost)
        await peer.open(sock)
        self._peer = peer
        return lost

    def check(self, model: str) -> None:
        """Pass when the model takes requests.

        Raises:
            UmadError: of status 503, why it does not.
        """
        best = self._best(model)
        if best.state in TAKES_REQUESTS:
            return
        shown = {"model": model, "state": best.state, "stage": best.stage, "ratio": best.ratio}
        if best.error is None:
            raise ModelLoading(
                f"{model} is {best.state} ({best.ratio:.0%} of {best.stage or 'its load'})",
                retry_after_s=best.retry_after_s or 5,
                details=shown,
            )
        error = not_loaded(model, from_wire(best.error))
        error.retry_after_s = best.retry_after_s or error.retry_after_s or self.back_in_s
        error.details |= shown
        raise error

    async def run(
        self,
        model: str,
        job: Mapping[str, Any],
        *,
        request: str,
        deadline_s: float,
        on_chunk: OnChunk | None = None,
    ) -> Mapping[str, Any]:
        """Have a job done; cancelling this cancels the job.

        Args:
            model: its name.
            job: the plain map of the model's kind.
            request: an id that no other open request has.
            deadline_s: how long it may wait for its turn.
            on_chunk: called in the loop with each piece of the answer's text as it comes, in
                order, and the device, if it is not the model's own; the last one comes before
                this returns.

        Raises:
            InvalidParams: the job holds what the link cannot carry.
            UmadError: the engine's refusal; ``WorkerLost`` when it ended meanwhile.
        """
        if self._peer is None:
            raise _lost(self.back_in_s)
        peer = self._peer
        asked = {"model": model, "job": job, "request": request, "deadline_s": deadline_s}
        if on_chunk is not None:
            asked["stream"] = True
            self._streams[request] = on_chunk
        try:
            result = await peer.call("run", asked)
        except asyncio.CancelledError:
            peer.notify("cancel", {"request": request})
            raise
        except LocalProtocolError as error:
            raise InvalidParams(
                f"the request cannot travel to the model: {error.message}"
            ) from error
        finally:
            self._streams.pop(request, None)
        if not isinstance(result, Mapping):
            raise RemoteProtocolError("the engine answered with something that is no map")
        return result

    async def stop(self, timeout_s: float) -> None:
        """Ask the engine to unload and end; its word is not needed."""
        if self._peer is not None:
            with contextlib.suppress(TimeoutError, UmadError):
                await asyncio.wait_for(self._peer.call("stop", {}), timeout_s)

    def drop(self) -> None:
        """Close the link to the engine."""
        if self._peer is not None:
            self._peer.close()

    def status(self, model: str) -> dict[str, Any]:
        """A model's state as plain values, its instances too where it has more than one."""
        shown = asdict(self._best(model))
        if self._instances[model] > 1:
            shown["instances"] = [asdict(state) for state in self._states[model]]
        shown["work"] = sum_of(one for (name, _), one in self._work.items() if name == model)
        return shown

    def describe(self) -> dict[str, Any]:
        """The engine itself as plain values."""
        return {"running": self._peer is not None, "restarts": self.restarts}

    def ready(self) -> tuple[int, int]:
        """(models that take requests, all models)."""
        names = self._instances
        return sum(self.takes_requests(name) for name in names), len(names)

    def takes_requests(self, model: str) -> bool:
        """Whether a request would be answered: the model is loaded, or it would be for that."""
        return self._best(model).state in TAKES_REQUESTS

    async def answers(self, timeout_s: float) -> bool:
        """Whether the engine is there and its loop turns: then no job waits past its deadline."""
        if self._peer is None:
            return False
        try:
            await asyncio.wait_for(self._peer.call("ping", {}), timeout_s)
        except (TimeoutError, UmadError):
            return False
        return True

    def at_once(self, model: str) -> int:
        """How many jobs the instances of a model can use at once."""
        return sum(state.takes for state in self._states[model])

    async def reload(self, settings: Settings, text: str) -> None:
        """Know the models of a new configuration, and have the engine use it."""
        old, self._instances = self._instances, _instances(settings)
        unknown = ModelState()
        self._states = {
            name: self._states[name] if old.get(name) == count else [unknown] * count
            for name, count in self._instances.items()
        }
        if self._peer is not None:
            await self._peer.call("reload", {"config": text})

    def _best(self, model: str) -> ModelState:
        return min(self._states[model], key=lambda state: MODEL_STATES.index(state.state))

    def _forget(self, why: str) -> None:
        unknown = ModelState(error=WorkerLost(why).to_wire())
        self._states = {name: [unknown] * count for name, count in self._instances.items()}
        self._work.clear()  # the next engine counts from 0

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "reloaded":
            self.on_reloaded()
            return
        if method == "chunk":
            self._stream(params)
            return
        if method == "work":
            self._count(params)
            return
        try:
            if method != "state":
                raise RemoteProtocolError(f"the engine sent an unknown notification {method}")
            model, instance = params.pop("model"), params.pop("instance")
            state = ModelState(**params)
            if state.state not in MODEL_STATES:
                raise RemoteProtocolError("the engine reported a state that does not exist")
        except (KeyError, TypeError) as error:
            raise RemoteProtocolError("the engine sent a state that cannot be read") from error
        # One that a reload has removed may have something to say still.
        if instance in range(self._instances.get(model, 0)):
            self._states[model][instance] = state
            self.on_change(model, state)

    def _count(self, params: dict[str, Any]) -> None:
        try:
            model, instance = params.pop("model"), params.pop("instance")
            sum_of([params])
        except (KeyError, TypeError, ValueError) as error:
            raise RemoteProtocolError("the engine sent figures that cannot be read") from error
        if instance in range(self._instances.get(model, 0)):
            self._work[model, instance] = params

    def _stream(self, params: dict[str, Any]) -> None:
        request, text, device = params.get("request"), params.get("text"), params.get("device")
        if (
            not isinstance(request, str)
            or not isinstance(text, str)
            or not isinstance(device, str | None)
        ):
            raise RemoteProtocolError("the engine sent a chunk that cannot be read")
        # Of one that was cancelled meanwhile some may be on their way still.
        if (on_chunk := self._streams.get(request)) is not None:
            on_chunk(text, device)


def not_loaded(model: str, error: UmadError) -> UmadError:
    """What a request is told of a load that failed: what is wrong with it is no fault of his."""
    if error.http_status == 503:
        return error
    return ModelFailed(
        f"{model} is not loaded: {error.message}",
        retry_after_s=error.retry_after_s,
        details=error.details,
    )


def _instances(settings: Settings) -> dict[str, int]:
    return {model.name: model.instances for model in settings.models}


def pack_vector(values: Iterable[float]) -> bytes:
    """A vector as it travels: little-endian float32."""
    packed = array("f", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_vector(data: bytes) -> list[float]:
    """The numbers of a vector that travelled."""
    packed = array("f", data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


def _lost(back_in_s: float = 1.0) -> WorkerLost:
    return WorkerLost(
        "the inference process ended and is being started again", retry_after_s=back_in_s
    )
