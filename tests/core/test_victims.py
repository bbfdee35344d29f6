"""Field case C35: who is stopped when memory is short, and above all who is not."""

from typing import Any

from tests.core.drive import Drive
from tests.core.fakes import MB, engine, identity
from umad.core.actions import Action, Event, Kill, Watch
from umad.core.audit import unattributed
from umad.units import GIB
from umad.values import SYSTEM_POOL

SETTINGS = '[memory]\nreserve = "1GiB"\nbudget = "10GiB"\n'


def of(actions: list[Action], kind: type) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def until_calm(drive: Drive, looks: int, **processes: Any) -> list[Action]:
    """What is done in so many looks at the same, 50 ms apart."""
    done: list[Action] = []
    for _ in range(looks):
        drive.now_s += 0.05
        done += drive.look({7: processes["first"], 8: processes["second"]}, safe=processes["safe"])
    return done


def two() -> Drive:
    """Workers of 2 and 4 GiB in processes 7 and 8; a hog of 9 GiB is nobody's worker."""
    drive = Drive(engine(SETTINGS))
    drive.loaded(7, "first", 2 * GIB)
    drive.loaded(8, "second", 4 * GIB)
    return drive


def test_c35_only_who_is_over_its_own_quota_is_stopped() -> None:
    drive = two()
    done = until_calm(drive, 20, first=3 * GIB + 100 * MB, second=GIB, safe=2 * GIB)
    assert {kill.identity for kill in of(done, Kill)} == {identity(7)}


def test_c35_a_program_that_is_no_worker_is_nobodys_victim() -> None:
    drive = two()
    done = until_calm(drive, 20, first=GIB, second=GIB, safe=100 * MB)
    assert of(done, Kill) == []
    assert {watch.identity for watch in of(done, Watch)} == set()  # it is not even looked at
    state = drive.engine.state
    assert state.relief.closed_s is not None
    assert state.snapshot is not None
    hog = unattributed(state.snapshot.pools[SYSTEM_POOL], state.snapshot)
    assert hog == 16 * GIB - 100 * MB - 2 * GIB
    # The alarm goes on for as long as it lasts, and the daemon with it.
    assert drive.call(7, "status")["closed"] is True


def test_c35_of_two_over_their_quotas_who_is_most_over_goes_first() -> None:
    drive = two()
    done = until_calm(drive, 1, first=2 * GIB + 900 * MB, second=4 * GIB + 500 * MB, safe=2 * GIB)
    revoked = [one.fields["worker"] for one in of(done, Event) if one.name == "revoked"]
    assert revoked == ["first", "second"]
