"""isolation = "process": a model that can be killed alone, under the real daemon."""

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.daemon.running import eventually
from tests.demo import ask
from tests.integration.stack import Asker, Stack
from umad.units import GIB, MIB

pytestmark = [pytest.mark.slow, pytest.mark.models, pytest.mark.timeout(240)]

# In whichever process gets the signal: takes memory, a little within its quota, or far too much.
# By mmap: what a worker allocates in the usual ways the guard refuses before umad can see it.
HOARD = """
import mmap, signal
kept = []
def hoard(size):
    kept.append(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    kept[-1][::4096] = bytes(size // 4096)
signal.signal(signal.SIGUSR1, lambda *_: hoard(3 << 30))
signal.signal(signal.SIGUSR2, lambda *_: hoard(64 << 20))
"""


@contextmanager
def isolated(
    folder: Path, quotas: Mapping[str, str], processes: Mapping[str, int], more: str = ""
) -> Iterator[Stack]:
    """Everything running; ``processes`` says which models have processes, and how many."""
    made = Stack(folder, dict(quotas), more)
    text = made.config.read_text()
    for name, instances in processes.items():
        own = f'name = "{name}"\nisolation = "process"\ninstances = {instances}\n'
        text = text.replace(f'name = "{name}"\n', own)
    made.config.write_text(text)
    (folder / "inject").mkdir()
    (folder / "inject/sitecustomize.py").write_text(HOARD)
    try:
        yield made.start(PYTHONPATH=str(folder / "inject"))
    except BaseException:
        print("\n".join((folder / "log").read_text(errors="replace").splitlines()[-60:]))
        raise
    finally:
        made.stop()


def workers(running: Stack) -> dict[str, dict[str, Any]]:
    return {worker["name"]: worker for worker in running.status()["workers"]}


def process_of(running: Stack, pid: int) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in running.status()["processes"] if one["pid"] == pid)
    return found


def gone(*pids: int) -> bool:
    return not any(
        psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        for pid in pids
    )


def test_a_greedy_process_is_killed_alone_and_comes_back(folder: Path) -> None:
    with isolated(folder, {"llama": "160MiB", "qwen": "128MiB"}, {"llama": 1}) as running:
        running.wait_ready()
        engine, front, zygote = (
            running.pid("engine"),
            running.pid("front"),
            workers(running)["zygote"]["pid"],
        )
        child = workers(running)["llama"]["pid"]
        assert len({engine, front, zygote, child}) == 4
        neighbour = Asker(running, "qwen")
        neighbour.start()
        # What it shares with the zygote is not billed to it: all of its quota is its own.
        shown = process_of(running, child)
        assert shown["baseline"] > 150 * MIB
        assert shown["limit"] == shown["baseline"] + 160 * MIB
        os.kill(child, signal.SIGUSR2)
        eventually(lambda: process_of(running, child)["bytes"] > shown["bytes"] + 60 * MIB)
        assert ask.chat(running.address, "llama", "hello").status == 200
        shown = process_of(running, child)
        assert shown["verdict"] == "ok"
        assert shown["bytes"] > 160 * MIB + 100 * MIB
        # Now it takes what is nobody's.
        os.kill(child, signal.SIGUSR1)
        stopped = running.logged("stopped", pid=child)
        assert (stopped["worker"], stopped["fence"]) == ("llama", "sigkill")
        assert stopped["seen_to_kill_s"] <= 0.1
        refused = ask.chat(running.address, "llama", "hello")
        assert (refused.status, refused.retry_after is not None) == (503, True)
        eventually(lambda: workers(running).get("llama", {}).get("state") == "ready", 30)
        running.wait_ready(10)
        assert ask.chat(running.address, "llama", "hello").status == 200
        answered = neighbour.answered
        eventually(lambda: neighbour.answered > answered + 3, within_s=10)
        neighbour.end()
        assert (neighbour.wrong, neighbour.away) == ([], 0)
        assert running.pid("engine") == engine
        assert running.pid("front") == front
        assert workers(running)["llama"]["pid"] not in (child, engine, zygote)


def test_five_kinds_as_processes_need_no_torch_in_the_engine(folder: Path) -> None:
    quotas = dict.fromkeys(ask.FIVE, "256MiB") | {"sdxl": "384MiB"}
    processes = dict.fromkeys(ask.FIVE, 1) | {"llama": 2}
    with isolated(folder, quotas, processes) as running:
        running.wait_ready()
        eventually(lambda: workers(running).get("llama/1", {}).get("state") == "ready", 30)
        for name, asked in ask.FIVE.items():
            answer = asked(running.address, name)
            assert answer.status == 200, ask.gist(answer)
        engine = running.pid("engine")
        assert engine is not None
        assert "libtorch" not in Path(f"/proc/{engine}/maps").read_text()
        found = workers(running)
        assert set(found) == {*ask.FIVE, "llama/1", "zygote"}
        # R6: one inference thread, the link's, the client's, the guard's where it is preloaded;
        # no team of torch's beside them.
        threads = {name: psutil.Process(found[name]["pid"]).num_threads() for name in ask.FIVE}
        assert max(threads.values()) <= 4, threads
        assert psutil.Process(found["zygote"]["pid"]).num_threads() == 1
        # What each holds for itself is small beside what it shares.
        own = psutil.Process(found["llama"]["pid"]).memory_full_info()
        assert own.uss < own.rss / 3


def test_nothing_is_left_when_the_engine_is_killed(folder: Path) -> None:
    """C20: neither the zygote nor a child outlives it, and all come back."""
    with isolated(folder, {"llama": "128MiB", "qwen": "128MiB"}, {"llama": 2}) as running:
        running.wait_ready()
        eventually(lambda: workers(running).get("llama/1", {}).get("state") == "ready", 30)
        before = {worker["pid"] for worker in workers(running).values()}
        assert len(before) == 4
        running.kill("engine")
        eventually(lambda: gone(*before), within_s=2)
        running.wait_ready()
        eventually(lambda: workers(running).get("llama/1", {}).get("state") == "ready", 30)
        after = workers(running)
        assert not before & {worker["pid"] for worker in after.values()}
        assert set(after) == {"runtime", "zygote", "llama", "llama/1", "qwen"}
        assert running.status()["pools"][0]["booked"] == 2 * GIB + 3 * 128 * MIB


def test_processes_go_on_while_the_daemon_is_away(folder: Path) -> None:
    with isolated(folder, {"llama": "128MiB"}, {"llama": 1}) as running:
        running.wait_ready()
        before = workers(running)
        baselines = {
            name: process_of(running, one["pid"])["baseline"] for name, one in before.items()
        }
        asker = Asker(running, "llama")
        asker.start()
        running.kill("daemon")

        def back() -> bool:
            now = workers(running)
            return {name: one["pid"] for name, one in now.items()} == {
                name: one["pid"] for name, one in before.items()
            }

        eventually(back, within_s=10)
        for name, one in workers(running).items():
            assert one["booked"] == before[name]["booked"]
            assert process_of(running, one["pid"])["baseline"] == baselines[name]
        threading.Event().wait(0.3)
        asker.end()
        assert (asker.wrong, asker.away) == ([], 0)
        assert asker.answered > 0
