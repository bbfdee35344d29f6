"""The main job: models under one contract, and what happens when one of the programs dies."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.daemon.running import ROOT, eventually
from tests.demo import ask
from tests.integration.stack import Asker, Stack, stack
from umad.units import MIB

pytestmark = [pytest.mark.slow, pytest.mark.models]

# In the engine, and only on a signal: takes memory that nobody booked.
HOARD = """
import signal, sys
def hoard(*_):
    global kept
    kept = bytearray(b"\\x01") * (3 << 30)
signal.signal(signal.SIGUSR1, hoard)
"""


@pytest.mark.timeout(300)
def test_five_models_answer_while_a_sixth_worker_is_killed(folder: Path) -> None:
    quotas = dict.fromkeys(ask.FIVE, "256MiB") | {"sdxl": "384MiB"}
    with stack(folder, quotas) as running:
        running.wait_ready()
        failed: list[str] = []
        ended = threading.Event()

        def keep_asking(name: str) -> None:
            while not ended.is_set():
                answer = ask.FIVE[name](running.address, name)
                if answer.status != 200:
                    failed.append(f"{name}: {ask.gist(answer)}")

        threads = [threading.Thread(target=keep_asking, args=(name,)) for name in ask.FIVE]
        for thread in threads:
            thread.start()
        greedy = subprocess.run(
            [sys.executable, "-m", "tests.demo.greedy", running.socket, "128MiB", "2GiB"],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            timeout=60,
        )
        ended.set()
        for thread in threads:
            thread.join()
        assert greedy.returncode == -signal.SIGKILL
        stopped = running.logged("stopped", worker="greedy")
        assert stopped["seen_to_kill_s"] <= 0.1
        assert failed == []
        state = running.status()
        assert {worker["name"] for worker in state["workers"]} == {*ask.FIVE, "runtime"}
        assert all(worker["state"] == "ready" for worker in state["workers"])


@pytest.mark.timeout(300)
def test_an_engine_over_the_sum_of_its_books_is_killed_and_comes_back(folder: Path) -> None:
    (folder / "inject").mkdir()
    (folder / "inject/sitecustomize.py").write_text(HOARD)
    with stack(folder, {"llama": "128MiB"}, PYTHONPATH=str(folder / "inject")) as running:
        running.wait_ready()
        asker = Asker(running, "llama")
        asker.start()
        engine = running.pid("engine")
        front = running.pid("front")
        assert engine is not None
        os.kill(engine, signal.SIGUSR1)
        stopped = running.logged("stopped", pid=engine)
        assert stopped["fence"] == "sigkill"
        assert stopped["seen_to_kill_s"] <= 0.1
        assert stopped["worker"] == "llama,runtime"
        eventually(lambda: running.pid("engine") not in (None, engine), within_s=15)
        running.wait_ready()
        answered = asker.answered
        eventually(lambda: asker.answered > answered + 3 or asker.wrong, within_s=30)
        asker.end()
        assert asker.wrong == []
        assert asker.away > 0
        assert running.pid("front") == front
        # Since it is ready again nothing was refused any more.
        assert ask.chat(running.address, "llama", "hello").status == 200


def books_are_right(running: Stack, worker_pids: set[int]) -> bool:
    """The daemon's books hold exactly the workers of live processes, and their bytes."""
    state = running.status()
    pids = {worker["pid"] for worker in state["workers"]}
    if any(not psutil.pid_exists(pid) for pid in pids):
        return False
    if not worker_pids <= pids:
        return False
    booked = sum(worker["booked"] for worker in state["workers"])
    return bool(state["pools"] and state["pools"][0]["booked"] == booked)


KEEPER = """
import sys, threading
from umad.client import connect
class Model: pass
worker = connect(sys.argv[1]).worker("keeper", quota="64MiB")
model = worker.load(Model)
print("ready", flush=True)
threading.Event().wait()
"""


class Keeper:
    """A worker process outside umad-serve."""

    def __init__(self, running: Stack) -> None:
        self._command = [sys.executable, "-c", KEEPER, str(running.socket)]
        self.process = self._spawn()

    def _spawn(self) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(self._command, cwd=ROOT, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    def replace(self) -> None:
        self.end()
        self.process = self._spawn()

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.mark.timeout(560)
def test_fifty_kills_at_random_moments(folder: Path) -> None:
    seed = int(os.environ.get("UMAD_KILL_SEED", random.randrange(1 << 16)))
    print(f"seed {seed} (UMAD_KILL_SEED repeats it)")
    chance = random.Random(seed)
    pause = threading.Event()
    with stack(folder, {"llama": "128MiB"}) as running:
        running.wait_ready()
        keeper = Keeper(running)
        asker = Asker(running, "llama")
        asker.start()
        try:
            for number in range(50):
                pause.wait(chance.uniform(0, 1.0))
                victim = chance.choice(["daemon", "daemon", "front", "engine", "worker"])
                if victim == "worker":
                    killed = keeper.process.pid
                    keeper.replace()
                else:
                    killed = running.kill(victim)
                before_s = time.monotonic()
                eventually(lambda: books_are_right(running, {keeper.process.pid}), within_s=2.0)
                print(
                    f"{number}: {victim} {killed}, right after {time.monotonic() - before_s:.2f} s"
                )
                if number % 10 == 9:  # however slow the machine: no kills without a load
                    answered = asker.answered
                    eventually(lambda n=answered: asker.answered > n + 10, within_s=60)
            running.wait_ready()
            answered = asker.answered
            eventually(lambda: asker.answered > answered + 3, within_s=30)
        finally:
            asker.end()
            keeper.end()
        assert asker.wrong == []
        assert asker.answered > 50
        assert books_are_right(running, set())
        state = running.status()
        assert {worker["name"] for worker in state["workers"]} == {"llama", "runtime"}
        assert state["pools"][0]["booked"] == (1024 + 128) * MIB
