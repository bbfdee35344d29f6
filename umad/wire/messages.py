"""The messages of the protocol, and the table of its methods.

Owns the three message forms with their shape checks, and every request and notification of
PROTOCOL.md with its parameters (a test holds them equal): ``METHODS`` are what clients send,
``NOTICES`` what the daemon does.  Rules: a message
of the wrong shape breaks the protocol (``RemoteProtocolError``); a well-formed one with wrong
parameters is refused (``InvalidParams``) and nothing else happens.
Stays out: what this machine or the books allow; that is the daemon's.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from umad.errors import InvalidParams, RemoteProtocolError, UnknownMethod

ID_MAX: Final = 2**32 - 1
INT_MAX: Final = 2**63 - 1
PROTOCOL_VERSION: Final = 1
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_WORKER: Final = re.compile(_NAME.pattern + r"(/(0|[1-9][0-9]{0,3}))?")
_UNIT: Final = re.compile(r"[A-Za-z0-9:_.\\@-]{1,247}\.(service|scope)")
_TEXT_MAX: Final = 200
SETTLE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Request:
    """Asks the other side for something; answered exactly once."""

    id: int
    method: str
    params: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Response:
    """Answers the request of that id; ``error`` is an error map or None."""

    id: int
    error: dict[str, Any] | None
    result: Any


@dataclass(frozen=True, slots=True)
class Notification:
    """Tells the other side something; never answered."""

    method: str
    params: dict[str, Any]


Message = Request | Response | Notification


def to_frame(message: Message) -> list[Any]:
    """The array that goes over the wire."""
    if isinstance(message, Request):
        return [0, message.id, message.method, [message.params]]
    if isinstance(message, Response):
        return [1, message.id, message.error, message.result]
    return [2, message.method, [message.params]]


def from_frame(frame: object) -> Message:
    """The message in a decoded array.

    Raises:
        RemoteProtocolError: the value has none of the three forms.
    """
    if type(frame) is not list or not frame:
        raise RemoteProtocolError("a message must be an array that is not empty")
    kind = frame[0]
    # The type first: True == 1 and 0.0 == 0, and neither is a message type.
    if type(kind) is int:
        if kind == 0 and len(frame) == 4:
            return Request(_id(frame[1]), _method(frame[2]), _params(frame[3]))
        if kind == 2 and len(frame) == 3:
            return Notification(_method(frame[1]), _params(frame[2]))
        if kind == 1 and len(frame) == 4:
            error, result = frame[2], frame[3]
            if error is not None and (type(error) is not dict or result is not None):
                raise RemoteProtocolError(
                    "a response must hold nil or an error map, and no result beside an error"
                )
            return Response(_id(frame[1]), error, result)
    raise RemoteProtocolError(
        f"no message begins with {_show(kind)} and has {len(frame)} elements; a request is "
        "[0, id, method, [params]], a response [1, id, error, result], a notification "
        "[2, method, [params]]"
    )


def _id(value: object) -> int:
    if type(value) is int and 0 <= value <= ID_MAX:
        return value
    raise RemoteProtocolError(f"a message id must be an integer from 0 to {ID_MAX}")


def _method(value: object) -> str:
    if type(value) is str and 0 < len(value) <= 64:
        return value
    raise RemoteProtocolError("a method must be text of 1 to 64 characters")


def _params(value: object) -> dict[str, Any]:
    if type(value) is list and len(value) == 1 and type(value[0]) is dict:
        return value[0]
    raise RemoteProtocolError("params must be an array that holds exactly one map")


def _integer(low: int, high: int) -> Callable[[object], bool]:
    # type(...) is int also keeps out bool, which is an int to isinstance.
    return lambda value: type(value) is int and low <= value <= high


def _number(high: float) -> Callable[[object], bool]:
    # NaN fails every comparison, infinity the upper one.
    return lambda value: (type(value) is float or type(value) is int) and 0 <= value <= high


def _is_name(value: object) -> bool:
    return type(value) is str and _NAME.fullmatch(value) is not None


def _is_worker(value: object) -> bool:
    return type(value) is str and _WORKER.fullmatch(value) is not None


def _text(low: int) -> Callable[[object], bool]:
    return lambda value: type(value) is str and low <= len(value) <= _TEXT_MAX


def _list_of(check: Callable[[object], bool], most: int) -> Callable[[object], bool]:
    return lambda value: type(value) is list and 0 < len(value) <= most and all(map(check, value))


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of parameter: the check, and what it accepts in words."""

    check: Callable[[object], bool]
    accepts: str


SIZE: Final = Kind(_integer(1, INT_MAX), "an integer of bytes above 0")
BYTES: Final = Kind(_integer(0, INT_MAX), "an integer of bytes, 0 or more")
COUNT: Final = Kind(_integer(0, INT_MAX), "an integer, 0 or more")
PRIORITY: Final = Kind(_integer(-1000, 1000), "an integer from -1000 to 1000")
INSTANCE: Final = Kind(_integer(0, 1023), "an integer from 0 to 1023")
SECONDS: Final = Kind(_number(1e9), "a finite number of seconds, 0 or more")
UNIX_SECONDS: Final = Kind(_number(1e12), "seconds since 1970")
RATIO: Final = Kind(_number(1), "a number from 0 to 1")
FLAG: Final = Kind(lambda value: type(value) is bool, "true or false")
NAME: Final = Kind(_is_name, "a name: 1 to 64 letters, digits, dots, dashes and underscores")
WORKER: Final = Kind(_is_worker, 'the name of a worker, like "llama", or "llama/1"')
UNIT: Final = Kind(
    lambda value: type(value) is str and _UNIT.fullmatch(value) is not None,
    'a systemd unit of a running program, like "llama.service"',
)
TEXT: Final = Kind(_text(0), f"text of at most {_TEXT_MAX} characters")
LABEL: Final = Kind(_text(1), f"text of 1 to {_TEXT_MAX} characters")
SIZES: Final = Kind(_list_of(SIZE.check, 64), "an array of 1 to 64 integers of bytes above 0")
VERSIONS: Final = Kind(_list_of(COUNT.check, 64), "an array of 1 to 64 integers")
QUEUE: Final = Kind(
    lambda value: type(value) is str and value in {"reserve", "init_lock", "admit"},
    '"reserve", "init_lock" or "admit"',
)


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of a method.

    ``default`` is filled in where an optional one was left out; None fills in nothing.
    """

    kind: Kind
    required: bool = True
    default: Any = None


class Form(StrEnum):
    """What a method is and who sends it: one of the three tables of PROTOCOL.md."""

    REQUEST = "request"
    FROM_CLIENT = "notification of a client"
    FROM_DAEMON = "notification of the daemon"


@dataclass(frozen=True, slots=True)
class Method:
    """One row of the protocol, with the lookups that ``check_params`` needs made ready."""

    form: Form
    params: Mapping[str, Param]
    open: bool = False  # further fields may follow
    checks: Mapping[str, Callable[[object], bool]] = field(init=False)
    required: frozenset[str] = field(init=False)
    defaults: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        """Compile the table once; the daemon checks 80,000 messages a second."""
        put = object.__setattr__
        rows = self.params.items()
        put(self, "checks", {name: param.kind.check for name, param in rows})
        put(self, "required", frozenset(name for name, param in rows if param.required))
        put(
            self,
            "defaults",
            {name: param.default for name, param in rows if param.default is not None},
        )


def _optional(kind: Kind, default: Any = None) -> Param:
    return Param(kind, False, default)


def _request(**params: Param) -> Method:
    return Method(Form.REQUEST, params)


_ID: Final = Param(COUNT)
_WAIT: Final = _optional(SECONDS, 0)
_END_LEASE: Final = _request(lease=_ID, token=_ID, leaked=_optional(FLAG, False))

METHODS: Final[Mapping[str, Method]] = {
    "hello": _request(versions=Param(VERSIONS), client=Param(TEXT)),
    "ping": _request(),
    "register": _request(
        model=Param(NAME),
        instance=_optional(INSTANCE, 0),
        quota=Param(SIZE),
        peak=_optional(SIZE),
        pool=_optional(NAME, "system"),
        priority=_optional(PRIORITY, 0),
        pin=_optional(FLAG, False),
        thread=_optional(COUNT, 0),
        held=_optional(BYTES),
        loading=_optional(SIZE),
        baseline=_optional(BYTES),
        bursts=_optional(SIZES),
        guard=_optional(FLAG, False),
        account=_optional(COUNT),
        guard_off=_optional(TEXT),
        recycle=_optional(FLAG, False),
        evict=_optional(FLAG, False),
        process=_optional(COUNT),
        settle_s=_optional(SECONDS, SETTLE_S),
    ),
    "unregister": _request(worker=_ID),
    "reserve": _request(
        worker=_ID,
        bytes=_optional(SIZE),
        parts=_optional(SIZES),
        wait_s=_WAIT,
        evict=_optional(FLAG, True),
    ),
    "commit": _request(lease=_ID, token=_ID, measured=Param(BYTES)),
    "void": _END_LEASE,
    "release": _END_LEASE,
    "init_lock": _request(worker=_ID, wait_s=_WAIT),
    "init_unlock": _request(worker=_ID, token=_ID),
    "admit": _request(worker=_ID, bytes=Param(SIZE), wait_s=_WAIT, ttl_s=_optional(SECONDS)),
    "extend": _request(lease=_ID, token=_ID),
    "status": _request(),
    "metrics": _request(),
    "snapshot": _request(part=_optional(COUNT, 0)),
    "set_quota": _request(
        worker=_optional(COUNT),
        name=_optional(WORKER),
        quota=Param(SIZE),
        peak=_optional(SIZE),
    ),
    "evict": _request(name=Param(WORKER)),
    "load": _request(name=Param(WORKER)),
    "pin": _request(name=Param(WORKER), pin=Param(FLAG)),
    "adopt": _request(
        model=Param(NAME),
        unit=Param(UNIT),
        quota=Param(SIZE),
        peak=_optional(SIZE),
        pool=_optional(NAME, "system"),
        priority=_optional(PRIORITY, 0),
        settle_s=_optional(SECONDS, SETTLE_S),
    ),
    "disown": _request(name=Param(NAME)),
    "drain": _request(),
    "resume": _request(),
    "reload": _request(),
    "cost": _request(model=Param(NAME), shape=_optional(LABEL)),
    "events": _request(since=_optional(COUNT, 0), before=_optional(COUNT)),
    "timeline": _request(since=_optional(UNIX_SECONDS, 0)),
    "forward_done": Method(
        Form.FROM_CLIENT,
        {
            "worker": _ID,
            "lease": _optional(COUNT),
            "token": _optional(COUNT),
            "predicted": Param(BYTES),
            "peak": Param(BYTES),
            "tokens": Param(COUNT),
            "batch": Param(COUNT),
            "seconds": Param(SECONDS),
            "exact": _optional(FLAG, False),
        },
    ),
    "progress": Method(
        Form.FROM_CLIENT, {"worker": _ID, "stage": Param(LABEL), "ratio": Param(RATIO)}
    ),
    "segments": Method(
        Form.FROM_CLIENT,
        {
            "reserved": Param(BYTES),
            "allocated": Param(BYTES),
            "internal_free": Param(BYTES),
            "external_free": Param(BYTES),
            "blocks_free": Param(BYTES),
            "largest_free": Param(BYTES),
        },
    ),
    "keep": Method(Form.FROM_CLIENT, {"worker": _ID}),
}

NOTICES: Final[Mapping[str, Method]] = {
    "shrink": Method(Form.FROM_DAEMON, {"reason": Param(TEXT)}),
    "evict": Method(
        Form.FROM_DAEMON,
        {
            "worker": _ID,
            "reason": Param(TEXT),
            "for_worker": Param(TEXT),
            "deadline_s": Param(SECONDS),
        },
    ),
    "evict_cancelled": Method(Form.FROM_DAEMON, {"worker": _ID}),
    "load": Method(Form.FROM_DAEMON, {"worker": _ID}),
    "reloaded": Method(Form.FROM_DAEMON, {}),
    "recycle": Method(
        Form.FROM_DAEMON, {"worker": _ID, "process": Param(FLAG), "reason": Param(TEXT)}
    ),
    "revoke": Method(
        Form.FROM_DAEMON,
        {
            "worker": _ID,
            "reason": Param(TEXT),
            "quota": Param(BYTES),
            "measured": Param(BYTES),
            "source": Param(TEXT),
            "grace_s": Param(SECONDS),
        },
    ),
    "queued": Method(
        Form.FROM_DAEMON,
        {"worker": _ID, "what": Param(QUEUE), "position": Param(COUNT), "reason": Param(TEXT)},
    ),
    "event": Method(
        Form.FROM_DAEMON,
        {
            "seq": _ID,
            "name": Param(LABEL),
            "unix_s": Param(UNIX_SECONDS),
            "level": _optional(LABEL),
        },
        open=True,
    ),
}


def check_params(
    method: str, params: Mapping[str, Any], rows: Mapping[str, Method] = METHODS
) -> dict[str, Any]:
    """Check the parameters of a request or notification against its row.

    Args:
        method: its name.
        params: what was sent.
        rows: ``METHODS``, what clients send; or ``NOTICES``, what the daemon does.

    Returns:
        A new dict: the parameters, and the defaults of those left out that have one.

    Raises:
        UnknownMethod: there is no such method.
        InvalidParams: a parameter is missing, unknown, or not of its kind; the message names
            it, what was sent and what is accepted.
    """
    row = rows.get(method)
    if row is None:
        known = ", ".join(rows)
        raise UnknownMethod(f"there is no method {_show(method)}; the methods are {known}")
    checks = row.checks
    for name, value in params.items():
        check = checks.get(name)
        if check is None:
            if not row.open:
                raise _unknown_param(method, name, row)
        elif not check(value):
            raise _wrong_param(method, name, value, row)
    if not row.required <= params.keys():
        name = min(row.required - params.keys())
        raise InvalidParams(
            f"{method}: {name} is missing; it is {row.params[name].kind.accepts}",
            details={"method": method, "param": name},
        )
    return {**row.defaults, **params}


def check_param(method: str, name: str, value: object) -> object:
    """Check one parameter of a known method and return it.

    Raises:
        InvalidParams: it is not of its kind.
    """
    row = METHODS[method]
    if not row.checks[name](value):
        raise _wrong_param(method, name, value, row)
    return value


def _wrong_param(method: str, name: str, value: object, row: Method) -> InvalidParams:
    accepts = row.params[name].kind.accepts
    return InvalidParams(
        f"{method}: {name} was {_show(value)}; it must be {accepts}",
        details={"method": method, "param": name, "accepts": accepts},
    )


def _unknown_param(method: str, name: str, row: Method) -> InvalidParams:
    known = ", ".join(row.params) or "none"
    return InvalidParams(
        f"{method}: unknown parameter {_show(name)}; it takes: {known}",
        details={"method": method, "param": name[:64]},
    )


def _show(value: object) -> str:
    """Type and a short view of what was sent; containers by type alone."""
    if isinstance(value, list | dict):
        return f"{type(value).__name__} of {len(value)}"
    text = repr(value[:40] if isinstance(value, str | bytes) else value)
    return f"{type(value).__name__} {text[:60]}"
