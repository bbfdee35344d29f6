"""What is kept of prompts in the middle of a turn is no cost of its answers."""

import pytest

from tests.client.test_meter import guarded

pytestmark = pytest.mark.slow


def test_what_is_kept_or_goes_meanwhile_was_held_before() -> None:
    got = guarded("""
from types import SimpleNamespace
from umad.serve.growth import Growth
class Worker:
    account = 0
    meter = meter
    account_bytes = property(lambda self: process_page.used(0))
worker = Worker()
def turn(): return Growth([], begin(), 0.0)
def took(turn):
    took = turn.took.then(meter.end(turn.start))
    return [took.bytes // MIB, took.exact, took.refused]
model = take(10)

grows = turn()
libc.free(take(8))
with grows.aside(worker): kept = take(5)
libc.free(take(7))
grows = took(grows)

later = turn()
libc.free(take(6))
with later.aside(worker): libc.free(kept)
libc.free(take(9))
later = took(later)

refused = turn()
with refused.aside(worker): take(60)
libc.free(take(4))
refused = took(refused)

off = Growth([], meter.begin(None, coarse=False), 0.0)
with off.aside(SimpleNamespace(account=None, meter=meter, account_bytes=0)): pass
answer(grows=grows, later=later, refused=refused, off=took(off))
""")
    assert got == {
        "grows": [8, True, False],
        "later": [9, True, False],
        "refused": [4, True, False],  # the answers were refused nothing
        "off": [0, False, False],
    }
