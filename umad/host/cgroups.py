"""Cgroups of the second version: where a systemd unit's lies, and who is in it.

Read from the file system alone: systemd is not asked, so nothing here waits for D-Bus, and what is
found is what the kernel says.  Where there are more folders than are looked through, every process
is asked instead: a unit may make as many as it likes, and hides nobody in them.
Stays out: which of the processes matter.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from umad.host.files import Unreadable, inside, parse_decimal, read_file

_MOUNTS: Final = ("sys/fs/cgroup", "sys/fs/cgroup/unified")  # v2 alone, and beside v1
_FOLDERS_MAX: Final = 256  # looked through at once


def of_process(pid: int, root: str = "/") -> str:
    """The cgroup of a process, below the mount; "" where there is none."""
    try:
        lines = read_file(inside(root, f"proc/{pid}/cgroup")).decode("utf-8", "replace")
    except Unreadable:
        return ""
    return next((line[len("0::/") :] for line in lines.splitlines() if line[:4] == "0::/"), "")


def pids(path: str, root: str = "/") -> frozenset[int]:
    """Who is in this very cgroup; nobody where it cannot be read."""
    for mount in _MOUNTS:
        try:
            data = read_file(inside(root, f"{mount}/{path}/cgroup.procs"))
            return frozenset(parse_decimal(line) for line in data.split())
        except (Unreadable, ValueError):
            continue
    return frozenset()


def pids_below(path: str, root: str = "/") -> frozenset[int]:
    """Who is in a cgroup and in those below it, which a service may have made for itself."""
    found = pids(path, root)
    try:
        for place, names in _walk(path, root, lambda _name: True):
            found = found.union(*(pids(f"{place}/{name}", root) for name in names))
    except _TooMany:
        return frozenset(pid for pid, its in _of_all(root) if f"{its}/".startswith(f"{path}/"))
    return found


def find_unit(unit: str, root: str = "/") -> str:
    """The cgroup of a system unit, below the mount; "" where it does not run.

    Only slices hold such units, so only they are looked through: a millisecond.
    """
    try:
        for place, names in _walk("", root, _is_slice):
            if unit in names:
                return f"{place}/{unit}".lstrip("/")
    except _TooMany:
        for _, its in _of_all(root):
            above, found, _ = f"/{its}/".partition(f"/{unit}/")
            if found and all(map(_is_slice, above.split("/")[1:])):
                return f"{above}/{unit}".lstrip("/")
    return ""


class _TooMany(Exception):
    """There are more folders than are looked through."""


def _is_slice(name: str) -> bool:
    return name.endswith(".slice")


def _of_all(root: str) -> Iterator[tuple[int, str]]:
    """Each process, and its cgroup; 10 us for each."""
    with suppress(OSError), os.scandir(inside(root, "proc")) as entries:
        for entry in entries:
            if entry.name.isdigit():
                yield int(entry.name), of_process(int(entry.name), root)


def _walk(path: str, root: str, into: Callable[[str], bool]) -> Iterator[tuple[str, list[str]]]:
    """The folders below a cgroup, from the top: (place, names of those in it).

    Raises:
        _TooMany: not all of them were told.
    """
    mount = next((one for one in _MOUNTS if Path(inside(root, f"{one}/cgroup.procs")).exists()), "")
    todo = [path] if mount else []
    for _ in range(_FOLDERS_MAX):
        if not todo:
            return
        place = todo.pop()
        try:
            with os.scandir(inside(root, f"{mount}/{place}")) as entries:
                names = [one.name for one in entries if one.is_dir(follow_symlinks=False)]
        except OSError:
            continue  # it has gone meanwhile
        yield place, names
        todo += (f"{place}/{name}" for name in names if into(name))
    if todo:
        raise _TooMany
