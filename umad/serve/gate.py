"""Who may come in: the front's bounds on requests, bodies and queues, and the form of a refusal.

Owns four counts (requests in work, body bytes held, requests per client, requests per model) and
nothing about memory: that is the daemon's.  Rules: a request is judged, and waits for its turn,
before its body is read; a body weighs
the larger of what it declares and what has arrived; a refusal is an OpenAI error body, with
Retry-After (jittered, so that denied clients do not come back as one) where asking again helps.
Stays out: what a request says.
"""

import asyncio
import contextlib
import math
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Final

from anyio import CapacityLimiter
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from umad.config import ServeSettings
from umad.errors import (
    BodyTimeout,
    BodyTooLarge,
    InvalidParams,
    Overloaded,
    UmadError,
    WaitedTooLong,
)
from umad.serve.spans import CLIENT_GONE, Span, span_of
from umad.units import format_bytes

BODY_TIMEOUT_S: Final = 60.0
LINGER_S: Final = 1.0
# Bodies of full size that may be held at once, so that what the front itself holds stays bounded
# (a body exists up to four times on its way: bytes, text, decoded image, message to the engine).
BODIES_HELD: Final = 4
REQUESTS_PER_CORE: Final = 4
REQUESTS_MAX: Final = 100
# A refusal that is no fault of the request is 429 or 503 to a client, whatever umad's own
# programs say to each other (a lease that expired is a 409 between them).
_SHOWN: Final = frozenset({400, 404, 405, 408, 413, 429, 503})
_TYPES: Final = {429: "rate_limit_error", 503: "service_unavailable_error", 500: "server_error"}


def retry_after_s(base_s: float | None) -> int:
    """Whole seconds (>= 1) to tell a denied client: the base and a random part on top."""
    base = max(1, math.ceil(base_s or 1))
    return base + random.randint(0, max(4, base))


def requests_max(serve: ServeSettings) -> int:
    """Requests that may be in work at a time."""
    cores = len(os.sched_getaffinity(0))  # what systemd leaves to this process
    return serve.requests_max or min(REQUESTS_MAX, REQUESTS_PER_CORE * cores)


def error_body(
    status: int, message: str, code: str, details: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """An OpenAI error; ``param`` is taken from the details."""
    shown = dict(details or {})
    error = {
        "message": message,
        "type": _TYPES.get(status, "invalid_request_error"),
        "param": shown.pop("param", None),
        "code": code,
        "details": shown,
    }
    return {"error": error}


def status_of(error: UmadError) -> int:
    """The HTTP status of a refusal."""
    return error.http_status if error.http_status in _SHOWN else 503


def refusal_body(error: UmadError) -> dict[str, Any]:
    """What a client is told of a refusal."""
    return error_body(status_of(error), error.message, error.code, error.details)


def refusal(error: UmadError, *, close: bool = False) -> JSONResponse:
    """The answer to a request that umad refused.

    Args:
        error: why.
        close: the body was not read to its end, so the connection cannot serve another request.
    """
    status = status_of(error)
    headers = {"Connection": "close"} if close else {}
    if status in (429, 503):
        headers["Retry-After"] = str(retry_after_s(error.retry_after_s))
    return JSONResponse(refusal_body(error), status, headers)


class Gate:
    """The counts; one per front, touched by its one event loop only."""

    def __init__(self, serve: ServeSettings) -> None:
        self._turns = CapacityLimiter(1)
        self.follow(serve)
        self.clients: Counter[str] = Counter()
        self.places: Counter[str] = Counter()
        self.body_bytes = 0

    @property
    def waiting(self) -> int:
        """Requests whose turn has not come."""
        return self._turns.statistics().tasks_waiting

    def follow(self, serve: ServeSettings) -> None:
        """Hold to these bounds from now on."""
        self._serve = serve
        self._turns.total_tokens = requests_max(serve)

    @contextlib.asynccontextmanager
    async def visit(self, client: str, declared: int | None, span: Span) -> AsyncIterator["Visit"]:
        """One request of a client, from its headers to its answer.

        Raises:
            BodyTooLarge: it declares more than ``body_max``.
            Overloaded: the client has its share in work, or the front holds enough bodies.
            WaitedTooLong: its turn did not come within ``wait_max``.
        """
        most = self._serve.requests_per_client_max
        if self.clients[client] >= most:
            raise Overloaded(
                f"this client has {most} requests in work; wait for one to end",
                details={"reason": "client_share", "limit": most},
            )
        visit = Visit(self, self._serve.body_max)
        visit.check(declared or 0)
        self.clients[client] += 1
        try:
            async with self._turn(span):
                visit.weigh(declared or 0)
                yield visit
        finally:
            self.body_bytes -= visit.weight
            self.clients[client] -= 1
            if not self.clients[client]:
                del self.clients[client]  # addresses must not pile up over days

    @contextlib.asynccontextmanager
    async def _turn(self, span: Span) -> AsyncIterator[None]:
        """One of the requests in work."""
        me = object()
        try:
            with span.inside("gate"):
                async with asyncio.timeout(self._serve.wait_max):
                    await self._turns.acquire_on_behalf_of(me)
        except TimeoutError as error:
            most = int(self._turns.total_tokens)
            raise WaitedTooLong(
                f"{most} requests were in work all the time (serve.requests_max)",
                retry_after_s=5,
                details={"reason": "requests_max", "limit": most},
            ) from error
        try:
            yield
        finally:
            self._turns.release_on_behalf_of(me)

    @contextlib.contextmanager
    def places_for(self, model: str, jobs: int, at_once: int) -> Iterator[None]:
        """Places in a model's queue for the jobs of one request, kept until it is answered.

        Args:
            model: its name.
            jobs: how many.
            at_once: jobs that the model works on at once; as many do not wait.

        Raises:
            Overloaded: the queue is full.
        """
        most = self._serve.queue_max + at_once
        if self.places[model] + jobs > most:
            raise Overloaded(
                f"{self.places[model]} of {most} places at {model} are taken; this needs {jobs}",
                details={"reason": "queue_full", "limit": most, "model": model},
            )
        self.places[model] += jobs
        try:
            yield
        finally:
            self.places[model] -= jobs

    def hold(self, more: int) -> None:
        """Count body bytes.

        Raises:
            Overloaded: the bodies of all requests together are too much.
        """
        most = BODIES_HELD * self._serve.body_max
        if self.body_bytes + more > most:
            raise Overloaded(
                f"the requests in work hold {format_bytes(self.body_bytes)} of bodies already",
                details={"reason": "bodies", "asked": more, "free": most - self.body_bytes},
            )
        self.body_bytes += more


class Visit:
    """One request's body: ``weight`` is max(declared, arrived) in bytes, ``refused`` why not."""

    def __init__(self, gate: Gate, limit: int) -> None:
        self._gate = gate
        self._limit = limit
        self._arrived = 0
        self._complete = False
        self.weight = 0
        self.refused: UmadError | None = None

    def check(self, size: int) -> None:
        """Pass a body of this size.

        Raises:
            BodyTooLarge: above the limit of one body.
        """
        if size > self._limit:
            raise BodyTooLarge(
                f"the body is larger than {format_bytes(self._limit)} (serve.body_max)",
                details={"limit": self._limit},
            )

    def weigh(self, size: int) -> None:
        """Say that the body is at least this large.

        Raises:
            BodyTooLarge: above the limit of one body.
            Overloaded: above what is left for all bodies.
        """
        self.check(size)
        if size > self.weight:
            self._gate.hold(size - self.weight)
            self.weight = size

    async def receive(self, receive: Receive, deadline_s: float, span: Span) -> Message:
        """The next message; a body that is refused ends as if the client had left.

        Args:
            receive: the server's.
            deadline_s: when the body must be complete, in the loop's time.
            span: of the request.
        """
        if self._complete:
            return await receive()
        try:
            with span.inside("body"):
                async with asyncio.timeout_at(deadline_s):
                    message = await receive()
            if message["type"] == "http.request":
                self._arrived += len(message.get("body", b""))
                self.weigh(self._arrived)
                self._complete = not message.get("more_body", False)
        except TimeoutError:
            self.refused = BodyTimeout("the body did not arrive in time")
        except UmadError as error:
            self.refused = error
        else:
            return message
        return {"type": "http.disconnect"}


class GateMiddleware:
    """Guards every request that may carry a body: the ASGI side of ``Gate.visit``."""

    def __init__(self, app: ASGIApp, gate: Gate, body_timeout_s: float = BODY_TIMEOUT_S) -> None:
        self._app = app
        self._gate = gate
        self._body_timeout_s = body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Called by the server for each request."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        try:
            # A unix socket has no address: whoever reaches it is one client.
            client = scope["client"][0] if scope.get("client") else "local"
            async with self._gate.visit(client, _declared(scope), span_of(scope)) as visit:
                await self._guarded(visit, scope, receive, send)
        except UmadError as error:
            span_of(scope).fail(error)
            linger_s = min(LINGER_S, self._body_timeout_s)
            await _answer_and_linger(refusal(error, close=True), linger_s, scope, receive, send)

    async def _guarded(self, visit: Visit, scope: Scope, receive: Receive, send: Send) -> None:
        deadline_s = asyncio.get_running_loop().time() + self._body_timeout_s
        span = span_of(scope)

        async def send_unless_refused(message: Message) -> None:
            # What the application answers to a client that seems to have left is not the reason.
            if visit.refused is None:
                await send(message)

        try:
            await self._app(
                scope, lambda: visit.receive(receive, deadline_s, span), send_unless_refused
            )
        except ClientDisconnect:  # it left and needs no answer, or it is refused and gets that
            span.code = CLIENT_GONE
        if visit.refused is not None:
            raise visit.refused


async def _answer_and_linger(
    answer: JSONResponse, linger_s: float, scope: Scope, receive: Receive, send: Send
) -> None:
    """Answer at once, then drop what the client still sends, for a moment.

    To close over unread bytes resets the connection, and the client loses the answer with it.
    """

    async def send_but_stay(message: Message) -> None:
        if message["type"] == "http.response.body":
            message["more_body"] = True
        await send(message)

    await answer(scope, receive, send_but_stay)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(linger_s):
            while (await receive()).get("more_body", False):
                pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _declared(scope: Scope) -> int | None:
    text = Headers(scope=scope).get("content-length")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()):
        raise InvalidParams("Content-Length is no number")
    return int(text)
