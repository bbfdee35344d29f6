"""A machine that has settled a little below its reserve, or a little above it, is no dead end.

The steps themselves, from closing to eviction, are in test_switching.py.
"""

import pytest

from tests.core.drive import Drive
from tests.core.fakes import MB, engine
from umad.core.pressure import EVICT_AFTER_S, OPEN_AFTER_S
from umad.errors import QuotaDenied

CONFIG = """
[memory]
reserve = "1GiB"
budget = "8GiB"
[leases]
residence_min = "2s"
rival_rest = "60s"
"""


@pytest.fixture
def drive() -> Drive:
    """One idle model, and a machine that has just fallen below its reserve."""
    made = Drive(engine(CONFIG))
    made.loaded(1, "idle", 2000 * MB, evict=True)
    made.now_s += 5.0
    look(made, 1000)
    assert made.events() == ["admission_closed"]
    return made


def look(drive: Drive, free: int | None, after_s: float = 0.0) -> None:
    drive.now_s += after_s
    drive.look({1: 2000 * MB}, safe=None if free is None else free * MB)


def waits(drive: Drive, pid: int, size: int, wait_s: float = 300.0) -> int:
    """A model of that size asks for room; its request."""
    drive.connect(pid)
    worker = drive.call(pid, "register", model=f"m{pid}", quota=size * MB)["worker"]
    return drive.ask(pid, "reserve", worker=worker, wait_s=wait_s)


def asked(drive: Drive) -> list[int]:
    return [one.connection for one in drive.notified("evict")]


# ------------------------------------------------------- a little above the reserve


def test_where_the_reserve_stays_free_admission_opens_again(drive):
    drive.connect(9)
    drive.call(9, "pin", name="idle", pin=True)  # nobody can go for it
    look(drive, 1100, 0.2)
    request = waits(drive, 2, 50)  # there is room for it: 1100 less the reserve
    look(drive, 1100, OPEN_AFTER_S - 0.1)
    assert (drive.events(), drive.answer(request)) == ([], None)
    look(drive, 1100, 0.1)
    assert drive.events() == ["admission_opened"]
    assert drive.answer(request)["bytes"] == 50 * MB
    # It has no more to give than it has.
    assert isinstance(drive.answer(waits(drive, 3, 100, wait_s=0.0)), QuotaDenied)


@pytest.mark.parametrize("between", [1000, None])
def test_it_has_to_stay_free_all_the_time(drive, between):
    """One moment below it, or one that nobody could see, and the time begins anew."""
    look(drive, 1100, 0.2)
    for _ in range(5):
        look(drive, 1100, OPEN_AFTER_S - 0.2)
        look(drive, between, 0.1)
        look(drive, 1100, 0.1)
        assert drive.events() == []
    assert drive.engine.status(drive.now_s)["closed"]
    look(drive, 1100, OPEN_AFTER_S)
    assert drive.events() == ["admission_opened"]


def test_it_opens_and_closes_no_more_often_than_that(drive):
    """Free memory goes up and down around the reserve, as it likes to do."""
    told: dict[str, list[float]] = {"admission_opened": [], "admission_closed": []}
    for number in range(600):
        look(drive, 1023 if number % 150 == 149 else 1030, 0.2)  # for 30 s, and one look
        for name in drive.events():
            told[name].append(drive.now_s)
    opened, closed = told["admission_opened"], told["admission_closed"]
    assert len(opened) == len(closed) == 4
    assert all(
        after - before >= OPEN_AFTER_S
        for before, after in zip(closed[:-1], opened[1:], strict=True)
    )


# ------------------------------------------------------- a little below the reserve


def test_below_it_nobody_goes_without_need(drive):
    """Nobody waits, or it would not fit even then."""
    look(drive, 900, 20.0)  # shrunk
    look(drive, 900, EVICT_AFTER_S)
    assert asked(drive) == []
    waits(drive, 2, 4000)
    look(drive, 900, 0.2)
    assert asked(drive) == []
    waits(drive, 3, 1500)
    assert asked(drive) == [1]
