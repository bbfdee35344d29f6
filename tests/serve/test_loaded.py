"""A model in memory and what its forwards are booked with."""

from types import SimpleNamespace
from typing import Any

import pytest

from umad.core.cost import Sample
from umad.errors import QuotaDenied
from umad.serve.loaded import HUGE_PAGES_BYTES, Loaded, Work
from umad.units import MIB


class Full:
    """A worker in a machine without room for a burst."""

    account = None
    stray_bytes = 0
    meter = SimpleNamespace(warmed=1000)

    def forward(self, size: int, **_: Any) -> "Full":
        assert size > 0, "it is within its quota"
        return self

    peak = None

    def __enter__(self) -> None:
        raise QuotaDenied("no room")

    def __exit__(self, *_: object) -> None: ...


def test_what_is_refused_again_and_again_is_asked_for_with_less() -> None:
    place: Any = SimpleNamespace()
    loaded = Loaded("talk/0", SimpleNamespace(resident_bytes=0), place)  # type: ignore[arg-type]
    for at in range(20):
        loaded.observe(Sample(10 + at, 1, MIB, MIB))
    loaded.observe(Sample(10, 1, 9 * MIB, MIB))  # once, for whatever reason
    worker: Any = Full()
    work = Work(10, 1, 2 * MIB, list)
    asked = [loaded.predict(worker, 10, 1, work.worst_case)]
    for _ in range(150):
        with pytest.raises(QuotaDenied):
            loaded.run(worker, work, 0, 0.0, lambda: None)
        asked.append(loaded.predict(worker, 10, 1, work.worst_case))
    assert asked == sorted(asked, reverse=True)
    assert asked[0] > 8 * MIB
    assert asked[-1] < 3 * MIB


def test_stray_bytes_of_its_process_are_no_room() -> None:
    place: Any = SimpleNamespace()
    loaded = Loaded("talk/0", SimpleNamespace(resident_bytes=5 * MIB), place)  # type: ignore[arg-type]
    worker: Any = SimpleNamespace(account=0, account_bytes=20 * MIB, stray_bytes=3 * MIB)
    assert loaded.room(worker, 64 * MIB) == (64 - 20 - 3) * MIB - HUGE_PAGES_BYTES
    worker.stray_bytes = 60 * MIB  # it is looked at now and then
    assert loaded.room(worker, 64 * MIB) == (64 - 20 - 3) * MIB - HUGE_PAGES_BYTES
    assert loaded.held(worker, kept=2 * MIB) == 18 * MIB + HUGE_PAGES_BYTES
