"""Kernel settings that umad depends on: read here, judged here, mended by the operator.

Rules: a setting that cannot be read is not met; every finding carries the command that mends it.
Stays out: changing anything.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from umad.host.files import Unreadable, inside, parse_decimal, read_as

Severity = Literal["hard", "advice"]

DROP_IN: Final = "/etc/sysctl.d/90-umad.conf"
"""Where the lines of ``Finding.fix_forever`` belong."""


@dataclass(frozen=True, slots=True)
class KernelParameters:
    """The vm.* settings as they are, None where one cannot be read, and the page size in bytes."""

    swappiness: int | None
    vfs_cache_pressure: int | None
    overcommit_memory: int | None
    page_bytes: int


@dataclass(frozen=True, slots=True)
class Finding:
    """A setting that is not as umad needs it.

    ``severity`` "hard" keeps a strict daemon from starting; ``fix_now`` is a shell command,
    ``fix_forever`` a line for ``DROP_IN``.
    """

    name: str
    severity: Severity
    found: str
    should: str
    why: str
    fix_now: str
    fix_forever: str


def read_parameters(root: str = "/") -> KernelParameters:
    """Read the settings below ``root``; never raises."""

    def setting(name: str) -> int | None:
        try:
            return read_as(inside(root, f"proc/sys/vm/{name}"), parse_decimal)
        except Unreadable:
            return None

    return KernelParameters(
        swappiness=setting("swappiness"),
        vfs_cache_pressure=setting("vfs_cache_pressure"),
        overcommit_memory=setting("overcommit_memory"),
        page_bytes=os.sysconf("SC_PAGE_SIZE"),
    )


@dataclass(frozen=True, slots=True)
class _Rule:
    severity: Severity
    holds: Callable[[int], bool]
    should: str
    value: int
    why: str


_RULES: Final = {
    "swappiness": _Rule(
        "hard",
        lambda value: value == 1,
        "1",
        1,
        "a higher value swaps model pages out, and every forward stalls; 0 kills before it "
        "swaps idle pages",
    ),
    "vfs_cache_pressure": _Rule(
        "hard",
        lambda value: value <= 50,
        "at most 50",
        50,
        "a higher value drops the file tables that model loading needs under pressure",
    ),
    "overcommit_memory": _Rule(
        "advice",
        lambda value: value != 2,
        "0 or 1",
        0,
        "strict accounting refuses the large address ranges that GPU runtimes reserve and "
        "never fill",
    ),
}


def preflight(parameters: KernelParameters) -> list[Finding]:
    """What must be changed before umad can keep its promises; empty when nothing."""
    findings = []
    for name, rule in _RULES.items():
        value: int | None = getattr(parameters, name)
        if value is not None and rule.holds(value):
            continue
        findings.append(
            Finding(
                name=f"vm.{name}",
                severity=rule.severity,
                found="unreadable" if value is None else str(value),
                should=rule.should,
                why=rule.why,
                fix_now=f"sysctl -w vm.{name}={rule.value}",
                fix_forever=f"vm.{name} = {rule.value}",
            )
        )
    return findings
