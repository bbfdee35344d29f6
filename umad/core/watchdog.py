"""From evidence to a stop: breach -> revoke -> SIGKILL -> bytes back.

Owns one case for each process in breach, or for the one worker of it that is to blame.
Decisions, in order, for each case and snapshot:

1. A breach without a case opens one: the workers are revoked, the deadline is set.  A blamed
   worker's account is closed, and the guard takes its tensors away.
2. Who is no longer in breach has complied, or has had its bytes taken: the case ends.
3. At the deadline a fresh sample must still show the breach, and no other kill may be under
   way: SIGKILL.  A reading that is broken is no evidence; the case waits.
4. A killed process is waited for; one that is still there after ``unkillable_after_s`` is
   reported and no longer holds up the next kill.

A second kill waits until the first victim is gone or its grace, which grows with its size, is
over: the first one's bytes may be all that was needed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from umad.core.audit import LEAKING, Breach, Subject
from umad.units import GIB
from umad.values import Identity, Snapshot


@dataclass(slots=True)
class Case:
    """One process in breach.  All times are monotonic seconds; only the Watchdog writes here.

    ``booked``: bytes in the books for the whole process when the case opened.  While it dies they
    shrink with what is seen of it, so that its end alone does not tell what came back.
    """

    breach: Breach
    workers: tuple[str, ...]
    comm: str
    booked: int
    revoked_s: float
    due_s: float
    killed_s: float | None = None
    measured_at_kill: int = 0
    unkillable: bool = False
    looked: bool = False

    @property
    def identity(self) -> Identity:
        """The process."""
        return self.breach.identity

    @property
    def worker(self) -> int | None:
        """The worker that is to blame, None for the process as a whole."""
        return self.breach.worker


@dataclass(frozen=True, slots=True)
class Revoke:
    """Tell the process's workers to stop, now."""

    case: Case


@dataclass(frozen=True, slots=True)
class Complied:
    """Within the limit again: by its own doing, or since the guard took the bytes."""

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

# Given back by word, and still there: by then an honest worker's bytes are long gone.
LEAKING_AFTER_S: Final = 5.0

# Source: the exit of a process with 4 GiB of 4 KiB pages took 129 ms (our measurement on two
# cores); twice that per GiB, on top of a quarter second for the scheduler.
_KILL_GRACE_S = 0.25
_KILL_GRACE_S_PER_GIB = 0.065


class Watchdog:
    """Cases by process."""

    def __init__(self, grace_s: float, return_s: float, unkillable_after_s: float) -> None:
        self.grace_s = grace_s
        self.return_s = return_s
        self.unkillable_after_s = unkillable_after_s
        self._cases: dict[Subject, Case] = {}

    @property
    def cases(self) -> Iterable[Case]:
        """The open ones."""
        return self._cases.values()

    def resume(self, case: Case) -> None:
        """Go on with a case of another time."""
        self._cases[case.breach.key] = case

    def case(self, identity: Identity, worker: int | None = None) -> Case | None:
        """The open case of a process, or of one worker of it."""
        return self._cases.get((identity, worker))

    def open(
        self, breach: Breach, workers: tuple[str, ...], comm: str, booked: int, now_s: float
    ) -> Revoke | None:
        """Rule 1.  None when there is a case already; a worse breach brings its end forward."""
        due_s = breach.taken_s + self.deadline_s(breach)
        case = self._cases.get(breach.key)
        if case is not None:
            if case.killed_s is None and due_s < case.due_s:
                case.breach, case.due_s, case.looked = breach, due_s, False
            return None
        case = Case(breach, workers, comm, booked, now_s, due_s)
        self._cases[breach.key] = case
        return Revoke(case)

    def deadline_s(self, breach: Breach) -> float:
        """Seconds from the sample to SIGKILL.

        The guard gets longer, since the kill hits all; who leaks does no harm but to the budget.
        """
        if breach.reason == LEAKING:
            return LEAKING_AFTER_S
        return self.grace_s if breach.worker is None else self.return_s

    def killing(self, identity: Identity) -> str:
        """Why SIGKILL was sent to this process; nothing if it was not."""
        sent = (case for key, case in self._cases.items() if key[0] == identity)
        return next((case.breach.reason for case in sent if case.killed_s is not None), "")

    def judge(self, found: Sequence[Breach], snapshot: Snapshot, now_s: float) -> list[Verdict]:
        """Rules 2 to 4 for all open cases against one snapshot."""
        verdicts: list[Verdict] = []
        current = {breach.key: breach for breach in found}
        for key, case in list(self._cases.items()):
            if case.killed_s is not None:
                if not case.unkillable and now_s - case.killed_s >= self.unkillable_after_s:
                    case.unkillable = True  # 4
                    verdicts.append(Unkillable(case))
                continue
            reading = snapshot.processes.get(case.identity)
            # A page that can be read is known; of a process the physical bytes must be.
            known = case.worker is not None or (
                reading is not None and reading.bytes.value is not None
            )
            breach = current.get(key)
            if breach is None and known and snapshot.taken_s > case.revoked_s:
                del self._cases[key]  # 2
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
        """The process is gone; all its cases are over.  Returns the one that came furthest."""
        over = [self._cases.pop(key) for key in list(self._cases) if key[0] == identity]
        over.sort(key=lambda case: (case.killed_s is None, case.revoked_s))
        return over[0] if over else None

    def drop(self, identity: Identity, worker: int) -> None:
        """The worker has left: there is nobody to judge any more."""
        self._cases.pop((identity, worker), None)

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
