"""``umadctl snapshot``: everything a bug report needs, in one archive that a person looks through.

Asks the daemon for its state, its latest events and its recording, and gathers the files it reads
with the caller's own rights.  Nothing is sent anywhere.
"""

import json
import os
import platform
import re
import textwrap
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from umad import __version__
from umad.client import Client, RequestRejected, UmadError, connect
from umad.host import archive, collect

# The daemon keeps a few MiB; a peer that sends without end is none.
_RECORDING_BYTES_MAX: Final = 16 << 20


@dataclass(slots=True)
class Gathered:
    """What goes into an archive: its files by name, and what is to be said about them."""

    files: dict[str, bytes] = field(default_factory=dict)
    no_daemon: str = ""
    unreadable: dict[str, str] = field(default_factory=dict)
    processes: int = 0

    @property
    def readings(self) -> int:
        """How many files of the machine are in it."""
        return sum(name.startswith(f"{archive.TREE}/") for name in self.files)


def gather(socket: str | None, root: str = "/") -> Gathered:
    """Ask the daemon, where there is one, and read the machine's files.

    Args:
        socket: where the daemon listens; None for the usual place.
        root: the folder that holds ``proc/`` and ``sys/``.
    """
    made = Gathered()
    pids: set[int] = set()
    try:
        with connect(socket, name="umadctl") as client:
            state = client.call("status")
            made.files[archive.STATUS] = _json(state)
            pids = _pids(state)
            made.files[archive.EVENTS] = _json(client.call("events"))
            made.files[archive.RECORDING] = _recording(client)
    except UmadError as error:
        made.no_daemon = error.message
    made.processes = len(pids)
    for taken in collect.readings(root, pids):
        if taken.data is None:
            made.unreadable[taken.place] = taken.problem
        else:
            made.files[f"{archive.TREE}/{taken.place}"] = taken.data
    system = platform.uname()
    about = archive.About(
        __version__,
        time.time(),
        f"{system.system} {system.release} {system.machine}",
        os.sysconf("SC_PAGE_SIZE"),
        made.no_daemon,
        made.unreadable,
    )
    made.files[archive.ABOUT] = _json(asdict(about))
    return made


def default_name() -> str:
    """The archive's name where nobody gave one, without its ending."""
    host = re.sub(r"[^A-Za-z0-9-]+", "-", platform.node())[:40].strip("-") or "host"
    return f"umad-snapshot-{host}-{time.strftime('%Y%m%d-%H%M%S')}"


def write(made: Gathered, target: Path) -> None:
    """Pack it.

    Raises:
        FileExistsError: ``target`` is there already.
        OSError: it cannot be written.
    """
    folder = target.name.removesuffix(".gz").removesuffix(".tar").removesuffix(".tgz")
    archive.pack(target, folder, sorted(made.files.items()))


def described(made: Gathered, target: Path) -> Iterator[str]:
    """What is in it, for the person who is about to attach it somewhere."""
    yield f"{target}: {target.stat().st_size / 1024:.0f} KiB"
    if made.no_daemon:
        why = f"no books and no decisions: {made.no_daemon}"
        yield from textwrap.wrap(why, 80, initial_indent="  ", subsequent_indent="    ")
    else:
        yield "  status.json, events.json   the daemon's state and latest events"
        yield "  recording.jsonl            its settings and books, and what it was told and"
        yield "                             did in the last minute"
    yield f"  tree/                      {made.readings} files that umad reads, of this machine"
    yield f"                             and its registered processes ({made.processes})"
    if made.unreadable:
        yield f"  {len(made.unreadable)} files were not readable for you; as root they may be"
    yield "It holds names of programs, models, cgroups and users' numbers; no prompts, no"
    yield "environments, no command lines. Look through it before you attach it:"
    yield f"  tar -tzf {target}"
    yield f"  umad --replay {target}"


def _recording(client: Client) -> bytes:
    data = bytearray()
    part = 0
    while True:
        answer = client.call("snapshot", {"part": part})
        data += answer["data"]
        part += 1
        if answer["last"]:
            return bytes(data)
        if len(data) > _RECORDING_BYTES_MAX:
            raise RequestRejected("the daemon's recording has no end")


def _pids(state: Mapping[str, Any]) -> set[int]:
    return {pid for process in state["processes"] for pid in (process["pid"], *process["family"])}


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1).encode()
