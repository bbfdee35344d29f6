"""The device-init mutex: one worker at a time goes from snapshot over load to ready.

Owns the holder, its fencing token, its deadline and the line of waiters.  It is bound to a
connection: when that ends, the mutex passes on.  A late word of a former holder is fenced off
by its token.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has the mutex: a worker, its token, and until when (monotonic seconds)."""

    worker: int
    token: int
    deadline_s: float


class InitMutex:
    """At most one holder.  Tokens rise with every grant and never come back."""

    def __init__(self, holder: Holder | None = None, token: int = 0) -> None:
        self._holder = holder
        self._token = token

    @property
    def holder(self) -> Holder | None:
        """Who has it, or None."""
        return self._holder

    @property
    def token(self) -> int:
        """The last one that was given."""
        return self._token

    def take(self, worker: int, deadline_s: float) -> Holder | None:
        """Give it to a worker; None when somebody has it."""
        if self._holder is not None:
            return None
        self._token += 1
        self._holder = Holder(worker, self._token, deadline_s)
        return self._holder

    def give_back(self, worker: int, token: int) -> bool:
        """End the hold; False for anyone but the present holder (fenced)."""
        if self._holder is None or (self._holder.worker, self._holder.token) != (worker, token):
            return False
        self._holder = None
        return True

    def take_away(self, worker: int) -> bool:
        """End the hold of a worker that is gone; False if it had none."""
        if self._holder is None or self._holder.worker != worker:
            return False
        self._holder = None
        return True
