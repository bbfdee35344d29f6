"""Programs that know nothing of umad: who they are by the kernel's word, and what outlives us.

Two kinds come under quota by another's word: a child of ``umadctl run``, and a systemd unit, by
``umadctl adopt`` or a [[worker]] table.  Both are kept in the runtime folder, so that the next
daemon goes on with them; a unit comes under quota again whenever it runs.
Stays out: what such a worker may hold, and when it has loaded (core/outside.py).
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from umad.core import outside
from umad.core.state import State
from umad.errors import AccessDenied, InvalidParams, UmadError
from umad.host import cgroups, procs
from umad.settings import WorkerSettings, never_adopted
from umad.values import Identity, Kin, Outsider, Peer
from umad.wire.messages import check_params

_NAME: Final = "outside.json"
_BYTES_MAX: Final = 1 << 20
LOOKED_FOR_EVERY_S: Final = 1.0

Params = Mapping[str, Any]


def launched(peer: Peer, pid: int, root: str = "/") -> Outsider:
    """The child that a peer registers in its own place.

    Raises:
        InvalidParams: there is no such process.
        AccessDenied: it is not the peer's child, or another user's.
    """
    stat = procs.process_stat(pid, root)
    if stat is None or stat.ended:
        raise InvalidParams(f"there is no process {pid}")
    uid = procs.owner(pid)
    if stat.parent != peer.identity.pid or uid != peer.uid:
        raise AccessDenied(
            f"process {pid} is no child of process {peer.identity.pid} and its user: whoever "
            "starts a program may register it; a running unit is adopted (umadctl adopt)"
        )
    return Outsider(Identity(pid, stat.start_ticks), procs.comm(pid, root), uid, peer.identity)


def running_unit(name: str, root: str = "/") -> Outsider:
    """A systemd unit that runs.

    Raises:
        InvalidParams: it does not run, or is none that can be adopted.
    """
    if why := never_adopted(name):
        raise InvalidParams(f"{name} cannot be adopted: {why}")
    cgroup = cgroups.find_unit(name, root)
    pids = cgroups.pids_below(cgroup, root) if cgroup else frozenset()
    if pids & procs.lineage(os.getpid(), root):
        raise InvalidParams(f"{name} cannot be adopted: umad runs in it")
    stats = ((pid, procs.process_stat(pid, root)) for pid in pids)
    found = [Identity(pid, one.start_ticks) for pid, one in stats if one and not one.ended]
    if not found:
        raise InvalidParams(
            f"{name} does not run: no process is in a cgroup of that name; see systemctl status "
            f"{name} (a user's own units cannot be adopted)"
        )
    first, *others = sorted(found, key=lambda one: (one.start_ticks, one.pid))
    uid = procs.owner(first.pid)
    return Outsider(first, name, uid, unit=name, cgroup=cgroup, others=frozenset(others))


def kin_of(outsider: Outsider) -> Kin:
    """What a search for its family starts from."""
    return Kin(outsider.uid, outsider.others, outsider.launcher, outsider.cgroup)


class Adoptions:
    """What was adopted by command, and the file of all that outlives this daemon.

    Args:
        folder: the runtime folder, which a reboot empties.
        root: the folder that holds ``proc/`` and ``sys/``.
    """

    def __init__(self, folder: Path, root: str) -> None:
        self._file = folder / _NAME
        self._root = root
        self._units: dict[str, Params] = {}  # by unit, adopted by command
        self._programs: dict[Identity, tuple[Outsider, Params]] = {}  # of the last daemon
        self._problems: dict[str, str] = {}  # by worker, what was told last
        self._written = ""
        self._problem = ""  # why the file was not written at the last try
        self._due_s = 0.0

    def load(self) -> str:
        """Read what the last daemon has kept; returns what is wrong with it."""
        try:
            with self._file.open() as file:
                self._written = file.read(_BYTES_MAX)
            kept = json.loads(self._written)
            units = [check_params("adopt", one) for one in kept["units"]]
            programs = [self._program(one) for one in kept["programs"]]
        except FileNotFoundError:
            return ""
        except (
            *(OSError, ValueError, KeyError, TypeError, AttributeError),
            *(RecursionError, UmadError),
        ) as error:
            return f"cannot use {self._file}: {error}"
        self._units = {str(one["unit"]): one for one in units}
        self._programs = {one[0].identity: one for one in programs}
        return ""

    def keep(self, state: State) -> str:
        """Write what the next daemon must know, if it has changed; what went wrong, once."""
        programs = [*outside.kept(state), *map(_plain, self._programs.values())]
        kept = {"units": list(self._units.values()), "programs": programs}
        text = json.dumps(kept) if any(kept.values()) else ""
        if text == self._written:
            return ""
        temporary: Path | None = None
        try:
            if not text:
                self._file.unlink(missing_ok=True)
            else:
                fd, name = tempfile.mkstemp(prefix=f".{_NAME}-", dir=self._file.parent)
                temporary = Path(name)
                with os.fdopen(fd, "w") as file:
                    file.write(text)
                temporary.replace(self._file)
        except OSError as error:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
            was, self._problem = self._problem, f"cannot write {self._file}: {error.strerror}"
            return "" if self._problem == was else self._problem  # each look tries it again
        self._written, self._problem = text, ""
        return ""

    def outsider(self, peer: Peer, method: str, params: Params) -> Outsider | None:
        """Of whom a request speaks that is not its sender.

        Raises:
            RequestRejected: there is no such program, or it is not the sender's to speak for.
        """
        if method == "register" and "process" in params:
            return launched(peer, params["process"], self._root)
        return running_unit(params["unit"], self._root) if method == "adopt" else None

    def answered(self, method: str, params: Params) -> None:
        """A request was granted: a unit is adopted from now on whenever it runs, or no more."""
        if method == "adopt":
            self._units[params["unit"]] = params
        elif method == "disown":
            name = params["name"]
            self._units = {unit: one for unit, one in self._units.items() if one["model"] != name}

    def due(self, state: State, now_s: float) -> Iterator[tuple[Outsider, Params]]:
        """What runs and is not under quota yet; looked for every second."""
        if now_s < self._due_s:
            return
        self._due_s = now_s + LOOKED_FOR_EVERY_S
        for identity, program in list(self._programs.items()):
            if identity not in state.processes and procs.is_alive(identity, self._root):
                yield program
            if identity in state.processes or not procs.is_alive(identity, self._root):
                del self._programs[identity]
        tables = {one.unit: _params_of(one) for one in state.settings.workers}
        known = {one.unit for one in state.processes.values() if not one.ended}
        for unit, params in {**self._units, **tables}.items():
            if unit in known:
                continue
            try:
                outsider = running_unit(unit, self._root)
            except InvalidParams:
                self._problems.pop(params["model"], None)  # it will run again
            else:
                yield outsider, params

    def refused(self, name: str, why: str) -> bool:
        """It could not be put under quota; whether that is news."""
        news = self._problems.get(name) != why
        self._problems[name] = why
        return news

    def _program(self, one: Mapping[str, Any]) -> tuple[Outsider, Params]:
        identity = Identity(int(one["pid"]), int(one["start_ticks"]))
        params = check_params("register", one["params"])
        comm, uid = procs.comm(identity.pid, self._root), procs.owner(identity.pid)
        return Outsider(identity, comm, uid, Identity(*map(int, one["launcher"]))), params


def _plain(program: tuple[Outsider, Params]) -> dict[str, Any]:
    outsider, params = program
    assert outsider.launcher is not None
    return outside.plain(outsider.identity, outsider.launcher, params)


def _params_of(table: WorkerSettings) -> Params:
    return {
        "model": table.name,
        "unit": table.unit,
        "quota": table.quota,
        "peak": table.peak_bytes,
        "pool": table.pool,
        "priority": table.priority,
        "settle_s": table.settle,
    }
