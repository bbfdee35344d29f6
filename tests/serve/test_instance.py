"""The lives of an instance, without a model: what ends one, and that another follows."""

import threading

import pytest

from umad.errors import UmadError
from umad.serve import instance
from umad.serve.instance import Instance, stopped
from umad.serve.jobs import JobQueue
from umad.serve.link import ModelState
from umad.settings import ModelSettings

MODEL = ModelSettings(name="llama", kind="chat", path="/nowhere", quota=1 << 20)


class Faulty(Instance):
    """Its first life ends with a fault of our own."""

    def __init__(self, told: list[ModelState]) -> None:
        queue = JobQueue(MODEL.name)
        super().__init__(MODEL, 0, queue, lambda _model, _instance, state: told.append(state))
        self.lives = 0
        self.second = threading.Event()

    def stop(self) -> None:
        self._stopping.set()

    def retire(self, why: UmadError) -> None:
        self._stopping.set()

    def _live(self) -> UmadError:
        self.lives += 1
        if self.lives == 1:
            raise ValueError("mmap closed or invalid")
        self.second.set()
        self._stopping.wait(10)
        return stopped()

    def _why_ended(self) -> UmadError:
        return stopped()


def test_a_fault_of_our_own_ends_a_life_and_not_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance, "BACKOFF_FAILED_S", (0.01, 0.01))
    told: list[ModelState] = []
    thread = Faulty(told)
    thread.start()
    try:
        assert thread.second.wait(10), "it lives again"
    finally:
        thread.stop()
        thread.join(10)
    assert not thread.is_alive()
    [failed] = told
    assert failed.state == "failed"
    assert failed.error is not None
    assert failed.error["code"] == "model_failed"
