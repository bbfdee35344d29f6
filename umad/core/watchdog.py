"""From evidence to a stop: breach -> revoke -> SIGKILL -> bytes back.

Owns one case for each process in breach.  Decisions, in order, for each case and snapshot:

1. A breach without a case opens one: the workers are revoked, the deadline is set.
2. A revoked process that is no longer in breach has complied: the case ends.
3. At the deadline a fresh sample must still show the breach, and no other kill may be under
   way: SIGKILL.  A reading that is broken is no evidence; the case waits.
4. A killed process is waited for; one that is still there after ``unkillable_after_s`` is
   reported and no longer holds up the next kill.

A second kill waits until the first victim is gone or its grace, which grows with its size, is
over: the first one's bytes may be all that was needed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from umad.core.audit import Breach
from umad.units import GIB
from umad.values import Identity, Snapshot


@dataclass(slots=True)
class Case:
    """One process in breach.  All times are monotonic seconds; only the Watchdog writes here."""

    breach: Breach
    workers: tuple[str, ...]
    comm: str
    revoked_s: float
    due_s: float
    killed_s: float | None = None
    measured_at_kill: int = 0
    unkillable: bool = False
    looked: bool = False

    @property
    def identity(self) -> Identity:
        """Whose case it is."""
        return self.breach.identity


@dataclass(frozen=True, slots=True)
class Revoke:
    """Tell the process's workers to stop, now."""

    case: Case


@dataclass(frozen=True, slots=True)
class Complied:
    """The process is within its limit again; it is not killed."""

    case: Case


@dataclass(frozen=True, slots=True)
class KillNow:
    """SIGKILL it."""

    case: Case


@dataclass(frozen=True, slots=True)
class Unkillable:
    """It is still there long after SIGKILL (state D); its bytes stay booked."""

    case: Case


Verdict = Revoke | Complied | KillNow | Unkillable

# Source: the exit of a process with 4 GiB of 4 KiB pages took 129 ms (our measurement on two
# cores); twice that per GiB, on top of a quarter second for the scheduler.
_KILL_GRACE_S = 0.25
_KILL_GRACE_S_PER_GIB = 0.065


class Watchdog:
    """Cases by process."""

    def __init__(self, grace_s: float, unkillable_after_s: float) -> None:
        self.grace_s = grace_s
        self.unkillable_after_s = unkillable_after_s
        self._cases: dict[Identity, Case] = {}

    @property
    def cases(self) -> Iterable[Case]:
        """The open ones."""
        return self._cases.values()

    def case(self, identity: Identity) -> Case | None:
        """The open case of a process."""
        return self._cases.get(identity)

    def open(
        self, breach: Breach, workers: tuple[str, ...], comm: str, now_s: float
    ) -> Revoke | None:
        """Rule 1.  None when the process has a case already."""
        if breach.identity in self._cases:
            return None
        case = Case(breach, workers, comm, now_s, breach.taken_s + self.grace_s)
        self._cases[breach.identity] = case
        return Revoke(case)

    def judge(self, found: Sequence[Breach], snapshot: Snapshot, now_s: float) -> list[Verdict]:
        """Rules 2 to 4 for all open cases against one snapshot."""
        verdicts: list[Verdict] = []
        current = {breach.identity: breach for breach in found}
        for case in list(self._cases.values()):
            if case.killed_s is not None:
                if not case.unkillable and now_s - case.killed_s >= self.unkillable_after_s:
                    case.unkillable = True  # 4
                    verdicts.append(Unkillable(case))
                continue
            reading = snapshot.processes.get(case.identity)
            known = reading is not None and reading.bytes.value is not None
            breach = current.get(case.identity)
            if breach is None and known and snapshot.taken_s > case.revoked_s:
                del self._cases[case.identity]  # 2
                verdicts.append(Complied(case))
            elif now_s >= case.due_s:
                case.looked = True
                fresh = snapshot.taken_s >= min(case.due_s, now_s - 0.01)
                if breach is not None and fresh and not self._kill_under_way(now_s):
                    case.killed_s = now_s  # 3
                    case.measured_at_kill = breach.measured
                    verdicts.append(KillNow(case))
        return verdicts

    def close(self, identity: Identity) -> Case | None:
        """The process is gone; returns its case, which is over."""
        return self._cases.pop(identity, None)

    def next_look_s(self) -> float | None:
        """When a fresh sample is needed for a decision."""
        due = (
            case.due_s for case in self._cases.values() if case.killed_s is None and not case.looked
        )
        return min(due, default=None)

    def _kill_under_way(self, now_s: float) -> bool:
        for case in self._cases.values():
            if case.killed_s is None or case.unkillable:
                continue
            grace = _KILL_GRACE_S + _KILL_GRACE_S_PER_GIB * case.measured_at_kill / GIB
            if now_s - case.killed_s < grace:
                return True
        return False
