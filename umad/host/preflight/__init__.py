"""Is this machine set up for umad: everything is read first, then judged, and mended by people.

``read`` gathers the facts below a root folder, ``judge`` is a pure function of them; the rules of
each group lie beside its facts in the modules here.  Nothing is ever changed.
The daemon runs this itself before it grants anything (``umad --preflight`` runs it alone), not an
ExecStartPre=: that would cost a second interpreter at every restart, and the exit status would
escape RestartPreventExitStatus=.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from umad.host.memory import MachineProbe, reserve_default
from umad.host.preflight.finding import Finding, describe, remedy
from umad.host.preflight.gpu import GpuFacts, judge_gpu, read_gpu
from umad.host.preflight.holders import HolderFacts, judge_holders, read_holders
from umad.host.preflight.kernel import KernelFacts, judge_kernel, read_kernel
from umad.host.preflight.memory import MemoryFacts, judge_memory, read_memory
from umad.host.preflight.serve import ServeFacts, judge_serve, read_serve
from umad.settings import MemorySettings

__all__ = [
    "ALL",
    "PERMISSIBLE",
    "Facts",
    "Finding",
    "describe",
    "forgiven",
    "judge",
    "read",
    "remedy",
]

ALL: Final = "all"
"""What ``--permissive`` says without names."""

PERMISSIBLE: Final = (
    "vm.swappiness",
    "vm.vfs_cache_pressure",
    "kernel.version",
    "gpu.limits",
    "gpu.frozen",
    "serve.sdma",
    "serve.xnack",
    "serve.cgroup",
)
"""The hard checks that ``--permissive`` forgives by name.

Not among them: memory that cannot be read (``memory.readable``) or is not the machine's own
(``memory.virtual``), since nobody could say what umad then promises.
"""


@dataclass(frozen=True, slots=True)
class Facts:
    """All that was read; ``gpu`` is None without an AMD GPU."""

    kernel: KernelFacts
    memory: MemoryFacts
    gpu: GpuFacts | None
    holders: HolderFacts
    serve: ServeFacts


def read(root: str = "/", gpu: str = "auto", ours: Collection[int] = ()) -> Facts:
    """Gather the facts below ``root``; never raises.

    Args:
        root: the folder that holds ``proc/`` and ``sys/``.
        gpu: a PCI address, ``"auto"`` for the first, ``"none"``.
        ours: processes that hold GPU memory by umad's leave, beside umad-serve's.
    """
    serve, probe = read_serve(root), MachineProbe(root, gpu)
    try:
        return Facts(
            kernel=read_kernel(root),
            memory=read_memory(root, probe),
            gpu=read_gpu(root, gpu),
            holders=read_holders(root, probe, serve.pids | frozenset(ours)),
            serve=serve,
        )
    finally:
        probe.close()


def judge(facts: Facts, settings: MemorySettings) -> list[Finding]:
    """Every check's finding, those that are ok included, in a stated order."""
    gpu, total = facts.gpu, facts.memory.total
    gtt_total = None if gpu is None else gpu.gtt_total
    return [
        *judge_kernel(facts.kernel),
        *judge_memory(facts.memory, gtt_total, conservative=settings.conservative),
        *judge_holders(facts.holders),
        *judge_gpu(gpu, total),
        *judge_serve(facts.serve, _budget(total, settings), amd_gpu=gpu is not None),
    ]


def _budget(total: int | None, settings: MemorySettings) -> int | None:
    """What all workers together may book, as ``core.grants`` sets it."""
    if total is None:
        return None
    nominal = total // 2 if settings.conservative else total
    reserve = reserve_default(nominal) if settings.reserve is None else settings.reserve
    budget = max(0, nominal - reserve)
    return budget if settings.budget is None else min(budget, settings.budget)


def forgiven(findings: Iterable[Finding], permissive: Collection[str]) -> list[Finding]:
    """Those hard findings in spite of which umad was told to start, by name or by ``ALL``."""
    return [
        finding
        for finding in findings
        if finding.severity == "hard"
        and finding.permissible
        and (ALL in permissive or finding.name in permissive)
    ]
