"""Configuration: TOML text -> checked, frozen Settings.

The settings themselves are in ``settings``; etc/umad.toml is held equal to them by a test.  Reads
no file: the caller brings the text, and a predicate that says whether a path exists.  All problems
of a text are found in one go, each with line, key, value, reason and remedy.
"""

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from umad.errors import ConfigError
from umad.settings import (
    RESERVED_NAMES,
    SECTIONS,
    BadValue,
    DaemonSettings,
    EnforcementSettings,
    LeaseSettings,
    MemorySettings,
    ModelSettings,
    ServeSettings,
    Settings,
    WorkerSettings,
)
from umad.units import format_bytes

__all__ = [
    "DaemonSettings",
    "EnforcementSettings",
    "LeaseSettings",
    "MemorySettings",
    "ModelSettings",
    "Problem",
    "ServeSettings",
    "Settings",
    "defaults",
    "parse",
]


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
    workers: list[tuple[int, WorkerSettings]] = []
    for key, value in raw.items():
        if key == "model":
            models.extend(_tables(ModelSettings, key, value, lines, problems))
        elif key == "worker":
            workers.extend(_tables(WorkerSettings, key, value, lines, problems))
        elif key not in SECTIONS:
            known = ", ".join([*SECTIONS, "model", "worker"])
            problems.append(Problem(lines.of(key), key, "", "unknown table", f"use one of {known}"))
        elif not isinstance(value, dict):
            problems.append(
                Problem(lines.of(key), key, _show(value), "must be a table", f"write [{key}]")
            )
        else:
            section = _section(SECTIONS[key], value, key, 0, lines, problems)
            if section is not None:
                built[key] = section
    settings = Settings(
        **built,
        models=tuple(model for _, model in models),
        workers=tuple(worker for _, worker in workers),
    )
    problems.extend(_names_and_paths(models, lines, path_exists))
    problems.extend(_sizes(settings, models, lines, physical_bytes))
    problems.extend(_workers(settings, workers, lines, physical_bytes))
    if problems:
        raise _config_error(source, problems)
    return settings


def defaults() -> Iterator[tuple[str, str, str, str]]:
    """Every setting as (table, key, default as TOML text, meaning), in order."""
    tables = {**SECTIONS, "model": ModelSettings, "worker": WorkerSettings}
    for table, kind in tables.items():
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
        except BadValue as bad:
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


def _tables(
    kind: type, key: str, value: object, lines: "_Lines", problems: list[Problem]
) -> Iterator[tuple[int, Any]]:
    """What could be built of the [[key]] tables, each with its place among them."""
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        problems.append(
            Problem(lines.of(key), key, "", "must be a list of tables", f"write [[{key}]]")
        )
        return
    for index, entry in enumerate(value):
        built = _section(kind, entry, key, index, lines, problems)
        if built is not None:
            yield index, built


def _workers(
    settings: Settings,
    workers: list[tuple[int, WorkerSettings]],
    lines: "_Lines",
    physical_bytes: int | None,
) -> Iterator[Problem]:
    """Names and units given twice, and sizes that contradict each other or the machine."""
    names = {model.name for model in settings.models}.union(RESERVED_NAMES)
    units: set[str] = set()
    room = min(filter(None, (physical_bytes, settings.memory.budget)), default=None)
    for index, worker in workers:

        def problem(key: str, value: str, why: str, remedy: str, at: int = index) -> Problem:
            return Problem(lines.of("worker", key, at), f"worker.{key}", value, why, remedy)

        if worker.name in names:
            yield problem("name", f'"{worker.name}"', "is another worker's", "choose another")
        if worker.unit in units:
            yield problem("unit", f'"{worker.unit}"', "has a table already", "leave one out")
        names.add(worker.name)
        units.add(worker.unit)
        peak = format_bytes(worker.peak_bytes)
        if worker.peak_bytes < worker.quota:
            yield problem("peak", peak, "is below the quota", "raise peak or lower quota")
        if room is not None and worker.peak_bytes > room:
            why = f"can never fit into {format_bytes(room)}"
            yield problem("quota", peak, why, "lower the quota or raise memory.budget")


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
        if model.name in RESERVED_NAMES:
            yield Problem(
                line,
                "model.name",
                f'"{model.name}"',
                "umad-serve's own workers have this name",
                "choose another",
            )
        if model.fallback and model.device == "cpu":
            yield Problem(
                lines.of("model", "fallback", index),
                "model.fallback",
                '["cpu"]',
                "the model runs on the CPU already",
                "leave it out, or name the model's device",
            )
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
    runtimes = len(settings.isolations) * settings.serve.runtime_quota
    both = len(settings.isolations) > 1
    twice = ' (twice: isolation = "process" counts it once more)' if both else ""
    for index, model in models:
        if model.peak_bytes < model.quota:
            yield Problem(
                lines.of("model", "peak", index),
                "model.peak",
                format_bytes(model.peak_bytes),
                f"is below the quota ({format_bytes(model.quota)})",
                "a load passes through its quota: raise peak or lower quota",
            )
        need = model.peak_bytes + runtimes
        if room is not None and need > room:
            yield Problem(
                lines.of("model", "quota", index),
                "model.quota",
                format_bytes(model.peak_bytes),
                f"can never fit: with serve.runtime_quota{twice} it needs "
                f"{format_bytes(need)} of {format_bytes(room)}",
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
