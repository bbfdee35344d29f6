"""The daemon is killed at random moments, again and again, under five models at work.

A request within its model's quota does not use the daemon: none may fail, ever, and each answer
is the one from before.  One that needs a burst lease uses it as it begins, and may be told to come
again then; once it has its lease, it goes on as if nothing had happened.
``UMAD_DAEMON_KILLS`` says how often it is killed, ``UMAD_KILL_SEED`` repeats a run.
"""

import os
import random
import threading
import time
from pathlib import Path

import pytest

from tests.daemon.running import eventually
from tests.demo import ask
from tests.integration.plain_stack import QUOTA_MIB, RUNTIME_MIB, PlainStack, plain_stack
from umad.daemon.up import RESTART_AFTER_S
from umad.errors import DaemonUnavailable
from umad.units import MIB

NAMES = ("alpha", "beta", "gamma", "delta", "epsilon")
BOOKS = {**dict.fromkeys(NAMES, QUOTA_MIB), "runtime": RUNTIME_MIB}
BURSTING = ("alpha", "beta")
WITHIN, BEYOND = "4", "96 2.5"  # MiB, and the seconds between their halves
BURST_MIB_MAX = 64  # one takes some 45 beyond the quota; two of them would be more
# What somebody is told who needs the daemon while there is none, or one that has just started.
AWAY = {"arbiter_unavailable", "arbiter_lost", "recovering"}


def books(running: PlainStack) -> dict[str, int]:
    """What each worker has booked, in MiB; empty where no daemon answers, or they disagree."""
    try:
        state = running.daemon.status()
    except (DaemonUnavailable, OSError):
        return {}
    booked = {worker["name"]: worker["booked"] for worker in state["workers"]}
    (pool,) = state["pools"]
    if len(booked) != state["workers_total"] or pool["booked"] != sum(booked.values()):
        return {}
    assert pool["booked"] <= pool["budget"]
    return {name: size // MIB for name, size in booked.items()}


def right(running: PlainStack) -> bool:
    """Everybody's quota once, and on top what the forwards at work have booked."""
    booked = books(running)
    return booked.keys() == BOOKS.keys() and all(
        0 <= booked[name] - quota <= (BURST_MIB_MAX if name in BURSTING else 0)
        for name, quota in BOOKS.items()
    )


class Asker(threading.Thread):
    """Asks one model for the same again and again; keeps what it should not have got."""

    def __init__(self, address: str, model: str, size: str) -> None:
        super().__init__(name=f"{model} {size}", daemon=True)
        self._ask = lambda: ask.chat(address, model, size)
        self._needs_daemon = size == BEYOND
        self._ended = threading.Event()
        self.answered = self.away = 0
        self.slowest_s = 0.0
        self.wrong: list[str] = []
        self._expected = self._text(self._ask())
        assert self._expected

    def run(self) -> None:
        while not self._ended.is_set():
            began_s = time.monotonic()
            answer = self._ask()
            self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
            if self._text(answer) == self._expected:
                self.answered += 1
            elif self._needs_daemon and self._told_to_come_again(answer):
                self.away += 1
                self._ended.wait(0.05)
            else:
                self.wrong.append(f"{self.name}: {ask.gist(answer)}")

    def end(self) -> None:
        self._ended.set()
        self.join(60)

    def _text(self, answer: ask.Answer) -> str:
        return str(answer.body["choices"][0]["message"]["content"]) if answer.status == 200 else ""

    def _told_to_come_again(self, answer: ask.Answer) -> bool:
        code = answer.body.get("error", {}).get("code")
        return answer.status == 503 and code in AWAY and answer.retry_after is not None


def wrong(askers: list[Asker]) -> list[str]:
    return [text for asker in askers for text in asker.wrong]


def all_have_gone_on(askers: list[Asker]) -> None:
    """However slow the machine: no kills without a load."""
    before = {asker: asker.answered for asker in askers}
    eventually(lambda: all(one.answered > n or one.wrong for one, n in before.items()), 60)


@pytest.mark.slow
@pytest.mark.models
@pytest.mark.timeout(3600)
def test_no_request_is_lost_that_did_not_use_the_daemon(folder: Path) -> None:
    count = int(os.environ.get("UMAD_DAEMON_KILLS", 5))
    seed = int(os.environ.get("UMAD_KILL_SEED", random.randrange(1 << 16)))
    print(f"seed {seed}")
    chance = random.Random(seed)
    pause = threading.Event()
    took: list[tuple[float, float]] = []
    again = 0
    with plain_stack(folder, NAMES, budget_mib=RUNTIME_MIB + 512) as running:
        daemon, address = running.daemon, running.address
        eventually(lambda: books(running) == BOOKS, within_s=30)
        engine = daemon.status()["workers"][0]["pid"]
        askers = [Asker(address, name, WITHIN) for name in NAMES]
        askers += [Asker(address, name, BEYOND) for name in BURSTING]
        for asker in askers:
            asker.start()
        try:
            for number in range(count):
                if number % 2:
                    pause.wait(chance.uniform(0, 1.5))
                else:  # in the middle of a forward that has its lease, and needs it to the end
                    eventually(lambda: any(books(running)[name] > QUOTA_MIB for name in BURSTING))
                began_s = time.monotonic()
                daemon.kill()
                pause.wait(RESTART_AFTER_S)
                while chance.random() < 0.2:  # and once more, while it comes back
                    daemon.spawn()
                    pause.wait(chance.uniform(0, 1.5))
                    daemon.kill()
                    again += 1
                daemon.start()
                started_s = time.monotonic()
                eventually(lambda: right(running), within_s=2.0)
                now_s = time.monotonic()
                took.append((now_s - started_s, now_s - began_s))
                if number % 4 == 3:
                    all_have_gone_on(askers)
                assert wrong(askers) == []
            all_have_gone_on(askers)
        finally:
            for asker in askers:
                asker.end()
        print(
            f"{count} kills and {again} while it came back; books right after its start within "
            f"{max(one for one, _ in took):.2f} s, after the kill {max(two for _, two in took):.2f}"
        )
        for asker in askers:
            print(f"{asker.name}: {asker.answered} answered, the slowest after "
                  f"{asker.slowest_s:.2f} s, {asker.away} told to come again")  # fmt: skip
        assert wrong(askers) == []
        # Of the bursts nothing is left, nobody was stopped, and it is the same engine.
        eventually(lambda: books(running) == BOOKS, within_s=10)
        assert {worker["pid"] for worker in daemon.status()["workers"]} == {engine}
        bad = {"breach", "revoked", "stopped", "leaking"}
        assert [line for line in daemon.log if line["event"] in bad] == []
