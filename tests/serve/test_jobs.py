"""The queue of a model: every job is answered exactly once, in order."""

import threading
from typing import Any

import pytest

from umad.errors import ModelLoading, WorkerRevoked
from umad.serve.jobs import Job, JobQueue


class Asked:
    """Makes jobs and keeps their answers."""

    def __init__(self) -> None:
        self.answers: list[tuple[str, str]] = []

    def job(self, request: str) -> Job:
        def reply(result: Any, error: Any) -> None:
            self.answers.append((request, "ok" if error is None else error["code"]))

        return Job(request, {}, 0.0, reply)


@pytest.fixture
def asked() -> Asked:
    return Asked()


def ended() -> ModelLoading:
    return ModelLoading("stopping")


def test_without_an_instance_a_job_is_refused_at_once(asked):
    queue = JobQueue("m")
    queue.put(asked.job("a"))
    assert asked.answers == [("a", "model_loading")]


def test_jobs_come_in_order_and_leave_when_cancelled_or_late(asked):
    queue = JobQueue("m")
    with queue.served(ended):
        for request in "abcd":
            queue.put(asked.job(request))
        queue.cancel("b")
        queue.expire("c")
        first, second = queue.take(lambda: False), queue.take(lambda: False)
        assert first is not None
        assert second is not None
        assert (first.request, second.request) == ("a", "d")
        queue.cancel("a")  # at work: told, not dropped
        queue.expire("a")  # has begun in time
        queue.cancel("nobody")
        assert first.cancelled
        queue.answer(first, result={})
        queue.answer(first, error=ended())
        queue.answer(second, result={})
        queue.cancel("a")
    assert asked.answers == [
        ("b", "waited_too_long"),
        ("c", "waited_too_long"),
        ("a", "ok"),
        ("d", "ok"),
    ]


def test_only_the_last_instance_answers_what_still_waits(asked):
    queue = JobQueue("m")
    with queue.served(ended):
        with queue.served(ended):
            queue.put(asked.job("a"))
        assert asked.answers == []
        job = queue.take(lambda: False)
        assert job is not None
        queue.put(asked.job("b"))
        queue.answer(job, result={})
    assert asked.answers == [("a", "ok"), ("b", "model_loading")]


def test_why_it_ended_is_asked_at_the_end(asked):
    queue = JobQueue("m")
    with queue.served(lambda: WorkerRevoked("over")):
        queue.put(asked.job("a"))
    assert asked.answers == [("a", "worker_revoked")]


def test_wake_ends_a_wait(asked):
    queue = JobQueue("m")
    stop = threading.Event()
    taken: list[Job | None] = []
    with queue.served(ended):
        thread = threading.Thread(target=lambda: taken.append(queue.take(stop.is_set)))
        thread.start()
        stop.set()
        queue.wake()
        thread.join(5)
    assert taken == [None]


def test_many_threads_answer_each_job_once(asked):
    queue = JobQueue("m")
    stop = threading.Event()

    def work() -> None:
        while (job := queue.take(stop.is_set)) is not None:
            queue.answer(job, result={})

    threads = [threading.Thread(target=work) for _ in range(4)]
    with queue.served(ended):
        for thread in threads:
            thread.start()
        for number in range(500):
            queue.put(asked.job(str(number)))
            if number % 3 == 0:
                queue.cancel(str(number))
        while len(asked.answers) < 500:
            threading.Event().wait(0.005)
        stop.set()
        queue.wake()
        for thread in threads:
            thread.join(5)
    assert sorted(request for request, _ in asked.answers) == sorted(map(str, range(500)))
