"""Memory: is it the machine's own, and what lies behind it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from umad.host.files import Unreadable, inside, read_as
from umad.host.meminfo import parse_meminfo
from umad.host.memory import MachineProbe
from umad.host.preflight.finding import Finding
from umad.host.virtual import Surroundings, read_surroundings, virtual_memory
from umad.units import format_bytes

CONFIG: Final = "/etc/umad/umad.toml"
SETTING: Final = "#conservative = false"
"""The line as etc/umad.toml ships it, for ``sed``; a test holds the two equal."""


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """meminfo in bytes (empty when it cannot be read), and what umad runs in.

    ``faults``: what keeps the probe from reading this machine's memory at all.
    """

    meminfo: Mapping[str, int]
    around: Surroundings
    faults: tuple[str, ...] = ()

    @property
    def total(self) -> int | None:
        """MemTotal in bytes; None when it cannot be read."""
        return self.meminfo.get("MemTotal")


def read_memory(root: str, probe: MachineProbe) -> MemoryFacts:
    """Read them below ``root``, of which ``probe`` is; never raises."""
    around, faults = read_surroundings(root), tuple(probe.check())
    try:
        return MemoryFacts(read_as(inside(root, "proc/meminfo"), parse_meminfo), around, faults)
    except Unreadable:
        return MemoryFacts({}, around, faults)


def judge_memory(
    facts: MemoryFacts, gtt_total: int | None, *, conservative: bool
) -> Iterator[Finding]:
    """Every check of memory.

    Args:
        facts: what was read.
        gtt_total: the GPU's limit on system memory, bytes; None without such a GPU.
        conservative: the setting ``memory.conservative``.
    """
    for fault in facts.faults:
        yield Finding(
            "memory.readable",
            "hard",
            "not known",
            "readable",
            f"{fault}. What cannot be read is neither nothing nor without limit",
            permissible=False,
        )
    why = virtual_memory(facts.around, facts.total, gtt_total)
    yield _virtual(why, facts.total, conservative=conservative)
    if facts.around.container:
        yield Finding(
            "memory.container",
            "advice",
            f"inside a container ({facts.around.container})",
            "on the host",
            "umad sees the processes of its own pid namespace alone, and the host may give the "
            "same memory to others; workers outside cannot register",
        )
    yield _swap(facts)


def _virtual(why: str | None, total: int | None, *, conservative: bool) -> Finding:
    name = "memory.virtual"
    size = "unknown" if total is None else format_bytes(total)
    if why and conservative:
        return Finding(name, "ok", f"conservative mode: half of {size} may be booked")
    if why:
        return Finding(
            name,
            "hard",
            why,
            "the machine's own memory, or conservative mode",
            "what umad promised might not be there. Two ways out: run umad on the host (with "
            "its /proc/meminfo); or switch conservative mode on, which books half of what is "
            "shown and has a load touch its memory first. --permissive does not choose for you",
            f"sed -i 's/^{SETTING}/{SETTING[1:].replace('false', 'true')}/' {CONFIG}",
            permissible=False,
        )
    if conservative:
        return Finding(
            name,
            "advice",
            f"conservative mode, though {size} are the machine's own",
            "conservative mode off",
            "half of the memory stays unused, and every load touches its memory twice",
            f"sed -i 's/^conservative = true/{SETTING}/' {CONFIG}",
        )
    return Finding(name, "ok", f"{size}, the machine's own")


def _swap(facts: MemoryFacts) -> Finding:
    swap = facts.meminfo.get("SwapTotal")
    if swap is None:
        shown = "unknown"
    else:
        shown = f"{format_bytes(swap)}, never counted as free" if swap else "none"
    return Finding("memory.swap", "ok", shown)
