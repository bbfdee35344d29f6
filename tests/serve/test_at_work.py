"""What is at work in an instance's thread: ended from outside, and found where it goes on."""

import queue
import threading
from typing import Any

import pytest

from umad.errors import WorkerRevoked
from umad.serve import at_work
from umad.serve.at_work import AtWork
from umad.serve.jobs import Job, JobQueue

WHY = WorkerRevoked("it broke its quota")


@pytest.fixture
def working(monkeypatch: pytest.MonkeyPatch) -> AtWork:
    monkeypatch.setattr(at_work, "STUCK_AFTER_S", 0.02)
    work = AtWork(JobQueue("llama"))
    work.is_here()
    return work


def job(answers: list[Any]) -> Job:
    return Job("r1", {}, 0.0, lambda result, error: answers.append((result, error)))


def looked(work: AtWork, jobs: list[Job]) -> list[float]:
    """What is found by the look at a turn, once that has been taken."""
    found: queue.SimpleQueue[float] = queue.SimpleQueue()
    before = set(threading.enumerate())
    work.watch(jobs, found.put)
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()
    return [] if found.empty() else [found.get()]


def test_refused_jobs_are_answered_at_once_and_their_turn_goes_on(working: AtWork) -> None:
    answers: list[Any] = []
    working.jobs = turn = [job(answers)]
    assert working.refuse(WHY) is turn
    assert turn[0].cancelled
    [(result, error)] = answers
    assert result is None
    assert error["code"] == WHY.code
    assert working.jobs is turn, "only its thread says that it is over"
    [busy] = looked(working, turn)
    assert busy >= 0


def test_a_thread_that_came_back_is_not_stuck(working: AtWork) -> None:
    working.jobs = turn = [job([])]
    assert working.refuse(WHY) is turn
    working.jobs = [job([])]  # the next turn
    assert looked(working, turn) == []


def test_a_thread_with_nothing_at_work_is_not_stuck(working: AtWork) -> None:
    assert looked(working, working.refuse(WHY)) == []
