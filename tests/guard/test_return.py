"""A closed account's tensor memory is back whatever its thread is doing."""

import pytest

from tests.guard.guarded import TORCH, python

pytestmark = [pytest.mark.slow, pytest.mark.models]
HELD = """
def resident(where):
    total, inside = 0, False
    for line in open("/proc/self/smaps"):
        if "-" in line.split(" ")[0]:
            at = int(line.split(" ")[0].partition("-")[0], 16)
            inside = where.tensor_base <= at < where.tensor_base + where.tensor_bytes
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total
"""
VICTIMS = {
    "a matmul": "while True: torch.mm(square, square, out=out)",
    "a sort": "while True: torch.sort(torch.rand(1 << 21, out=kept[0][: 1 << 21]))",
    "a sleep": "time.sleep(60)",
    "a Python loop": "while True: pass",
    "a bare except": """
while True:
    try: torch.ones(1 << 20)
    except: pass
""",
    "a retry loop": """
while True:
    try: kept.append(torch.ones(1 << 20))
    except RuntimeError: kept[0].add_(1)
""",
}
RUN = """
import os, textwrap
victim = sys.argv[1]
torch.set_num_threads(1)
page.open(0, 2304 * MIB); page.open(1, 256 * MIB)
ready, go = threading.Event(), threading.Event()
def zombie():
    enter(0)
    kept = [torch.ones(64 << 18) for _ in range(32)]
    square, out = torch.ones(1500, 1500), torch.empty(1500, 1500)
    ready.set()
    exec(victim, globals(), locals())
wrong, rounds, stop = [], [0], threading.Event()
def neighbour():
    enter(1)
    x = torch.arange(1 << 18, dtype=torch.float64)
    while not stop.is_set():
        rounds[0] += 1
        if float((x + 1).sum()) != float(1 << 18) * ((1 << 18) + 1) / 2: wrong.append(rounds[0])
for target in (zombie, neighbour): threading.Thread(target=target, daemon=True).start()
ready.wait(60)
before = resident(account_range(0))
start = time.perf_counter()
page.close_account(0)
# One call that holds the interpreter's lock: the thread that gives back must not need it.
if sys.argv[2] == "held": ctypes.PyDLL(None).usleep(90_000)
while page.read(0).state != AccountState.RETURNED and time.perf_counter() - start < 5: pass
took = time.perf_counter() - start
after = resident(account_range(0))
pause = threading.Event(); pause.wait(0.3)
later = resident(account_range(0))
reading = page.read(0)
stop.set()
answer(before=before, took=took, after=after, later=later, wrong=wrong, rounds=rounds[0],
       state=reading.state, held=reading.held, other=page.read(1).refused)
sys.stdout.flush(); os._exit(0)
"""


@pytest.mark.parametrize("held", ["free", "held"])
@pytest.mark.parametrize("victim", VICTIMS)
def test_2_gib_are_back_within_100_ms(victim: str, held: str) -> None:
    got = python(HELD + RUN, VICTIMS[victim], held, prelude=TORCH)
    assert got["before"] > 2 << 30
    assert got["took"] < 0.1 + (0.09 if held == "held" else 0)
    assert got["state"] == 3
    # A victim that still writes brings pages back, and loses them again 5 ms later.
    assert got["after"] < 200 << 20
    assert got["later"] < 200 << 20
    assert got["wrong"] == []
    assert got["rounds"] > 0
    assert got["other"] == 0


def test_the_slot_can_be_used_again() -> None:
    code = """
page.open(0, 256 * MIB)
with account(0): kept = torch.ones(64 << 18)
page.close_account(0)
deadline = time.monotonic() + 5
while page.read(0).state != AccountState.RETURNED and time.monotonic() < deadline: pass
returned = page.read(0).returned
zeros = float(kept.sum())
del kept
freed = page.read(0).used
page.free(0)
page.open(0, 256 * MIB)
with account(0): fresh = torch.ones(64 << 18)
pause = threading.Event(); pause.wait(0.2)
answer(returned=returned // MIB, zeros=zeros, freed=freed, sum=float(fresh.sum()),
       reading=page.read(0).returned)
"""
    got = python(code, prelude=TORCH)
    assert got == {
        "returned": 64,
        "zeros": 0.0,
        "freed": 0,
        "sum": float(64 << 18),
        "reading": 0,
    }
