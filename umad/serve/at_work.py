"""What an instance's thread is doing now, for those who may have to end it from another thread.

Owns ``AtWork``: the jobs of the turn that is under way, and whether that turn still goes on some
time after it was to end.  Rules:
1. its thread alone says what is at work; whoever else ends that leaves the list as it is, so the
   same list later is the same turn;
2. nothing ends a thread.  One that does not come back is found by its list, and its CPU time
   tells one that sleeps from one that burns a core.
Stays out: why a turn is to end, and what is done about a thread that is found so.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

from umad.errors import UmadError
from umad.serve.jobs import Job, JobQueue

# A thread that is where it was after this does not come back soon.
STUCK_AFTER_S: Final = 5.0


class AtWork:
    """The turn of one thread.

    Args:
        queue: its model's; jobs that are ended are answered there.

    Attributes:
        jobs: at work; a new list for each turn.  Only its thread writes it.
    """

    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue
        self._thread = 0
        self.jobs: list[Job] = []

    def is_here(self) -> None:
        """The calling thread is the one whose jobs these are."""
        self._thread = threading.get_ident()

    def cancel(self) -> None:
        """Have the jobs end soon; what they answer is theirs."""
        for job in list(self.jobs):
            job.cancelled = True

    def refuse(self, why: UmadError) -> list[Job]:
        """Cancel the jobs and answer them at once; the turn that was ended so, see ``watch``."""
        jobs = self.jobs
        for job in list(jobs):
            job.cancelled = True
            self._queue.answer(job, error=why)
        return jobs

    def watch(self, jobs: list[Job], stuck: Callable[[float], None]) -> None:
        """Look after a while whether an ended turn still goes on.

        Args:
            jobs: what ``refuse`` returned.
            stuck: called then, in a thread of its own, with the CPU time that the thread has
                used meanwhile, as a share of one core.
        """
        before_s = self._cpu_s()

        def look() -> None:
            if jobs and self.jobs is jobs:
                stuck((self._cpu_s() - before_s) / STUCK_AFTER_S)

        timer = threading.Timer(STUCK_AFTER_S, look)
        timer.daemon = True
        timer.start()

    def _cpu_s(self) -> float:
        """CPU time of the thread so far; 0 once it has ended."""
        try:
            return time.clock_gettime(time.pthread_getcpuclockid(self._thread))
        except OSError:
            return 0.0
