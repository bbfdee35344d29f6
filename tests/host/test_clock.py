import time

from umad.host.clock import MonotonicClock


def test_the_clock_is_the_monotonic_one():
    before = time.monotonic()
    assert before <= MonotonicClock().now_s() <= time.monotonic()
