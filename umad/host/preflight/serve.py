"""umad-serve: its environment, the limits it lives under, and the fences around it.

What runs is believed before what is configured: the engine's own environ and limits where one
runs, else the unit with its drop-ins, else this process's, which ``umad up`` hands on.  Files
named by EnvironmentFile= are not followed: once the engine runs, its environ has them.
Source: umad-serve's supervisor for what the engine must have; cgroup-v2.rst, systemd.unit(5).
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from umad.host.files import Unreadable, inside, read_file
from umad.host.preflight.finding import Finding, Keep, read_fact
from umad.host.preflight.memory import CONFIG
from umad.units import format_bytes

UNIT: Final = "umad-serve.service"
UNIT_DROP_IN: Final = f"/etc/systemd/system/{UNIT}.d/umad.conf"
_UNIT_FOLDERS: Final = ("usr/lib/systemd/system", "run/systemd/system", "etc/systemd/system")
_CGROUPS: Final = "sys/fs/cgroup"
_PROGRAM: Final = re.compile(rb"(^|\0|/)umad(-serve|\.serve\.\w+)\0")
_ENGINE: Final = re.compile(rb"\0umad\.serve\.(engine|zygote|child)\0")
_VARIABLES: Final[tuple[str, ...]] = ("HSA_ENABLE_SDMA", "HSA_XNACK")
# /proc/PID/limits: name, soft and hard limit; a soft limit that is set is what binds.
_LIMIT: Final = re.compile(r"^Max (locked memory|address space) +(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Source:
    """Where umad-serve's environment and limits were read.

    ``environment`` has those variables alone that umad asks after; ``limits`` is in bytes, None
    for none, by the names of /proc/PID/limits; ``problem``: why nothing could be read.
    """

    name: str
    environment: Mapping[str, str]
    limits: Mapping[str, int | None]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Fence:
    """A cgroup's limit: its path below /sys/fs/cgroup, "memory.max" or "memory.high", bytes."""

    cgroup: str
    key: str
    bytes: int


@dataclass(frozen=True, slots=True)
class ServeFacts:
    """What the rules below judge.

    ``pids`` are umad-serve's own processes, ``running`` says that its engine is among them;
    ``fenced`` names the cgroup that was looked at, None where cgroup v2 is not mounted.
    """

    pids: frozenset[int]
    running: bool
    source: Source
    fences: tuple[Fence, ...]
    fenced: str | None


def read_serve(root: str) -> ServeFacts:
    """Read them below ``root``; never raises."""
    programs = dict(_programs(root))
    engines = sorted(pid for pid, engine in programs.items() if engine)
    if engines:
        source = _of_process(root, engines[0], f"the engine (pid {engines[0]})")
    else:
        source = _of_unit(root) or _of_process(root, None, "this environment")
    installed = source.name == UNIT
    cgroup = _cgroup(root, engines[0] if engines else None, installed=installed)
    return ServeFacts(
        pids=frozenset(programs),
        running=bool(engines),
        source=source,
        fences=() if cgroup is None else tuple(_fences(root, cgroup)),
        fenced=cgroup,
    )


def _programs(root: str) -> Iterator[tuple[int, bool]]:
    """umad-serve's processes: pid, and whether models live in it."""
    for folder in Path(inside(root, "proc")).glob("[0-9]*"):
        try:
            command = read_file(f"{folder}/cmdline")
        except Unreadable:
            continue
        if folder.name.isdigit() and _PROGRAM.search(command):
            yield int(folder.name), bool(_ENGINE.search(command))


def _of_process(root: str, pid: int | None, name: str) -> Source:
    """A process's environment and limits; None for this one."""
    if pid is None and inside(root, "") != "/":
        return Source(name, {}, {})  # another machine's files: this process is not on it
    folder = f"proc/{'self' if pid is None else pid}"
    try:
        pairs = read_file(inside(root, f"{folder}/environ")).decode("utf-8", "replace").split("\0")
    except Unreadable as error:
        return Source(name, {}, {}, str(error))
    found = {key: value for key, _, value in (pair.partition("=") for pair in pairs)}
    return Source(
        name,
        {key: found[key] for key in _VARIABLES if key in found},
        parse_limits(read_fact(root, f"{folder}/limits").text or ""),
    )


def parse_limits(text: str) -> dict[str, int | None]:
    """The soft limits of /proc/PID/limits that umad asks after, in bytes; None for none."""
    return {name: int(value) if value.isdigit() else None for name, value in _LIMIT.findall(text)}


def _of_unit(root: str) -> Source | None:
    """The unit and its drop-ins, in systemd's order; None where there is no unit."""
    text = ""
    for folder in _UNIT_FOLDERS:  # the last one replaces the others
        unit = read_fact(root, f"{folder}/{UNIT}").text
        text = text if unit is None else unit
    if not text:
        return None
    drop_ins: dict[str, str] = {}
    for folder in _UNIT_FOLDERS:  # one of the same name replaces the earlier
        for path in Path(inside(root, f"{folder}/{UNIT}.d")).glob("*.conf"):
            drop_ins[path.name] = read_fact(root, f"{folder}/{UNIT}.d/{path.name}").text or ""
    return parse_unit("\n".join([text, *(drop_ins[name] for name in sorted(drop_ins))]))


def parse_unit(text: str) -> Source:
    """Environment= and the limits of a unit's text; an empty assignment starts anew."""
    environment: dict[str, str] = {}
    limits: dict[str, int | None] = {}
    for line in text.replace("\\\n", " ").splitlines():
        key, _, value = (part.strip() for part in line.partition("="))
        if key == "Environment" and not value:
            environment.clear()
        elif key == "Environment":
            try:
                words = shlex.split(value)
            except ValueError:  # systemd drops such a line, and says so in the journal
                continue
            environment.update((k, v) for k, _, v in (word.partition("=") for word in words))
        elif key in ("LimitMEMLOCK", "LimitAS"):
            name = "locked memory" if key == "LimitMEMLOCK" else "address space"
            limits[name] = _unit_bytes(value)
    kept = {key: environment[key] for key in _VARIABLES if key in environment}
    return Source(UNIT, kept, limits)


def _unit_bytes(text: str) -> int | None:
    """A limit as systemd reads it, the soft one of a pair; None for infinity."""
    soft = text.partition(":")[0]
    number = soft.rstrip("KMGTPE")
    if not number.isdigit():
        return None
    return int(number) << 10 * ("KMGTPE".find(soft[len(number) :]) + 1 if number != soft else 0)


def _cgroup(root: str, engine: int | None, *, installed: bool) -> str | None:
    """The cgroup that umad-serve is in, or would be; None where cgroup v2 is not mounted."""
    top = Path(inside(root, _CGROUPS))
    if not (top / "cgroup.controllers").exists():
        return None
    if engine is None and installed:
        # It is not running, and this process's own cgroup may be the daemon's unit.
        place = f"/system.slice/{UNIT}"
        return place if (top / place[1:]).is_dir() else "/system.slice"
    if engine is None and inside(root, "") != "/":
        return "/"
    lines = read_fact(root, f"proc/{engine or 'self'}/cgroup").text or ""
    own = [line[3:] for line in lines.splitlines() if line.startswith("0::/")]
    return own[0] if own else "/"


def _fences(root: str, cgroup: str) -> Iterator[Fence]:
    """The limits of a cgroup and of all above it."""
    path = cgroup.rstrip("/")
    while True:
        for key in ("memory.max", "memory.high"):
            size = read_fact(root, f"{_CGROUPS}{path}/{key}").number  # "max" is none
            if size is not None:
                yield Fence(path or "/", key, size)
        if not path:
            return
        path = path.rpartition("/")[0]


# ------------------------------------------------------------------- rules


def judge_serve(facts: ServeFacts, budget: int | None, *, amd_gpu: bool) -> Iterator[Finding]:
    """Every check of umad-serve.

    Args:
        facts: what was read.
        budget: what all workers together may book, bytes; None when memory cannot be read.
        amd_gpu: there is one, so that its runtime's variables and pinned memory matter.
    """
    if facts.source.problem:
        yield Finding(
            "serve.environment",
            "advice",
            f"{facts.source.name} cannot be read",
            "readable",
            f"{facts.source.problem}: its environment and limits were not checked",
            "sudo umadctl doctor",
        )
    else:
        if amd_gpu:
            yield _variable(facts, "serve.sdma", "HSA_ENABLE_SDMA", _SDMA_WHY)
            yield _variable(facts, "serve.xnack", "HSA_XNACK", _XNACK_WHY)
        yield from _limits(facts, budget, amd_gpu=amd_gpu)
    yield from _cgroup_fences(facts, budget)


_SDMA_WHY: Final = (
    "copies by the SDMA engines hang the whole GPU on APUs, and where CPU and GPU share the DRAM "
    "they win nothing"
)
_XNACK_WHY: Final = (
    "page migration moves pages between pools behind the books, and the APUs of RDNA 3 have none"
)


def _variable(facts: ServeFacts, name: str, variable: str, why: str) -> Finding:
    value = facts.source.environment.get(variable)
    if value == "0":
        return Finding(name, "ok", f"{variable}=0 in {facts.source.name}")
    if value is None:
        return Finding(name, "ok", f"{variable} is not set; umad-serve sets it")
    shell = facts.source.name == "this environment"
    return Finding(
        name,
        "hard",
        f"{variable}={value} in {facts.source.name}",
        f"{variable}=0",
        why,
        f"unset {variable}"
        if shell
        else f"systemctl daemon-reload; systemctl restart {UNIT}"
        if facts.running
        else "systemctl daemon-reload",
        None if shell else Keep(UNIT_DROP_IN, f"Environment={variable}=0", "Service"),
    )


def _limits(facts: ServeFacts, budget: int | None, *, amd_gpu: bool) -> Iterator[Finding]:
    source, limits = facts.source, facts.source.limits
    restart = f"systemctl daemon-reload; systemctl restart {UNIT}"
    for name, key, flag, directive, why in (
        (
            "serve.address_space",
            "address space",
            "-v",
            "LimitAS",
            "the guard and GPU runtimes reserve address ranges far beyond memory; under a limit "
            "the guard stays off, and quotas are held by the looks at memory alone",
        ),
        (
            "serve.memlock",
            "locked memory",
            "-l",
            "LimitMEMLOCK",
            "pinned host memory and GPU user pointers are locked pages, as large as the models",
        ),
    ):
        if key not in limits or (key == "locked memory" and not amd_gpu):
            continue
        limit = limits[key]
        enough = limit is None or (key == "locked memory" and budget and limit >= budget)
        shown = "unlimited" if limit is None else format_bytes(limit)
        if enough:
            yield Finding(name, "ok", f"{shown} in {source.name}")
            continue
        in_unit = source.name != "this environment"
        item = "as" if flag == "-v" else "memlock"
        yield Finding(
            name,
            "advice",
            f"{shown} in {source.name}",
            "unlimited",
            why,
            restart if in_unit else f"ulimit {flag} unlimited",
            Keep(UNIT_DROP_IN, f"{directive}=infinity", "Service")
            if in_unit
            else Keep("/etc/security/limits.d/umad.conf", f"* - {item} unlimited"),
        )


def _cgroup_fences(facts: ServeFacts, budget: int | None) -> Iterator[Finding]:
    name = "serve.cgroup"
    if facts.fenced is None:
        yield Finding(
            name,
            "advice",
            "cgroup v2 is not mounted at /sys/fs/cgroup",
            "cgroup v2",
            "umad reads the fences around umad-serve there; a limit of v1 would kill it unseen",
            "update-grub && reboot",
            Keep(
                "/etc/default/grub.d/umad.cfg",
                'GRUB_CMDLINE_LINUX_DEFAULT="$GRUB_CMDLINE_LINUX_DEFAULT '
                'systemd.unified_cgroup_hierarchy=1"',
            ),
        )
        return
    short = [fence for fence in facts.fences if budget is None or fence.bytes < budget]
    if not short:
        room = min((fence.bytes for fence in facts.fences), default=None)
        shown = "no limit" if room is None else f"{format_bytes(room)}, above the budget"
        yield Finding(name, "ok", f"{shown} around {facts.fenced}")
    for fence in sorted(short, key=lambda one: one.bytes):
        yield _fence(name, fence, budget)


def _fence(name: str, fence: Fence, budget: int | None) -> Finding:
    least = "the budget" if budget is None else f"the budget, {format_bytes(budget)}"
    kills = fence.key == "memory.max"
    why = (
        "the kernel kills inside umad-serve"
        if kills
        else "the kernel slows all of umad-serve down and pushes its pages out"
    )
    why += (
        " before the books are full. And no cgroup sees GPU pages (GTT, TTM, CUDA): it is no "
        "quota for models. Or lower memory.budget in " + CONFIG
    )
    unit = fence.cgroup.rpartition("/")[2]
    kind = unit.rpartition(".")[2].capitalize()
    directive = "MemoryMax" if kills else "MemoryHigh"
    systemd = kind in ("Service", "Slice", "Scope")
    return Finding(
        name,
        "hard" if kills else "advice",
        f"{fence.key} of {fence.cgroup} is {format_bytes(fence.bytes)}",
        f"max, or at least {least}",
        why,
        f"systemctl set-property --runtime {unit} {directive}=infinity"
        if systemd
        else f"echo max > /{_CGROUPS}{fence.cgroup.rstrip('/')}/{fence.key}",
        Keep(f"/etc/systemd/system/{unit}.d/umad.conf", f"{directive}=infinity", kind)
        if systemd
        else None,
    )
