"""``umad --replay``: what umad decides on what a snapshot has recorded, told as plain text.

The files in the archive are read by the probe that the daemon uses; an engine is made of the
recorded books, told what the daemon was told, at the recorded times, and what it decides is held
against what the daemon did.  Its actions are values that nobody carries out: no process is
signalled, no socket opened, nothing of this machine read.
"""

import json
import os
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NoReturn, TextIO

from umad import __version__
from umad.core.engine import Engine
from umad.core.plain import typed
from umad.core.record import differences, dump, rebuild
from umad.core.tape import done, feed
from umad.daemon.recording import FORMAT
from umad.daemon.retell import deeds, question
from umad.errors import BadArchive, UmadError
from umad.host import archive, procs
from umad.host.memory import MachineProbe
from umad.settings import SECTIONS, Settings
from umad.units import MIB, format_bytes, format_duration, printable
from umad.values import PoolReading, Reading
from umad.wire.messages import check_params

INPUTS_MAX: Final = 20_000
_LISTED_MAX: Final = 20
_WIDTH: Final = 80
# What an engine raises when it is told what no daemon tells; a recording may be anybody's.
_CONTRADICTIONS: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    UmadError,
)


def replay(source: Path, out: TextIO) -> None:
    """Tell what is in an archive and what umad decides on it.

    Raises:
        BadArchive: it cannot be read or believed; what was told before holds.
    """
    with tempfile.TemporaryDirectory(prefix="umad-replay-") as made:
        folder = Path(made)
        try:
            archive.unpack(source, folder)
            about = _about(folder)
        except BadArchive as error:
            raise BadArchive(f"{source}: {error.message}") from error
        except OSError as error:
            raise BadArchive(f"cannot unpack {source}: {error.strerror}") from error
        out.writelines(f"{printable(line)}\n" for line in _told(folder, source.name, about))


def _about(folder: Path) -> archive.About:
    try:
        about: archive.About = typed(archive.About, _json((folder / archive.ABOUT).read_bytes()))
        _clock(about.taken_unix_s)
    except (ValueError, RecursionError, OverflowError) as error:
        raise BadArchive(f"{archive.ABOUT}: {error}") from error
    return about


def _told(folder: Path, name: str, about: archive.About) -> Iterator[str]:
    yield name
    taken = datetime.fromtimestamp(about.taken_unix_s, UTC)
    yield from _wrapped(
        f"taken {taken:%Y-%m-%d %H:%M:%S} UTC by umad {about.umad} on {about.system}; "
        f"replayed by umad {__version__}, which changes nothing and signals nobody"
    )
    yield ""
    yield "MEMORY, as umad reads the files in the archive now"
    yield from _memory(folder / archive.TREE)
    if about.page_bytes != os.sysconf("SC_PAGE_SIZE"):
        yield from _wrapped(
            f"that machine's pages have {about.page_bytes} bytes, this one's "
            f"{os.sysconf('SC_PAGE_SIZE')}: figures in pages are wrong here"
        )
    for place, why in list(about.unreadable.items())[:_LISTED_MAX]:
        yield from _wrapped(f"not readable when it was taken: {place}: {why}")
    yield ""
    if about.no_daemon:
        yield from _wrapped(f"No books and no decisions: {about.no_daemon}", indent="")
        return
    try:
        yield from _setup((folder / archive.STATUS).read_bytes())
        yield from _decisions(folder / archive.RECORDING)
    except _CONTRADICTIONS as error:
        why = f"{type(error).__name__}: {error}"
        raise BadArchive(f"what was recorded contradicts itself: {why[:300]}") from error
    except OSError as error:
        raise BadArchive(f"what was recorded cannot be read: {error.strerror}") from error


# ------------------------------------------------------------------ memory


def _memory(tree: Path) -> Iterator[str]:
    """What the probe says of the tree, and of each process in it."""
    found = (procs.process_identity(int(pid), str(tree)) for pid in _pids(tree))
    identities = [identity for identity in found if identity is not None]
    probe = MachineProbe(str(tree))
    try:
        look = probe.sample(identities, 0.0)
    finally:
        probe.close()
    for pool in look.pools.values():
        yield from _wrapped(_pool(pool))
    for identity, process in look.processes.items():
        comm = procs.comm(identity.pid, str(tree))
        yield from _wrapped(f"process {identity.pid} {comm}: {_figure(process.bytes)}")
    for anomaly in look.anomalies:
        yield from _wrapped(f"contradicts itself: {anomaly}")


def _pids(tree: Path) -> list[str]:
    places = (tree / "proc").glob("[0-9]*")
    return sorted((place.name for place in places if place.name.isdecimal()), key=int)


def _pool(pool: PoolReading) -> str:
    return (
        f"pool {pool.name}: {_figure(pool.capacity)}, in use {_figure(pool.used)}, "
        f"could be handed out {_figure(pool.safe)}, bound by {pool.binding}"
    )


def _figure(reading: Reading) -> str:
    """With its source, or why there is none."""
    if reading.value is None:
        return f"unknown ({reading.problem or reading.state.value})"
    return f"{format_bytes(reading.value)} ({reading.source})"


# ------------------------------------------------------------------- setup


def _setup(status: bytes) -> Iterator[str]:
    """In spite of what the daemon ran."""
    daemon = typed(dict[str, Any], _json(status))["daemon"]
    yield f"DAEMON {daemon['version']}, up {format_duration(daemon['uptime_s'])}"
    for warning in daemon["warnings"]:
        yield from _wrapped(f"not set up: {warning}")
    if daemon["permissive"]:
        yield from _wrapped(f"started with --permissive={','.join(daemon['permissive'])}")
    for advice in daemon["advice"]:
        yield from _wrapped(f"advised: {advice}")


def _settings(settings: Settings) -> Iterator[str]:
    """Those that are not at their default, and the models."""
    for section, kind in SECTIONS.items():
        mine, usual = getattr(settings, section), kind()
        for one in fields(kind):
            if (value := getattr(mine, one.name)) != getattr(usual, one.name):
                large = isinstance(value, int) and value >= MIB
                yield from _wrapped(
                    f"{section}.{one.name} = {format_bytes(value) if large else value}"
                )
    for model in settings.models[:_LISTED_MAX]:
        yield from _wrapped(
            f"model {model.name}: {model.kind}, quota {format_bytes(model.quota)}, peak "
            f"{format_bytes(model.peak_bytes)}, in {model.pool}, isolation {model.isolation}"
        )
    yield ""


# --------------------------------------------------------------- decisions


def _decisions(recording: Path) -> Iterator[str]:
    """The recording played, step by step, and the verdict on it."""
    with recording.open("rb") as lines:
        head = _record(next(lines, b"{}"))
        if head.get("format") != FORMAT:
            raise ValueError(f"format {head.get('format')!r}; this umad reads {FORMAT}")
        start = _record(next(lines, b"{}"))
        if "start" not in start:
            yield "No decisions: there were too many workers to record them."
            return
        engine = rebuild(start["start"])
        yield from _settings(engine.state.settings)
        yield "DECISIONS, made again: what came (UTC), and below it what umad does"
        played = _Played(engine)
        for line in lines:
            record = _record(line)
            if "end" in record:
                break
            yield from played.step(record)
        else:
            raise ValueError("it has no end")
    yield from played.quiet()
    yield ""
    yield "BOOKS at the end"
    yield from _books(engine, played.now_s)
    yield ""
    yield from _verdict(played, differences(dump(engine), record["end"]))


class _Played:
    """One engine on its way through a recording."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.now_s = 0.0
        self.looks = 0
        self.requests: Counter[str] = Counter()
        self.inputs = 0
        self.decided = 0
        self.differing = 0
        self._quiet = 0

    def step(self, record: Mapping[str, Any]) -> Iterator[str]:
        """One input: what came, what umad decides, and what the daemon did if that differs."""
        self.inputs += 1
        if self.inputs > INPUTS_MAX:
            raise ValueError(f"more than {INPUTS_MAX} inputs")
        method, given, then = record["input"], dict(record["given"]), list(record["did"])
        self.now_s = float(given.get("now_s", self.now_s))
        if method in ("request", "notification"):
            given["params"] = check_params(given["method"], given["params"])
        came = question(self.engine.state, method, given)
        now = done(feed(self.engine, method, given))
        self.looks += method == "observe"
        same = _sorted(now) == _sorted(then)
        told = deeds(self.engine.state, method, now)
        self.decided += bool(told)
        self.differing += not same
        if same and not told and not came:
            self._quiet += method == "observe"
            return
        yield from self.quiet()
        yield from _wrapped(came or "a look at memory", indent=f"  {self._clock()}  ", hang=16)
        if same:
            for text in told:
                yield from _wrapped(text, indent=" " * 18)
            return
        for who, texts in (
            ("umad now", told),
            ("the daemon then", deeds(self.engine.state, method, then)),
        ):
            for text in texts or ["nothing"]:
                yield from _wrapped(f"{who}: {text}", indent=" " * 14 + "!   ")

    def quiet(self) -> Iterator[str]:
        """How many looks have passed without anything to tell."""
        if self._quiet:
            looks = "look" if self._quiet == 1 else "looks"
            yield f"                ({self._quiet} {looks}, nothing to do)"
        self._quiet = 0

    def _clock(self) -> str:
        return _clock(self.now_s + self.engine.unix_offset_s)


def _books(engine: Engine, now_s: float) -> Iterator[str]:
    state = engine.status(now_s)
    for pool in state["pools"]:
        yield from _wrapped(
            f"pool {pool['name']}: budget {_size(pool['budget'])}, booked "
            f"{_size(pool['booked'])}, free {_size(pool['free'])}, bound by "
            f"{pool['problem'] or pool['binding']}"
        )
    for worker in state["workers"][:_LISTED_MAX]:
        yield from _wrapped(
            f"worker {worker['name']} of process {worker['pid']}: {worker['state']}, booked "
            f"{_size(worker['booked'])}, quota {_size(worker['quota'])}"
        )
    for process in state["processes"][:_LISTED_MAX]:
        yield from _wrapped(
            f"process {process['pid']} {process['comm']}: {process['verdict']}, holds "
            f"{_size(process['bytes'])}, may hold {_size(process['limit'])}"
        )
    for waiter in state["queue"][:_LISTED_MAX]:
        yield from _wrapped(
            f"{waiter['worker']} waits for {waiter['what']} of {_size(waiter['bytes'])}"
        )
    hidden = state["workers_total"] - _LISTED_MAX
    if hidden > 0:
        yield f"  {hidden} more workers"


def _verdict(played: _Played, differing: list[str]) -> Iterator[str]:
    if not played.differing:
        yield from _wrapped(
            f"RESULT: in {played.looks} looks and {played.inputs - played.looks} other steps "
            "this umad decides what the daemon decided.",
            indent="",
        )
    else:
        yield from _wrapped(
            f"RESULT: this umad decides otherwise in {played.differing} of {played.inputs} "
            "steps; they are marked with '!'.",
            indent="",
        )
    if differing:
        yield from _wrapped(
            f"The books at the end are not the daemon's: {', '.join(differing)}.", indent=""
        )
    else:
        yield "The books at the end are the daemon's."


# ----------------------------------------------------------------- helpers


def _record(line: bytes) -> dict[str, Any]:
    record = _json(line)
    if not isinstance(record, dict):
        raise ValueError("a line is no object")
    return record


def _json(data: bytes) -> Any:
    return json.loads(data, parse_constant=_refuse)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no figure")


def _sorted(actions: list[dict[str, Any]]) -> list[str]:
    """The order within one step depends on sets, and says nothing."""
    return sorted(json.dumps(action, sort_keys=True) for action in actions)


def _size(count: int | None) -> str:
    return "?" if count is None else format_bytes(count)


def _clock(unix_s: float) -> str:
    return f"{datetime.fromtimestamp(unix_s, UTC):%H:%M:%S.%f}"[:-3]


def _wrapped(text: str, indent: str = "  ", hang: int | None = None) -> list[str]:
    rest = " " * (len(indent) + 2 if hang is None else hang)
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=rest, break_on_hyphens=False
    )
