"""The queue of a model: every job is answered exactly once, in order."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from umad.errors import ModelLoading, UmadError, WorkerRevoked
from umad.serve.jobs import Job, JobQueue, Seat


class Asked:
    """Makes jobs and keeps their answers."""

    def __init__(self) -> None:
        self.answers: list[tuple[str, str]] = []

    def job(self, request: str, deadline_s: float = 0.0) -> Job:
        def reply(result: Any, error: Any) -> None:
            self.answers.append((request, "ok" if error is None else error["code"]))

        return Job(request, {}, deadline_s, reply)


@pytest.fixture
def asked() -> Asked:
    return Asked()


def ended() -> ModelLoading:
    return ModelLoading("stopping")


@contextmanager
def seated(queue: JobQueue, why_left: Callable[[], UmadError]) -> Iterator[None]:
    seat = Seat(queue, why_left)
    try:
        yield
    finally:
        seat.leave()
        seat.leave()  # once is enough, and more does nothing


class Rests(threading.Thread):
    """An instance without its model; ``needed`` once it was."""

    def __init__(self, queue: JobQueue, timeout_s: float | None = None) -> None:
        super().__init__(daemon=True)
        self._queue = queue
        self._timeout_s = timeout_s
        self.ended = threading.Event()
        self.needed: bool | None = None
        self.start()
        while not queue._resting:
            threading.Event().wait(0.001)

    def run(self) -> None:
        self.needed = self._queue.rest(self.ended.is_set, self._timeout_s)

    def end(self) -> bool | None:
        self.ended.set()
        self._queue.wake()
        self.join(5)
        return self.needed


def test_without_an_instance_a_job_is_refused_at_once(asked):
    queue = JobQueue("m")
    queue.put(asked.job("a"))
    assert asked.answers == [("a", "model_loading")]


def test_jobs_come_in_order_and_leave_when_cancelled_or_late(asked):
    queue = JobQueue("m")
    with seated(queue, ended):
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
    with seated(queue, ended):
        with seated(queue, ended):
            queue.put(asked.job("a"))
        assert asked.answers == []
        job = queue.take(lambda: False)
        assert job is not None
        queue.put(asked.job("b"))
        queue.answer(job, result={})
    assert asked.answers == [("a", "ok"), ("b", "model_loading")]


def test_why_it_ended_is_asked_at_the_end(asked):
    queue = JobQueue("m")
    with seated(queue, lambda: WorkerRevoked("over")):
        queue.put(asked.job("a"))
    assert asked.answers == [("a", "worker_revoked")]


def test_wake_ends_a_wait(asked):
    queue = JobQueue("m")
    stop = threading.Event()
    taken: list[Job | None] = []
    with seated(queue, ended):
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
    with seated(queue, ended):
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


def test_one_of_those_that_rest_loads_for_many_jobs(asked):
    queue = JobQueue("m")
    with seated(queue, ended), seated(queue, ended):
        first, second = Rests(queue), Rests(queue)
        for request in "abc":
            queue.put(asked.job(request))
        while first.needed is None and second.needed is None:
            threading.Event().wait(0.005)
        loading, resting = (first, second) if first.needed else (second, first)
        loading.join(5)
        assert (loading.needed, resting.needed) == (True, None)
        # It has its model, and is at work: now the other is needed for those that still wait.
        job = queue.take(lambda: False)
        assert job is not None
        resting.join(5)
        assert resting.needed is True
        for request in "bc":
            queue.cancel(request)
        queue.answer(job, result={})


def test_who_rests_can_be_woken_and_may_wait_for_a_while_only(asked):
    queue = JobQueue("m")
    with seated(queue, ended):
        assert Rests(queue).end() is False
        assert queue.rest(lambda: False, 0.01) is False
        queue.put(asked.job("a"))
        assert queue.rest(lambda: False) is True
    assert asked.answers == [("a", "model_loading")]


def test_without_a_job_for_some_time_a_take_gives_up(asked):
    queue = JobQueue("m")
    with seated(queue, ended):
        assert queue.take(lambda: False, 0.01) is None
        queue.put(asked.job("a"))
        job = queue.take(lambda: False, 0.01)
        assert job is not None
        queue.answer(job, result={})


def test_who_waits_for_a_load_in_vain_hears_that(asked):
    queue = JobQueue("m")
    with seated(queue, ended):
        queue.not_yet = lambda: ModelLoading("still reading")
        queue.put(asked.job("a"))
        queue.expire("a")
        queue.not_yet = None
        queue.put(asked.job("b"))
        queue.expire("b")
    assert asked.answers == [("a", "model_loading"), ("b", "waited_too_long")]


def test_a_job_that_comes_back_is_the_next_one_again(asked):
    queue = JobQueue("m")
    with seated(queue, ended):
        for request in "ab":
            queue.put(asked.job(request, time.monotonic() + 60))
        job = queue.take(lambda: False)
        assert job is not None
        assert 59 < queue.patience_s < 60
        queue.put_back(job)
        again = queue.take(lambda: False)
        assert again is job
        job.cancelled = True
        queue.put_back(job)
        late = queue.take(lambda: False)
        assert late is not None
        late.deadline_s = time.monotonic()
        queue.put_back(late)
        assert queue.patience_s == 0
    assert asked.answers == [("a", "waited_too_long"), ("b", "waited_too_long")]


def test_an_arrival_is_told_while_somebody_wants_to_know(asked):
    queue = JobQueue("m")
    told: list[bool] = []
    with seated(queue, ended):
        queue.on_arrival = lambda: told.append(queue.waits)
        queue.put(asked.job("a"))
        queue.on_arrival = None
        queue.put(asked.job("b"))
    assert told == [True]


def test_some_of_those_that_wait_are_taken_and_who_has_left_is_not(asked):
    queue = JobQueue("m")
    with seated(queue, ended):
        for request in "abcd":
            queue.put(asked.job(request, time.monotonic() + 60))
        assert [job.request for job in queue.first(3)] == ["a", "b", "c"]
        queue.cancel("b")
        taken = queue.claim(["c", "b", "a"], full=True)
        assert [job.request for job in taken] == ["c", "a"]
        assert [job.request for job in queue.first(9)] == ["d"]
        assert queue.arrivals == 4
        for job in taken:
            queue.answer(job, result={})
        late = asked.job("late", time.monotonic())
        queue.put(late)
        queue.drop_late()
        assert [job.request for job in queue.first(9)] == ["d"]
    assert [request for request, _ in asked.answers] == ["b", "c", "a", "late", "d"]
    assert asked.answers[3] == ("late", "waited_too_long")


def test_one_that_would_take_more_is_enough_for_those_that_wait(asked):
    queue = JobQueue("m")
    with seated(queue, ended), seated(queue, ended):
        resting = Rests(queue)
        for request in "abc":
            queue.put(asked.job(request))
        (first,) = queue.claim(["a"], full=False)
        queue.wake()
        resting.join(0.1)
        assert resting.needed is None
        (second,) = queue.claim(["b"], full=True)  # now it takes no more
        resting.join(5)
        assert resting.needed is True
        for job in (first, second):
            queue.answer(job, result={})
