"""What core wants done.  Frozen values; daemon/deeds.py carries them out, tests compare them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from umad.core.cost import Sample
from umad.errors import UmadError
from umad.values import Identity


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer an open request; ``page`` names the process whose account page goes with it."""

    connection: int
    request: int
    result: Mapping[str, Any]
    page: Identity | None = None


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer an open request with an error."""

    connection: int
    request: int
    error: UmadError


@dataclass(frozen=True, slots=True)
class Notify:
    """Send a notification."""

    connection: int
    method: str
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Watch:
    """Tell ``Engine.exited`` when this process ends."""

    identity: Identity


@dataclass(frozen=True, slots=True)
class Unwatch:
    """Nothing of this process is of interest any more."""

    identity: Identity


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL this process, and no other, then tell ``Engine.kill_sent``."""

    identity: Identity
    reason: str


@dataclass(frozen=True, slots=True)
class OpenAccount:
    """Give an account of the process's page to a worker.

    ``again``: the worker has it since before a restart of the daemon, and goes on using it.
    """

    identity: Identity
    account: int
    limit: int
    again: bool


@dataclass(frozen=True, slots=True)
class SetLimit:
    """Let the guard hand out this many bytes to an account, all in all."""

    identity: Identity
    account: int
    limit: int


@dataclass(frozen=True, slots=True)
class CloseAccount:
    """Have the guard refuse everything to an account and take its tensor pages away."""

    identity: Identity
    account: int


@dataclass(frozen=True, slots=True)
class Compact:
    """Ask for the machine's memory to be compacted, by whoever may."""


@dataclass(frozen=True, slots=True)
class Look:
    """Take a snapshot now instead of at the next tick."""


@dataclass(frozen=True, slots=True)
class Reload:
    """Read the configuration again, give it to ``Engine.reconfigure``, and answer this request."""

    connection: int
    request: int


@dataclass(frozen=True, slots=True)
class Remember:
    """Keep what a forward of this model took beyond a restart."""

    model: str
    sample: Sample


@dataclass(frozen=True, slots=True)
class Reshape:
    """What is kept of this model is of this shape, or is to be forgotten."""

    model: str
    shape: str


@dataclass(frozen=True, slots=True)
class RememberStop:
    """Keep that somebody was stopped."""

    stop: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Event:
    """Something happened that people and programs want to know; logged and sent to listeners.

    ``level`` is a logging level's name in lower case; ``fields`` are plain values.
    """

    name: str
    level: str = "info"
    fields: Mapping[str, Any] = field(default_factory=dict)


Action = (
    Reply
    | Refuse
    | Notify
    | Watch
    | Unwatch
    | Kill
    | OpenAccount
    | SetLimit
    | CloseAccount
    | Compact
    | Look
    | Reload
    | Remember
    | Reshape
    | RememberStop
    | Event
)
