"""One request's way through the layers: where it waited and how long, and what became of it.

Owns ``Span`` and its place in a request's scope.  Rules: a layer's seconds are those the request
spent there and nowhere else, but for ``send``, which for a stream runs beside ``engine``; nothing
a client wrote is in it, but a model's name that is configured.

| layer | the request waits for |
|---|---|
| gate | its turn to be read (``serve.requests_max``) |
| body | its client to send it |
| queue | its model: to be free, or to be loaded |
| engine | its answer to be computed |
| send | its client to take the answer |
"""

import contextlib
import time
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final

from umad.errors import UmadError

LAYERS: Final = ("gate", "body", "queue", "engine", "send")
CLIENT_GONE: Final = "client_gone"
_SPAN: Final = "umad.span"


@dataclass(slots=True)
class Span:
    """Where one request has been.

    ``ident`` names it in the log and in the answer's ``x-request-id``; ``model`` is a configured
    one; ``code`` is "ok" or why it failed, ``reason`` that more closely; ``first_s`` is when the
    first part of a stream was there; ``device`` is where it was made, if not on the model's own.
    """

    ident: str = "-"
    model: str = ""
    code: str = "ok"
    reason: str = ""
    first_s: float | None = None
    device: str | None = None
    began_s: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def age_s(self) -> float:
        """Seconds since its headers were there."""
        return time.monotonic() - self.began_s

    def add(self, layer: str, seconds: float) -> None:
        """Count time in one of ``LAYERS``."""
        self.seconds[layer] = self.seconds.get(layer, 0.0) + seconds

    @contextlib.contextmanager
    def inside(self, layer: str) -> Iterator[None]:
        """Count the time within as one layer's."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self.add(layer, time.monotonic() - began_s)

    def fail(self, error: UmadError) -> None:
        """Note why it is refused."""
        self.code = error.code
        self.reason = str(error.details.get("reason", ""))


def span_of(scope: MutableMapping[str, Any]) -> Span:
    """The span of the request that this scope is of."""
    span: Span = scope.setdefault(_SPAN, Span())
    return span


def begin(scope: MutableMapping[str, Any], ident: str) -> Span:
    """Begin the span of a request."""
    span = scope[_SPAN] = Span(ident)
    return span
