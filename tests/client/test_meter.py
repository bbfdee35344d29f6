"""What a forward is said to have taken, with a guard that counts and without one."""

from typing import Any

import pytest

from tests.guard.guarded import CC, python
from umad.client import connect
from umad.client.memory import give_back
from umad.client.meter import Meter, Took
from umad.guard import preload
from umad.units import MIB

GUARDED = """
import os
from umad.client.accounts import process_page
from umad.client.meter import Meter
from umad.guard.account import high, mark
process_page.attach(os.dup(page.fd))
libc = ctypes.PyDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
page.open(0, 64 * MIB)
meter = Meter()
def take(size):
    with account(0):
        return libc.malloc(size * MIB)
def begin(): return meter.begin(0, coarse=False)
def end(start):
    took = meter.end(start)
    return [took.bytes / MIB, took.exact, took.refused]
"""


def guarded(code: str) -> Any:
    if CC is None:
        pytest.skip("there is no C compiler")
    preload.build()
    return python(GUARDED + code)


@pytest.mark.slow
def test_one_that_goes_on_is_measured_anew_against_what_was_held_before_it() -> None:
    got = guarded("""
model = take(10)
start = begin()
kept = take(4); libc.free(take(8))
so_far, start = meter.again(start)
libc.free(take(2))
rest = end(start)
answer(so_far=[so_far.bytes // MIB, so_far.exact], rest=rest)
""")
    assert got == {"so_far": [12, True], "rest": [6, True, False]}


@pytest.mark.slow
def test_a_forward_took_what_was_live_at_its_highest() -> None:
    got = guarded("""
kept = take(10)
first = begin()
libc.free(take(8)); block = take(12); libc.free(block)    # 8 are warm meanwhile
first = end(first)
again = begin()
libc.free(take(8))                                        # from the warm ones
again = end(again)
nothing = end(begin())
answer(first=first, again=again, nothing=nothing, mark=mark(0) // MIB, high=high(0) // MIB,
       ever=page.read(0).peak // MIB)
""")
    assert got == {
        "first": [12, True, False],
        "again": [8, True, False],
        "nothing": [0, True, False],
        "mark": 10,
        "high": 10,
        "ever": 30,
    }


@pytest.mark.slow
def test_forwards_at_the_same_time_and_refused_ones_measure_nothing() -> None:
    got = guarded("""
one = begin(); two = begin()
two, one = end(two), end(one)
one_again = end(begin())
refused = begin()
blocks = [take(40), take(60)]
refused = end(refused)
answer(one=one[1:], two=two[1:], one_again=one_again[1:], refused=refused, blocks=blocks[1:])
""")
    assert got["one"] == got["two"] == [False, False]
    assert got["one_again"] == [True, False]
    assert (got["refused"], got["blocks"]) == ([100, False, True], [None])


def test_without_a_guard_a_figure_is_what_was_seen() -> None:
    meter = Meter()
    give_back()  # pages that earlier tests freed would be used again, unseen
    start = meter.begin(None, coarse=True)
    kept = bytearray(b"\x01") * (32 * MIB)
    took = meter.end(start)
    assert took.bytes > 30 * MIB
    assert not took.exact
    assert kept
    assert meter.end(meter.begin(None, coarse=False)) == Took(0, exact=False)


def test_the_first_forward_of_a_size_shows_nothing_of_the_next() -> None:
    meter = Meter()
    assert [meter.is_first(work) for work in (0, 5, 5, 4, 6, 6)] == [
        False, True, False, False, True, False,
    ]  # fmt: skip
    assert meter.warmed == 6


def test_a_forward_says_whether_it_was_measured(daemon: Any) -> None:
    with (
        connect(daemon.path, timeout_s=2) as client,
        client.worker("llama", quota="1MiB") as worker,
    ):
        for peak in (None, 7, 7):
            with worker.forward(tokens=3, batch=2) as forward:
                forward.peak = peak
        assert forward.exact
        with pytest.raises(ZeroDivisionError), worker.forward(tokens=3) as forward:
            forward.peak = 7 // (worker.id is None)
        assert not forward.exact
        daemon.wait(lambda: len(daemon.of("forward_done")) == 4)
        assert worker.meter.warmed == 6
        worker.load(lambda: (1, 2))
        assert worker.meter.warmed == 0
    told = [(done["peak"], done["exact"]) for done in daemon.of("forward_done")]
    assert told == [(0, False), (7, True), (7, True), (0, False)]


def test_a_refused_forward_took_more_than_predicted_whatever_was_seen_of_it(
    daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        connect(daemon.path, timeout_s=2) as client,
        client.worker("llama", quota="1MiB") as worker,
    ):
        for seen in (3, 99):
            took = Took(seen, exact=False, refused=True)
            monkeypatch.setattr(worker.meter, "end", lambda _, took=took: took)
            with worker.forward(predicted=10) as forward:
                pass
            assert (forward.peak, forward.exact) == (max(seen, 11), False)
