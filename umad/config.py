"""Configuration: TOML text -> checked, frozen Settings.

Owns every setting with its default, its meaning and its check; etc/umad.toml and umad.toml(5)
are held equal to this table by a test.  Reads no file: the caller brings the text, and a
predicate that says whether a path exists.  All problems of a text are found in one go, each
with line, key, value, reason and remedy.
"""

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from umad.errors import ConfigError
from umad.units import UnitError, format_bytes, parse_bytes, parse_duration

MODEL_KINDS: Final = ("chat", "vision", "image", "speech", "embedding")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class _Bad(ValueError):
    """A value that a check refuses: (why, remedy)."""

    def __init__(self, why: str, remedy: str) -> None:
        super().__init__(why)
        self.why, self.remedy = why, remedy


def _size(value: object) -> int:
    if not isinstance(value, str):
        raise _Bad("a size is text with a unit", 'write it like "4GiB"')
    try:
        size = parse_bytes(value)
    except UnitError as error:
        raise _Bad(str(error), 'write it like "4GiB" (2^30) or "4GB" (10^9)') from error
    if size <= 0:
        raise _Bad("a size must be above zero", 'write it like "4GiB"')
    return size


def _auto_size(value: object) -> int | None:
    return None if value == "auto" else _size(value)


def _seconds(value: object) -> float:
    if not isinstance(value, str):
        raise _Bad("a duration is text with a unit", 'write it like "200ms"')
    try:
        return parse_duration(value)
    except UnitError as error:
        raise _Bad(str(error), 'write it like "200ms", "5s" or "10min"') from error


def _interval(value: object) -> float:
    seconds = _seconds(value)
    if not 0.01 <= seconds <= 5:
        raise _Bad("the interval must lie between 10ms and 5s", 'write "200ms"')
    return seconds


def _grace(value: object) -> float:
    seconds = _seconds(value)
    if not 0 <= seconds <= 10:
        raise _Bad("the grace must lie between 0s and 10s", 'write "50ms"')
    return seconds


def _count(low: int, high: int) -> Callable[[object], int]:
    def check(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise _Bad(
                f"must be a whole number from {low} to {high}", f"write a number from {low} on"
            )
        return value

    return check


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise _Bad("must be true or false", "write true or false without quotes")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _Bad("must be text that is not empty", 'put it in "quotes"')
    return value


def _absolute(value: object) -> str:
    text = _text(value)
    if not text.startswith("/"):
        raise _Bad("must be an absolute path", f'begin it with "/", like "/{text}"')
    return text


def _listen(value: object) -> tuple[str, int]:
    text = _text(value)
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise _Bad("must be ADDRESS:PORT", 'write it like "127.0.0.1:8600"')
    return host.strip("[]") or "127.0.0.1", int(port)


def _name(value: object) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise _Bad(
            "a name is 1 to 64 letters, digits, dots, dashes and underscores",
            'write it like "llama-70b"',
        )
    return value


def _one_of(*choices: str) -> Callable[[object], str]:
    def check(value: object) -> str:
        if value not in choices:
            raise _Bad("unknown choice", "use one of " + ", ".join(choices))
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
        "auto", _text, 'PCI address of the GPU to watch, "auto" for the first one.', '"auto"'
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
    unkillable_after: float = _set(
        5.0, _seconds, "A killed process still there after this is reported unkillable.", '"5s"'
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """The inference front (umad-serve)."""

    listen: tuple[str, int] = _set(
        ("127.0.0.1", 8600), _listen, "Address and port of the HTTP front.", '"127.0.0.1:8600"'
    )
    runtime_quota: int = _set(
        2 << 30,
        _size,
        "Quota of the inference process itself: interpreter, torch, shared imports.",
        '"2GiB"',
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
    instances: int = _set(1, _count(1, 16), "Copies, one worker thread each.", "1")

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
    serve: ServeSettings = field(default_factory=ServeSettings)
    models: tuple[ModelSettings, ...] = ()


SECTIONS: Final[dict[str, type]] = {
    "daemon": DaemonSettings,
    "memory": MemorySettings,
    "enforcement": EnforcementSettings,
    "leases": LeaseSettings,
    "serve": ServeSettings,
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a configuration text."""

    line: int
    key: str
    value: str
    why: str
    remedy: str

    def __str__(self) -> str:
        shown = f" = {self.value}" if self.value else ""
        return f"line {self.line}: {self.key}{shown}: {self.why}; {self.remedy}"


def parse(
    text: str,
    *,
    source: str = "umad.toml",
    path_exists: Callable[[str], bool] | None = None,
    physical_bytes: int | None = None,
) -> Settings:
    """Check a configuration text and return its settings.

    Args:
        text: the TOML text.
        source: the file's name, for messages.
        path_exists: says whether a model's path is there; None skips that check.
        physical_bytes: the machine's memory, against which quotas must fit; None skips that.

    Raises:
        ConfigError: with every problem in the message and in ``details["problems"]``.
    """
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"line (\d+)", str(error))
        raise _config_error(
            source,
            [
                Problem(
                    int(line[1]) if line else text.count("\n") + 1,
                    "TOML",
                    "",
                    str(error),
                    "mend the syntax (text goes in quotes, a table begins with [name])",
                )
            ],
        ) from error
    problems: list[Problem] = []
    lines = _Lines(text)
    built: dict[str, Any] = {}
    models: list[tuple[int, ModelSettings]] = []
    for key, value in raw.items():
        if key == "model":
            models.extend(_models(value, lines, problems))
        elif key not in SECTIONS:
            known = ", ".join([*SECTIONS, "model"])
            problems.append(Problem(lines.of(key), key, "", "unknown table", f"use one of {known}"))
        elif not isinstance(value, dict):
            problems.append(
                Problem(lines.of(key), key, _show(value), "must be a table", f"write [{key}]")
            )
        else:
            section = _section(SECTIONS[key], value, key, 0, lines, problems)
            if section is not None:
                built[key] = section
    settings = Settings(**built, models=tuple(model for _, model in models))
    problems.extend(_names_and_paths(models, lines, path_exists))
    problems.extend(_sizes(settings, models, lines, physical_bytes))
    if problems:
        raise _config_error(source, problems)
    return settings


def defaults() -> Iterator[tuple[str, str, str, str]]:
    """Every setting as (table, key, default as TOML text, meaning), in order."""
    for table, kind in [*SECTIONS.items(), ("model", ModelSettings)]:
        for item in fields(kind):
            yield table, item.name, item.metadata["text"], item.metadata["doc"]


def _config_error(source: str, problems: list[Problem]) -> ConfigError:
    problems.sort(key=lambda problem: problem.line)
    listed = "\n".join(f"  {problem}" for problem in problems)
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return ConfigError(
        f"{source}: {count}, nothing was started\n{listed}",
        details={
            "problems": [
                {item.name: getattr(problem, item.name) for item in fields(Problem)}
                for problem in problems
            ]
        },
    )


def _section(
    kind: type,
    raw: Mapping[str, object],
    table: str,
    index: int,
    lines: "_Lines",
    problems: list[Problem],
) -> Any:
    """Build one dataclass from its table; None when something was wrong."""
    known = {item.name: item for item in fields(kind)}
    values: dict[str, Any] = {}
    found = len(problems)
    for key, value in raw.items():
        line = lines.of(table, key, index)
        if key not in known:
            problems.append(
                Problem(
                    line,
                    f"{table}.{key}",
                    _show(value),
                    "unknown key",
                    "use one of " + ", ".join(known),
                )
            )
            continue
        try:
            values[key] = known[key].metadata["check"](value)
        except _Bad as bad:
            problems.append(Problem(line, f"{table}.{key}", _show(value), bad.why, bad.remedy))
    for key, item in known.items():
        if item.metadata.get("required") and key not in raw:
            problems.append(
                Problem(
                    lines.of(table, None, index),
                    f"{table}.{key}",
                    "",
                    "is missing",
                    f"add {key} = {item.metadata['text']}",
                )
            )
    return kind(**values) if len(problems) == found else None


def _models(
    value: object, lines: "_Lines", problems: list[Problem]
) -> Iterator[tuple[int, ModelSettings]]:
    """The models that could be built, each with its place among the [[model]] tables."""
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        problems.append(
            Problem(lines.of("model"), "model", "", "must be a list of tables", "write [[model]]")
        )
        return
    for index, entry in enumerate(value):
        model = _section(ModelSettings, entry, "model", index, lines, problems)
        if model is not None:
            yield index, model


def _names_and_paths(
    models: list[tuple[int, ModelSettings]],
    lines: "_Lines",
    path_exists: Callable[[str], bool] | None,
) -> Iterator[Problem]:
    """What no single value shows: names given twice, folders that are not there."""
    seen: dict[str, int] = {}
    for index, model in models:
        line = lines.of("model", "name", index)
        if model.name in seen:
            yield Problem(
                line,
                "model.name",
                f'"{model.name}"',
                f"also the name of the model in line {seen[model.name]}",
                "give each its own name",
            )
        seen.setdefault(model.name, line)
        if path_exists is not None and not path_exists(model.path):
            yield Problem(
                lines.of("model", "path", index),
                "model.path",
                f'"{model.path}"',
                "there is no such folder",
                "correct the path or copy the checkpoint there",
            )


def _sizes(
    settings: Settings,
    models: list[tuple[int, ModelSettings]],
    lines: "_Lines",
    physical_bytes: int | None,
) -> Iterator[Problem]:
    """Sizes against each other and against the machine: what can never fit is said now."""
    memory, room = settings.memory, physical_bytes
    if room is not None and memory.reserve is not None:
        if memory.reserve >= room:
            yield Problem(
                lines.of("memory", "reserve"),
                "memory.reserve",
                format_bytes(memory.reserve),
                f"is not below this machine's memory ({format_bytes(room)})",
                "lower it",
            )
        room = max(0, room - memory.reserve)
    if memory.budget is not None:
        if room is not None and memory.budget > room:
            yield Problem(
                lines.of("memory", "budget"),
                "memory.budget",
                format_bytes(memory.budget),
                f"is above what this machine can give ({format_bytes(room)})",
                'lower it or write "auto"',
            )
        room = memory.budget if room is None else min(room, memory.budget)
    for index, model in models:
        if model.peak_bytes < model.quota:
            yield Problem(
                lines.of("model", "peak", index),
                "model.peak",
                format_bytes(model.peak_bytes),
                f"is below the quota ({format_bytes(model.quota)})",
                "a load passes through its quota: raise peak or lower quota",
            )
        need = model.peak_bytes + settings.serve.runtime_quota
        if room is not None and need > room:
            yield Problem(
                lines.of("model", "quota", index),
                "model.quota",
                format_bytes(model.peak_bytes),
                f"can never fit: with serve.runtime_quota it needs {format_bytes(need)} of "
                f"{format_bytes(room)}",
                "lower the quota or raise memory.budget",
            )


def _show(value: object) -> str:
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


class _Lines:
    """Where tables and keys stand in a TOML text.  tomllib has judged the text; this only points.

    A scan by line is enough for pointing: what it cannot place falls back to its table's line.
    """

    _TABLE = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]")
    _KEY = re.compile(r"""\s*["']?([A-Za-z0-9_.-]+)["']?\s*=""")

    def __init__(self, text: str) -> None:
        self._at: dict[tuple[str, str | None, int], int] = {}
        counts: dict[str, int] = {}
        table, index = "", 0
        for number, line in enumerate(text.splitlines(), start=1):
            if header := self._TABLE.match(line):
                table = header[2].strip("\"' ")
                index = counts.get(table, 0)
                counts[table] = index + 1
                self._at.setdefault((table, None, index), number)
            elif key := self._KEY.match(line):
                self._at.setdefault((table, key[1], index), number)

    def of(self, table: str, key: str | None = None, index: int = 0) -> int:
        for place in ((table, key, index), (table, None, index), ("", table, 0)):
            if place in self._at:
                return self._at[place]
        return 1
