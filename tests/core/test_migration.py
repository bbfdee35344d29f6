"""Pages that move behind the books are told of once, when they are worth it."""

from dataclasses import asdict, replace
from typing import Any

import pytest

from tests.core.drive import Drive
from tests.core.fakes import MB, engine, identity, snapshot
from umad.core.actions import Event
from umad.values import Moved


@pytest.fixture
def drive() -> Drive:
    drive = Drive(engine())
    drive.loaded(7, "a", 300 * MB)
    look(drive, Moved())
    return drive


def look(drive: Drive, moved: Moved, passed_s: float = 1.0) -> list[dict[str, Any]]:
    """The events of a look at which so much has moved."""
    drive.now_s += passed_s
    seen = snapshot(drive.now_s, {7: 300 * MB})
    reading = replace(seen.processes[identity(7)], moved=moved)
    seen = replace(seen, processes={identity(7): reading})
    actions = drive.engine.observe(seen, drive.now_s)
    events = (action for action in actions if isinstance(action, Event))
    return [dict(event.fields) for event in events if event.name == "migrated"]


@pytest.mark.parametrize("moved", [Moved(20 * MB), Moved(evicted=20 * MB), Moved(evicted_ms=100)])
def test_what_moved_is_told_with_its_figures(drive: Drive, moved: Moved) -> None:
    assert look(drive, moved) == [
        {
            "worker": "a",
            "pid": 7,
            "swapped_bytes": moved.swapped,
            "evicted_bytes": moved.evicted,
            "stood_still_ms": moved.evicted_ms,
        }
    ]
    assert drive.engine.status(drive.now_s)["counters"]["migrations"] == 1
    assert drive.engine.status(drive.now_s)["processes"][0]["moved"] == asdict(moved)
    assert look(drive, moved, 100.0) == [], "once"


def test_a_little_is_the_kernels_housekeeping(drive: Drive) -> None:
    assert look(drive, Moved(15 * MB, 15 * MB, 99)) == []
    assert look(drive, Moved(17 * MB, 15 * MB, 99)), "more of it adds up"


def test_it_is_told_once_a_minute_at_most(drive: Drive) -> None:
    assert look(drive, Moved(20 * MB))
    assert look(drive, Moved(50 * MB), 50.0) == []
    [told] = look(drive, Moved(50 * MB), 11.0)
    assert told["swapped_bytes"] == 50 * MB


def test_what_came_back_may_move_again(drive: Drive) -> None:
    assert look(drive, Moved(20 * MB, 0, 500))
    assert look(drive, Moved(0, 0, 500), 61.0) == []
    assert look(drive, Moved(20 * MB, 0, 500))


def test_a_load_may_move_what_it_likes(drive: Drive) -> None:
    [member] = drive.engine.state.members.values()
    member.state = "loading"
    assert look(drive, Moved(evicted_ms=3000)) == []
    member.state = "ready"
    assert look(drive, Moved(evicted_ms=3050)) == []
    assert look(drive, Moved(evicted_ms=3100))


def test_a_process_that_is_not_there_has_moved_nothing(drive: Drive) -> None:
    drive.look({})
    drive.look(gone=(7,))
    assert drive.engine.state.counters["migrations"] == 0
