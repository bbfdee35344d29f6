"""An engine that remembers what it was told lately and what it did about it.

The tape is two stretches of inputs, each with the engine's record at its start.  When the newer
one is full the older one goes: so there is always a minute or so, and never more than a few MiB.
Values are kept as they are, since they are frozen; they become plain data when somebody asks.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, TypeVar, get_type_hints

from umad.core.access import METHODS, Permission
from umad.core.actions import Action, Notify
from umad.core.engine import Engine
from umad.core.plain import plain, typed
from umad.core.record import check_snapshot, dump, size_of
from umad.values import Outsider, ProcessReading, Snapshot

STRETCH_BYTES: Final = 3 << 18
"""What one stretch of inputs may take, by estimate: half a minute at ease with five workers."""
RECORDED_MAX: Final = 500
"""Of an engine with more than so many things to list no record is made: it would take too long."""

# Source: our measurement (sys.getsizeof, all parts), 2026-11.
_INPUT_BYTES: Final = 800
_LOOK_BYTES: Final = 2500
_READING_BYTES: Final = 400

INPUTS: Final = frozenset(
    {
        "connected",
        "disconnected",
        "request",
        "notification",
        "found",
        "running",
        "observe",
        "exited",
        "searched",
        "kill_sent",
        "reconfigure",
        "advance",
    }
)
"""Whatever changes an engine; a test holds the list complete."""

P = ParamSpec("P")
R = TypeVar("R")


class Input(NamedTuple):
    """One call of an engine's method, and what came of it."""

    method: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    actions: Sequence[Action]


@dataclass(slots=True)
class _Stretch:
    start: dict[str, Any] | None  # None: too much to record
    inputs: list[Input] = field(default_factory=list)
    bytes: int = 0


class Tape:
    """See the module."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._older: _Stretch | None = None
        self._newer = self._begin()

    def add(self, one: Input) -> None:
        """An input has been dealt with."""
        self._newer.inputs.append(one)
        self._newer.bytes += _INPUT_BYTES
        if one.method == "observe":
            look: Snapshot = one.args[0]
            self._newer.bytes += _LOOK_BYTES + _READING_BYTES * len(look.processes)
        if self._newer.bytes > STRETCH_BYTES:
            self._older, self._newer = self._newer, self._begin()

    def records(self) -> Iterator[dict[str, Any]]:
        """The tape as it is now, as plain data: the start, the inputs, the end.

        Each is made when it is asked for; what happens meanwhile is not in it.  Nothing comes
        where there is too much to record.
        """
        stretches = [self._newer] if self._older is None else [self._older, self._newer]
        while stretches and stretches[0].start is None:
            del stretches[0]
        if not stretches or size_of(self._engine) > RECORDED_MAX:
            return iter(())
        inputs = [one for stretch in stretches for one in stretch.inputs]
        return self._records({"start": stretches[0].start}, inputs, {"end": dump(self._engine)})

    @staticmethod
    def _records(
        start: dict[str, Any], inputs: list[Input], end: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        yield start
        for one in inputs:
            bound = _signature(one.method).bind(None, *one.args, **one.kwargs).arguments
            given = {name: plain(value) for name, value in bound.items() if name != "self"}
            yield {"input": one.method, "given": given, "did": done(one.actions)}
        yield end

    def _begin(self) -> _Stretch:
        small = size_of(self._engine) <= RECORDED_MAX
        return _Stretch(dump(self._engine) if small else None)


@cache
def _signature(method: str) -> inspect.Signature:
    return inspect.signature(getattr(Engine, method))


def done(actions: Sequence[Action]) -> list[dict[str, Any]]:
    """Actions as plain data; the copies of events that listeners get are left out."""
    return [
        {"do": type(action).__name__, **plain(action)}
        for action in actions
        if not (isinstance(action, Notify) and action.method == "event")
    ]


def feed(engine: Engine, method: str, given: Mapping[str, Any]) -> Sequence[Action]:
    """Tell an engine what a tape says another was told.

    Args:
        engine: to be told.
        method: the name of the input.
        given: its arguments, as plain data.

    Raises:
        ValueError: there is no such input, or an argument is none of its own.
    """
    if method not in INPUTS:
        raise ValueError(f"there is no input {method[:40]!r}")
    hints = get_type_hints(getattr(Engine, method))
    if unknown := given.keys() - hints.keys():
        raise ValueError(f"{method} takes no {min(unknown)[:40]!r}")
    arguments = {name: typed(hints[name], one) for name, one in given.items()}
    if isinstance(look := arguments.get("snapshot"), Snapshot):
        check_snapshot(look)
    came = getattr(engine, method)(**arguments)
    return came if isinstance(came, list) else ()


def _taped(
    method: Callable[Concatenate[Engine, P], R],
) -> Callable[Concatenate["RecordedEngine", P], R]:
    name = method.__name__

    def taped(self: "RecordedEngine", /, *args: P.args, **kwargs: P.kwargs) -> R:
        came = method(self, *args, **kwargs)
        self.tape.add(Input(name, args, kwargs, came if isinstance(came, list) else ()))
        return came

    return taped


class RecordedEngine(Engine):
    """An engine with a tape of all its ``INPUTS``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tape = Tape(self)

    connected = _taped(Engine.connected)
    disconnected = _taped(Engine.disconnected)
    notification = _taped(Engine.notification)
    found = _taped(Engine.found)
    running = _taped(Engine.running)
    observe = _taped(Engine.observe)
    exited = _taped(Engine.exited)
    searched = _taped(Engine.searched)
    kill_sent = _taped(Engine.kill_sent)
    reconfigure = _taped(Engine.reconfigure)
    advance = _taped(Engine.advance)
    _request = _taped(Engine.request)

    def request(
        self,
        connection: int,
        request: int,
        method: str,
        params: Mapping[str, Any],
        now_s: float,
        process: ProcessReading | None = None,
        outsider: Outsider | None = None,
    ) -> list[Action]:
        """See ``Engine``; what anybody may ask changes nothing that is decided on: not recorded."""
        reads = METHODS.get(method, Permission.READ) is Permission.READ
        handle = super().request if reads else self._request
        return handle(connection, request, method, params, now_s, process, outsider)
