"""Who goes for whom: the choice alone."""

import pytest

from umad.core.eviction import Candidate, Plan, plan

NOW_S = 100.0


def idle(worker: int, size: int, idle_s: float = 10.0, **more: float) -> Candidate:
    return Candidate(
        worker,
        idle_s,
        more.get("load_s", 1.0),
        int(more.get("priority", 0)),
        {"system": size},
        more.get("from_s", 0.0),
    )


def chosen(candidates: list[Candidate], lacks: int) -> tuple[int, ...] | None:
    found = plan(candidates, {"system": lacks}, NOW_S)
    return None if found is None else found.victims


@pytest.mark.parametrize(
    ("candidates", "lacks", "goes"),
    [
        ([idle(1, 5, idle_s=1), idle(2, 5, idle_s=9)], 5, (2,)),  # idle for longer
        ([idle(1, 5, load_s=60), idle(2, 5, load_s=2)], 5, (2,)),  # quicker to load again
        ([idle(1, 5, priority=10), idle(2, 5)], 5, (2,)),  # of less weight
        ([idle(1, 5, load_s=2.0, priority=-10), idle(2, 5)], 5, (1,)),  # ten steps: half of it
        ([idle(1, 5), idle(2, 5)], 5, (1,)),  # alike: the older one
        ([idle(1, 5, load_s=0.0), idle(2, 5, load_s=0.09)], 5, (1,)),  # nothing costs nothing
        ([idle(1, 5), idle(2, 5, idle_s=8)], 6, (1, 2)),  # as many as are needed
        ([idle(1, 1), idle(2, 9, idle_s=8)], 9, (2,)),  # and none beside them
        ([idle(1, 5), idle(2, 5)], 11, None),  # in vain: nobody goes
        ([idle(1, 5)], 0, ()),
        ([], 1, None),
    ],
)
def test_the_cheapest_go_and_no_more_than_are_needed(candidates, lacks, goes):
    assert chosen(candidates, lacks) == goes


def test_what_gives_nothing_of_the_pool_that_is_short_stays():
    other = Candidate(1, 99.0, 1.0, 0, {"vram": 5}, 0.0)
    assert plan([other, idle(2, 5)], {"system": 5}, NOW_S) == Plan((2,), NOW_S)
    both = Candidate(3, 1.0, 1.0, 0, {"gtt": 5, "system": 5}, 0.0)
    assert plan([other, both], {"gtt": 5, "system": 5}, NOW_S) == Plan((3,), NOW_S)


def test_the_moment_is_said_from_which_enough_may_go():
    young = [idle(1, 5, from_s=130.0), idle(2, 5, from_s=110.0), idle(3, 5, from_s=120.0)]
    assert plan(young, {"system": 5}, NOW_S) == Plan((2,), 110.0)
    assert plan(young, {"system": 10}, NOW_S) == Plan((2, 3), 120.0)
    assert plan([*young, idle(4, 1)], {"system": 16}, NOW_S) == Plan((1, 2, 3, 4), 130.0)
