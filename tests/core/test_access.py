from dataclasses import replace

import pytest

from tests.core.fakes import peer
from umad.core.access import METHODS, Access, Permission
from umad.core.requests import HANDLERS

ACCESS = Access(uid=990, worker_gid=50, admin_gid=60)


@pytest.mark.parametrize(
    ("uid", "gid", "groups", "expected"),
    [
        (0, 0, (), Permission.ADMIN),
        (990, 990, (), Permission.ADMIN),
        (1000, 1000, (60,), Permission.ADMIN),
        (1000, 1000, (50,), Permission.WORKER),
        (1000, 50, (), Permission.WORKER),
        (1000, 1000, (51,), Permission.READ),
    ],
)
def test_permission(uid: int, gid: int, groups: tuple[int, ...], expected: Permission) -> None:
    someone = replace(peer(5), uid=uid, gid=gid, groups=frozenset(groups))
    assert ACCESS.of(someone) is expected


def test_without_groups_only_root_and_the_daemon_may_more() -> None:
    nobody = Access(uid=990, worker_gid=None, admin_gid=None)
    assert nobody.of(replace(peer(5), uid=1000, gid=50)) is Permission.READ


def test_every_method_has_a_permission() -> None:
    # These are the shell's: a connection and a text are no decisions.
    assert HANDLERS.keys() | {"hello", "metrics", "snapshot", "timeline"} == METHODS.keys()
