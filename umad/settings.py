"""Every setting: its default, its meaning, its check; frozen dataclasses, one a table.

The checks turn a TOML value into the setting's type, or say why it cannot be one and what to write
instead.  Text carries its unit.  Reading a text is ``config``'s.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from umad.units import UnitError, parse_bytes, parse_duration

RESERVED_NAMES: Final = ("runtime", "zygote")
OWN_UNITS: Final = ("umad.service", "umad-serve.service", "umad-compact.service")
MODEL_KINDS: Final = ("chat", "vision", "image", "speech", "embedding")
_UNIT: Final = re.compile(r"[A-Za-z0-9:_.\\@-]{1,247}\.(service|scope)")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class BadValue(ValueError):
    """A value that a check refuses: (why, remedy)."""

    def __init__(self, why: str, remedy: str) -> None:
        super().__init__(why)
        self.why, self.remedy = why, remedy


def _size(value: object) -> int:
    if not isinstance(value, str):
        raise BadValue("a size is text with a unit", 'write it like "4GiB"')
    try:
        size = parse_bytes(value)
    except UnitError as error:
        raise BadValue(str(error), 'write it like "4GiB" (2^30) or "4GB" (10^9)') from error
    if size <= 0:
        raise BadValue("a size must be above zero", 'write it like "4GiB"')
    return size


def _auto_size(value: object) -> int | None:
    return None if value == "auto" else _size(value)


def _seconds(value: object) -> float:
    if not isinstance(value, str):
        raise BadValue("a duration is text with a unit", 'write it like "200ms"')
    try:
        return parse_duration(value)
    except UnitError as error:
        raise BadValue(str(error), 'write it like "200ms", "5s" or "10min"') from error


def _never_seconds(value: object) -> float | None:
    return None if value == "never" else _seconds(value)


def _fallback(value: object) -> tuple[str, ...]:
    if value not in ([], ["cpu"]):
        raise BadValue("must be a list of devices, and only the CPU can stand in", 'write ["cpu"]')
    return ("cpu",) if value else ()


def _interval(value: object) -> float:
    seconds = _seconds(value)
    if not 0.01 <= seconds <= 5:
        raise BadValue("the interval must lie between 10ms and 5s", 'write "200ms"')
    return seconds


def _grace(value: object) -> float:
    seconds = _seconds(value)
    if not 0 <= seconds <= 10:
        raise BadValue("the grace must lie between 0s and 10s", 'write "50ms"')
    return seconds


def _count(low: int, high: int) -> Callable[[object], int]:
    def check(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise BadValue(
                f"must be a whole number from {low} to {high}", f"write a number from {low} on"
            )
        return value

    return check


def _auto_count(low: int, high: int) -> Callable[[object], int | None]:
    count = _count(low, high)
    return lambda value: None if value == "auto" else count(value)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise BadValue("must be true or false", "write true or false without quotes")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise BadValue("must be text that is not empty", 'put it in "quotes"')
    return value


def _absolute(value: object) -> str:
    text = _text(value)
    if not text.startswith("/"):
        raise BadValue("must be an absolute path", f'begin it with "/", like "/{text}"')
    return text


def _auto_absolute(value: object) -> str | None:
    return None if value == "auto" else _absolute(value)


def _listen(value: object) -> tuple[str, int]:
    text = _text(value)
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise BadValue("must be ADDRESS:PORT", 'write it like "127.0.0.1:8600"')
    return host.strip("[]") or "127.0.0.1", int(port)


def _metrics_listen(value: object) -> str | tuple[str, int] | None:
    if value == "off":
        return None
    text = _text(value)
    if text.startswith("unix:"):
        return _absolute(text.removeprefix("unix:"))
    try:
        return _listen(text)
    except BadValue as error:
        raise BadValue(
            'must be "off", ADDRESS:PORT or unix:/PATH', 'write it like "127.0.0.1:9464"'
        ) from error


def _name(value: object) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise BadValue(
            "a name is 1 to 64 letters, digits, dots, dashes and underscores",
            'write it like "llama-70b"',
        )
    return value


def _unit(value: object) -> str:
    if not isinstance(value, str) or not _UNIT.fullmatch(value):
        raise BadValue(
            "must be the name of a systemd unit that runs a program",
            'write it like "llama-cpp.service"',
        )
    if why := never_adopted(value):
        raise BadValue(why, "name the unit of one program")
    return value


def never_adopted(unit: str) -> str:
    """Why a systemd unit can never be one worker; nothing where it can."""
    if unit in OWN_UNITS:
        return "it is umad's own"
    if unit == "init.scope" or unit.startswith(("session-", "user@", "systemd-", "dbus")):
        return "it holds the system itself, or all that somebody has started"
    return ""


def _one_of(*choices: str) -> Callable[[object], str]:
    def check(value: object) -> str:
        if value not in choices:
            raise BadValue("unknown choice", "use one of " + ", ".join(choices))
        return str(value)

    return check


def _set(default: Any, check: Callable[[object], Any], doc: str, text: str = "") -> Any:
    """A setting: its default, its check, its one-line meaning, and the default as text."""
    return field(default=default, metadata={"check": check, "doc": doc, "text": text})


def _required(check: Callable[[object], Any], doc: str, text: str) -> Any:
    return field(metadata={"check": check, "doc": doc, "text": text, "required": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSettings:
    """The socket and who may use it."""

    socket: str = _set(
        "/run/umad/umad.sock", _absolute, "Where clients connect.", '"/run/umad/umad.sock"'
    )
    group: str = _set("umad", _text, "Members of this group may register workers.", '"umad"')
    admin_group: str = _set(
        "umad", _text, "Members of this group (and root) may evict, drain and reload.", '"umad"'
    )
    connections_max: int = _set(256, _count(1, 4096), "Open connections at most.", "256")
    state: str | None = _set(
        None,
        _auto_absolute,
        "The folder for what outlives a reboot: what forwards took, and who was stopped; "
        '"auto" is what systemd gives (/var/lib/umad), or the folder of the socket.',
        '"auto"',
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """Where memory is read and how much of it may be booked."""

    root: str = _set("/", _absolute, "The folder that holds proc/ and sys/.", '"/"')
    interval: float = _set(0.2, _interval, "Time between two looks at memory.", '"200ms"')
    reserve: int | None = _set(
        None,
        _auto_size,
        'Kept free for the system; "auto" is 4GiB or 4 % of memory, whichever is more.',
        '"auto"',
    )
    budget: int | None = _set(
        None,
        _auto_size,
        'What all workers together may book; "auto" is physical memory less the reserve.',
        '"auto"',
    )
    gpu: str = _set(
        "auto",
        _text,
        'PCI address of the only GPU to use; "auto" for all, "none" for none.',
        '"auto"',
    )
    conservative: bool = _set(
        False,
        _flag,
        "For memory that is not the machine's own (WSL2, a container's view): half of it may be "
        "booked, and a load touches its memory before it begins. Nothing switches this on but you.",
        "false",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnforcementSettings:
    """What happens to a worker over its quota."""

    grace: float = _set(
        0.05,
        _grace,
        "From the sample that shows a breach to SIGKILL, unless the bytes are back before; "
        "50ms so that the signal has left within 100ms on a busy machine too. 0s kills at once.",
        '"50ms"',
    )
    return_deadline: float = _set(
        0.1,
        _grace,
        "Inside a guarded process: the guard takes a fenced worker's bytes back within this, or "
        "the whole process is killed.",
        '"100ms"',
    )
    unkillable_after: float = _set(
        5.0, _seconds, "A killed process still there after this is reported unkillable.", '"5s"'
    )
    leak_policy: str = _set(
        "report",
        _one_of("report", "kill"),
        "A worker that keeps what it said it gave back: its bytes stay booked and it is shown as "
        'leaking; "kill": its process is told, and killed 5s later, if no other worker lives in '
        "it. Many a library's heap keeps what was freed, so nobody is killed for it unasked.",
        '"report"',
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    """Deadlines of leases and waits."""

    load_timeout: float = _set(1800.0, _seconds, "A load must commit within this time.", '"30min"')
    init_timeout: float = _set(
        600.0, _seconds, "One worker may hold the device-init mutex this long.", '"10min"'
    )
    burst_ttl: float = _set(
        120.0,
        _seconds,
        "A burst lease expires after this, unless its caller asked for less.",
        '"2min"',
    )
    wait_max: float = _set(300.0, _seconds, "No caller queues for longer than this.", '"5min"')
    reconnect_grace: float = _set(
        1.0, _seconds, "A live worker that lost its connection keeps its books this long.", '"1s"'
    )
    recovery: float = _set(
        1.5,
        _seconds,
        "After a restart nothing new is granted for this long, so that former workers return.",
        '"1500ms"',
    )
    overtake_max: int = _set(
        16,
        _count(0, 10_000),
        "So many small requests may be served before a large one that waits for room.",
        "16",
    )
    overtake_s: float = _set(
        30.0,
        _seconds,
        "After this nobody passes a request that waits, and forwards wait for it too.",
        '"30s"',
    )
    evict_timeout: float = _set(
        30.0,
        _seconds,
        "A model that is asked to go has this long to do so; one at work, as long as burst_ttl.",
        '"30s"',
    )
    residence_min: float = _set(
        30.0, _seconds, "No model is asked to go that was loaded less than this ago.", '"30s"'
    )
    rival_rest: float = _set(
        30.0,
        _seconds,
        "No model is asked to go for the same other one again within this time.",
        '"30s"',
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSettings:
    """Prometheus; whatever is set here, umad-serve shows the daemon's figures at /metrics."""

    listen: str | tuple[str, int] | None = _set(
        None,
        _metrics_listen,
        'A listener of the daemon\'s own for GET /metrics, "127.0.0.1:9464" or '
        '"unix:/run/umad/metrics.sock"; umad.service may use Unix sockets only.',
        '"off"',
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """The inference front (umad-serve)."""

    listen: tuple[str, int] = _set(
        ("127.0.0.1", 8600), _listen, "Address and port of the HTTP front.", '"127.0.0.1:8600"'
    )
    runtime_quota: int = _set(
        2 << 30,
        _size,
        "Quota of the inference process itself: interpreter, torch, shared imports; and again of "
        'the helper that isolation = "process" forks from.',
        '"2GiB"',
    )
    guard: str = _set(
        "auto",
        _one_of("auto", "required", "off"),
        'Quotas enforced inside the engine; "required" refuses to start where that cannot be, '
        '"off" leaves it to the looks at memory.',
        '"auto"',
    )
    requests_max: int | None = _set(
        None,
        _auto_count(1, 2000),
        "Requests in work at a time; more wait for their turn before their body is read. "
        '"auto": 4 for each core, 100 at most.',
        '"auto"',
    )
    queue_max: int = _set(
        64, _count(1, 10000), "Requests that may wait for one model; more get 429.", "64"
    )
    requests_per_client_max: int = _set(
        64, _count(1, 10000), "Requests of one client at a time; more get 429.", "64"
    )
    wait_max: float = _set(
        30.0, _seconds, "A request waits this long for its model's turn, then 429.", '"30s"'
    )
    body_max: int = _set(32 << 20, _size, "Largest request body; more gets 413.", '"32MiB"')


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """One model that umad-serve loads."""

    name: str = _required(_name, "The name in requests, tables and logs.", '"llama"')
    kind: str = _required(_one_of(*MODEL_KINDS), "One of " + ", ".join(MODEL_KINDS) + ".", '"chat"')
    path: str = _required(
        _absolute, "Checkpoint folder, as save_pretrained writes it.", '"/srv/models/llama"'
    )
    quota: int = _required(_size, "Bytes the loaded model may hold.", '"40GiB"')
    peak: int | None = _set(
        None, _size, "Bytes it may hold while it loads; the quota if not given.", '"46GiB"'
    )
    pool: str = _set("system", _name, "The pool of memory it lives in.", '"system"')
    device: str = _set("cpu", _text, "The torch device it runs on.", '"cpu"')
    dtype: str = _set(
        "auto", _one_of("auto", "float32", "bfloat16", "float16"), "Weights' type.", '"auto"'
    )
    priority: int = _set(0, _count(-1000, 1000), "Higher loads first and waits less.", "0")
    pin: bool = _set(False, _flag, "true: never evicted for another model.", "false")
    instances: int = _set(1, _count(1, 16), "Copies, one worker thread or process each.", "1")
    isolation: str = _set(
        "thread",
        _one_of("thread", "process"),
        '"process": each copy is a process of its own, which umad can kill alone; "thread": all '
        "such models share one process and its fate.",
        '"thread"',
    )
    load: str = _set(
        "start",
        _one_of("start", "request"),
        '"request": loaded by the first request for it, which waits meanwhile; "start": at once. '
        "Either way, one that had to make room for another is loaded again by the next request.",
        '"start"',
    )
    idle_unload: float | None = _set(
        None,
        _never_seconds,
        'Unloaded when its last request has ended this long ago, like "10min".',
        '"never"',
    )
    fallback: tuple[str, ...] = _set(
        (),
        _fallback,
        'Where to load it when its pool has no room: ["cpu"], in the system\'s memory.',
        "[]",
    )

    @property
    def peak_bytes(self) -> int:
        """The load peak: ``peak``, or the quota where none was given."""
        return self.quota if self.peak is None else self.peak


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """One systemd unit that is put under quota whenever it runs: an engine of another kind."""

    name: str = _required(_name, "The name in tables and logs.", '"llama-cpp"')
    unit: str = _required(
        _unit,
        "The unit whose processes together are the worker; a system unit, not umad's own.",
        '"llama-cpp.service"',
    )
    quota: int = _required(_size, "Bytes it may hold, GPU pages included.", '"40GiB"')
    peak: int | None = _set(
        None, _size, "Bytes it may hold until it has settled; the quota if not given.", '"46GiB"'
    )
    settle: float = _set(
        60.0,
        _seconds,
        "It has loaded once it has held half its quota, is within it, and has not grown for this "
        "long; load_timeout bounds it.",
        '"1min"',
    )
    pool: str = _set("system", _name, "The pool of memory it lives in.", '"system"')
    priority: int = _set(0, _count(-1000, 1000), "Higher waits less.", "0")

    @property
    def peak_bytes(self) -> int:
        """The load peak: ``peak``, or the quota where none was given."""
        return self.quota if self.peak is None else self.peak


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The whole configuration."""

    daemon: DaemonSettings = field(default_factory=DaemonSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    enforcement: EnforcementSettings = field(default_factory=EnforcementSettings)
    leases: LeaseSettings = field(default_factory=LeaseSettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    serve: ServeSettings = field(default_factory=ServeSettings)
    models: tuple[ModelSettings, ...] = ()
    workers: tuple[WorkerSettings, ...] = ()

    @property
    def batching_window_s(self) -> float:
        """How long a batch may wait for more requests, in seconds.

        Short in conservative mode: what waits holds promises, and there they are worth less.
        Source: DESIGN, "Requests" (10 to 15 ms) and "The auditor" (5 ms).
        """
        return 0.005 if self.memory.conservative else 0.0125

    @property
    def isolations(self) -> frozenset[str]:
        """The kinds of isolation in use; one process holds the libraries for each of them."""
        return frozenset(model.isolation for model in self.models)


SECTIONS: Final[dict[str, type]] = {
    "daemon": DaemonSettings,
    "memory": MemorySettings,
    "enforcement": EnforcementSettings,
    "leases": LeaseSettings,
    "metrics": MetricsSettings,
    "serve": ServeSettings,
}
