"""What a line of a log is made of, for every program: words, fields, and which repeats are told.

Pure: the clock is an argument, and nothing is sent or written.  Stays out: where lines go, which
is each program's own ``logs``; and the MESSAGE_IDs, which are theirs too.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from umad.units import format_bytes, format_duration

BURST: Final = 5
WINDOW_S: Final = 1.0
WINDOWS_MAX: Final = 128  # beyond these, who comes is told: names without end are no repeats
_PRIORITY: Final = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
_NAMES: Final = ("worker", "workers", "model", "models")


def words(fields: Mapping[str, Any]) -> str:
    """Fields for a person: ``limit=300.0 MiB  source=statm``."""
    return "  ".join(f"{_word(key)}={shown(key, value)}" for key, value in fields.items())


def entry(
    program: str, event: str, level: str, fields: Mapping[str, Any], message_id: str | None
) -> list[tuple[str, object]]:
    """A journal entry's fields, in order; a name may come more than once, as the journal allows.

    ``UMAD_`` stands before our own, so that ``journalctl UMAD_WORKER=llama`` finds them: every
    worker or model that the event names is in an ``UMAD_WORKER=`` of its own.

    Args:
        program: the SYSLOG_IDENTIFIER, which ``journalctl -t`` selects.
        event: its name.
        level: a name of structlog's levels.
        fields: everything else; nested values become JSON.
        message_id: 32 hex digits; None for a line that has no id.
    """
    text = words(fields)
    pairs: list[tuple[str, object]] = [
        ("MESSAGE", f"{event.replace('_', ' ')}: {text}" if text else event.replace("_", " ")),
        ("PRIORITY", _PRIORITY.get(level, 6)),
        ("SYSLOG_IDENTIFIER", program),
        ("UMAD_EVENT", event),
        *(("UMAD_WORKER", name) for name in named(fields)),
        *(
            (f"UMAD_{key.upper()}", _flat(value))
            for key, value in fields.items()
            if key != "worker"
        ),
    ]
    if message_id is not None:
        pairs.append(("MESSAGE_ID", message_id))
    return pairs


def named(fields: Mapping[str, Any]) -> list[str]:
    """The workers and models that an event is about, each once, as ``umadctl status`` names them.

    umad-serve's ``llama/0`` is the daemon's ``llama``; the second copy is ``llama/1`` to both.
    """
    names: dict[str, None] = {}
    for key in _NAMES:
        value = fields.get(key) or ()
        found = value.split(",") if isinstance(value, str) else value
        names |= dict.fromkeys(name.removesuffix("/0") for name in found)
    return list(names)


@dataclass(frozen=True, slots=True)
class Told:
    """An event as it is to be logged."""

    event: str
    level: str
    fields: Mapping[str, Any]


@dataclass(slots=True)
class _Window:
    ends_s: float
    told: int = 1
    held: Told | None = None
    count: int = 0


class Repeats:
    """The same event about the same worker, many times a second, becomes one line with a count.

    ``BURST`` of them in a window are told as they come.  Those beyond are held back, and the
    window's end tells the last of them, with ``repeated`` as their number; while they go on to
    come, that is the only line of each window.  Journald would else drop lines of its own choice
    (RateLimitBurst=), among them the one that says who was stopped.

    Args:
        always: events that are never held back: decisions, each of which somebody must find.
    """

    def __init__(self, always: frozenset[str]) -> None:
        self._always = always
        self._windows: dict[tuple[str, ...], _Window] = {}

    def offer(self, event: str, level: str, fields: Mapping[str, Any], now_s: float) -> bool:
        """Whether to tell it now.  Call ``due`` before, so that lines keep their order."""
        if event in self._always:
            return True
        key = (event, *named(fields))
        window = self._windows.get(key)
        if window is None:
            if len(self._windows) < WINDOWS_MAX:
                self._windows[key] = _Window(now_s + WINDOW_S)
            return True
        if window.told < BURST:
            window.told += 1
            return True
        window.held = Told(event, level, fields)
        window.count += 1
        return False

    def due(self, now_s: float) -> Iterable[Told]:
        """What the windows that have ended held back; ``inf`` ends them all."""
        for key, window in list(self._windows.items()):
            if now_s < window.ends_s:
                continue
            if window.held is None:
                del self._windows[key]
                continue
            held, count = window.held, window.count
            self._windows[key] = _Window(now_s + WINDOW_S, told=BURST)
            yield Told(held.event, held.level, {**held.fields, "repeated": count})

    @property
    def holding(self) -> bool:
        """Something waits for the end of its window."""
        return any(window.held is not None for window in self._windows.values())


def _word(key: str) -> str:
    for unit in ("_bytes", "_s"):
        key = key.removesuffix(unit)
    return key


def shown(key: str, value: object) -> str:
    """A field's value for a person; its name says the unit: ``held_bytes``, ``after_s``."""
    if isinstance(value, int) and (key == "bytes" or key.endswith("_bytes")):
        return format_bytes(value)
    if isinstance(value, int | float) and key.endswith("_s"):
        return format_duration(value)
    return str(value)


def _flat(value: object) -> object:
    """One field's value; a mapping's parts would be fields of their own, hundreds in a status."""
    return json.dumps(value, default=str) if isinstance(value, dict | list | tuple) else value
