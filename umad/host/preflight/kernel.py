"""The kernel: its settings for memory, and what it must be able to do.

Source of the values: DESIGN of umad, "Before start and before load"; the system calls' first
versions: pidfd_open(2), process_mrelease(2), madvise(2).
"""

import ctypes
import errno
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from umad.host.files import inside
from umad.host.preflight.finding import Fact, Finding, Keep, Severity, read_fact

SYSCTL_DROP_IN: Final = "/etc/sysctl.d/99-umad.conf"
"""Not 90-umad.conf: a file of that name in /etc would hide the one that umad installs."""
_TMPFILES_DROP_IN: Final = "/etc/tmpfiles.d/umad-huge-pages.conf"
_HUGE_PAGES: Final = "sys/kernel/mm/transparent_hugepage/enabled"
_SYS_PROCESS_MRELEASE: Final = 448


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """What the rules below judge.

    ``pidfd`` and ``mrelease``: whether the call was found when it was tried.  They and
    ``page_bytes`` are None where another machine's files are looked at.
    """

    swappiness: Fact
    vfs_cache_pressure: Fact
    overcommit_memory: Fact
    huge_pages: Fact
    release: Fact
    pressure: Fact
    page_bytes: int | None
    pidfd: bool | None = None
    mrelease: bool | None = None


def read_kernel(root: str) -> KernelFacts:
    """Read them below ``root``; never raises."""
    own = inside(root, "") == "/"
    return KernelFacts(
        swappiness=read_fact(root, "proc/sys/vm/swappiness"),
        vfs_cache_pressure=read_fact(root, "proc/sys/vm/vfs_cache_pressure"),
        overcommit_memory=read_fact(root, "proc/sys/vm/overcommit_memory"),
        huge_pages=read_fact(root, _HUGE_PAGES),
        release=read_fact(root, "proc/sys/kernel/osrelease"),
        pressure=read_fact(root, "proc/pressure/memory"),
        page_bytes=os.sysconf("SC_PAGE_SIZE") if own else None,
        pidfd=_has_pidfd() if own else None,
        mrelease=_has_mrelease() if own else None,
    )


def _has_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def _has_mrelease() -> bool:
    """The kernel knows the call: without a valid descriptor it answers EBADF, else ENOSYS."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    call(ctypes.c_long(_SYS_PROCESS_MRELEASE), ctypes.c_int(-1), ctypes.c_uint(0))
    return ctypes.get_errno() == errno.EBADF


@dataclass(frozen=True, slots=True)
class _Sysctl:
    severity: Severity
    holds: Callable[[int], bool]
    should: str
    value: int
    why: str


_SYSCTLS: Final = {
    "swappiness": _Sysctl(
        "hard",
        lambda value: value == 1,
        "1",
        1,
        "a higher value swaps model pages out, and every forward stalls; 0 kills before it "
        "swaps idle pages",
    ),
    "vfs_cache_pressure": _Sysctl(
        "hard",
        lambda value: 0 <= value <= 50,
        "at most 50",
        50,
        "a higher value drops the file tables that model loading needs under pressure",
    ),
    "overcommit_memory": _Sysctl(
        "advice",
        lambda value: value in (0, 1),
        "0 or 1",
        0,
        "strict accounting refuses the large address ranges that the guard and GPU runtimes "
        "reserve and never fill",
    ),
}


def judge_sysctl(setting: str, fact: Fact) -> Finding:
    """One vm.* setting; what cannot be read is not met."""
    rule, value, name = _SYSCTLS[setting], fact.number, f"vm.{setting}"
    if value is not None and rule.holds(value):
        return Finding(name, "ok", str(value))
    return Finding(
        name,
        rule.severity,
        "unreadable" if value is None else str(value),
        rule.should,
        rule.why,
        f"sysctl -w {name}={rule.value}",
        Keep(SYSCTL_DROP_IN, f"{name} = {rule.value}"),
    )


def judge_kernel(facts: KernelFacts) -> Iterator[Finding]:
    """Every check of the kernel."""
    for setting in _SYSCTLS:
        yield judge_sysctl(setting, getattr(facts, setting))
    yield from _huge_pages(facts.huge_pages)
    yield from _versions(facts)
    yield _pressure(facts.pressure)
    if facts.page_bytes is not None:  # whatever it is, sizes here are in bytes
        yield Finding("kernel.page_size", "ok", f"{facts.page_bytes // 1024} KiB")


def _huge_pages(fact: Fact) -> Iterator[Finding]:
    chosen = re.search(r"\[(\w+)\]", fact.text or "")
    name = "kernel.huge_pages"
    if chosen is None:
        if fact.problem:
            yield Finding(name, "advice", "unreadable", "madvise", why=fact.problem)
        return  # a kernel without them has none to hand out by itself
    if chosen[1] != "always":
        yield Finding(name, "ok", chosen[1])
        return
    yield Finding(
        name,
        "advice",
        "always",
        "madvise",
        "a small block then takes 2 MiB, so that processes hold more than they asked for and "
        "booked; the guard asks for huge pages itself where they help",
        f"echo madvise > /{_HUGE_PAGES}",
        Keep(_TMPFILES_DROP_IN, f"w /{_HUGE_PAGES} - - - - madvise"),
    )


def _versions(facts: KernelFacts) -> Iterator[Finding]:
    found = re.match(r"(\d+)\.(\d+)", facts.release.text or "")
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    pidfd = version >= (5, 3) if facts.pidfd is None else facts.pidfd
    mrelease = version >= (5, 15) if facts.mrelease is None else facts.mrelease
    shown = f"Linux {facts.release.shown}"
    if not pidfd:
        yield Finding(
            "kernel.version",
            "hard",
            f"{shown}: no pidfd_open",
            "Linux 5.15 or newer, 6.1 as in Debian 12 at best",
            "umad stops a process through a pidfd only: a bare pid may be somebody else's by then",
        )
    elif not mrelease:
        yield Finding(
            "kernel.version",
            "advice",
            f"{shown}: no process_mrelease",
            "Linux 5.15 or newer, and no seccomp filter on it",
            "a killed process's memory comes back when its exit is done, not at once",
        )
    else:
        yield Finding("kernel.version", "ok", shown)


def _pressure(fact: Fact) -> Finding:
    name = "kernel.pressure"
    if fact.text is not None:
        return Finding(name, "ok", "readable")
    return Finding(
        name,
        "advice",
        fact.shown,
        "readable (/proc/pressure/memory)",
        "umad looks more often when the kernel reports stalls on memory, and grants nothing "
        "during one; without the report it has its own samples only",
        "update-grub && reboot",
        Keep(
            "/etc/default/grub.d/umad.cfg",
            'GRUB_CMDLINE_LINUX_DEFAULT="$GRUB_CMDLINE_LINUX_DEFAULT psi=1"',
        ),
    )
