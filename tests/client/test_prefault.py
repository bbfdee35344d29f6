"""Memory that is touched before a load."""

import mmap

import pytest

from umad.client import prefault as module
from umad.client.memory import process_bytes
from umad.client.prefault import prefault
from umad.errors import QuotaDenied
from umad.units import MIB

SIZE = 128 * MIB


class Watch:
    """What this process held at each step."""

    def __init__(self) -> None:
        self.held = [process_bytes()]

    def __call__(self) -> None:
        self.held.append(process_bytes())

    @property
    def grown(self) -> int:
        return max(self.held) - self.held[0]


@pytest.mark.parametrize("advice", [23, 9999])
def test_it_is_all_held_at_once_and_then_given_up(
    advice: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a kernel that does not know the call, where pages are touched one by one."""
    monkeypatch.setattr(module, "_POPULATE_WRITE", advice)
    watch = Watch()
    touched = prefault(SIZE, watch)
    assert touched == SIZE - 16 * MIB
    # The last look is one step before the end.
    assert touched - 5 * MIB <= watch.grown <= touched + 4 * MIB
    assert process_bytes() <= watch.held[0] + 4 * MIB


def test_it_leaves_the_process_a_margin() -> None:
    assert prefault(16 * MIB, lambda: None) == 0
    assert prefault(17 * MIB + 5, lambda: None) == MIB // mmap.PAGESIZE * mmap.PAGESIZE


def test_a_revoke_ends_it() -> None:
    steps = iter(range(3))
    with pytest.raises(StopIteration):
        prefault(SIZE, lambda: next(steps) and None)
    assert next(steps, None) is None


def test_memory_that_is_not_there() -> None:
    with pytest.raises(QuotaDenied, match="cannot back them") as refused:
        prefault(1 << 60, lambda: None)
    assert refused.value.details == {"asked_bytes": 1 << 60}
