import gc
from collections.abc import Callable

import pytest

from umad.client import memory
from umad.config import Settings
from umad.guard import account
from umad.serve import engine


def test_what_is_there_when_it_settles_is_never_walked_over_again() -> None:
    kept = [[number] for number in range(1000)]
    try:
        memory.settle()
        assert gc.get_freeze_count() > 1000
        assert not any(one is kept for one in gc.get_objects())
        cycle: list[object] = []
        cycle.append(cycle)
        del cycle
        assert gc.collect() >= 1, "what came later is collected as ever"
    finally:
        gc.unfreeze()


def test_the_engine_settles_when_its_libraries_are_in(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def note(word: str) -> Callable[..., None]:
        return lambda *_: done.append(word)

    for word in ("bring", "warm", "settle", "share_cores"):
        monkeypatch.setattr(engine, word, note(word))
    engine.bring_all(Settings())
    assert done == ["bring", "warm", "settle", "share_cores"]


def test_shared_is_no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []
    monkeypatch.setattr(account, "enter", lambda slot: entered.append(slot) or 7)
    monkeypatch.setattr(account, "leave", entered.append)
    with memory.shared():
        assert entered == [account.SHARED]
    assert entered == [account.SHARED, 7]
