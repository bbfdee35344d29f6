"""Models in processes of their own: a real engine, zygote and children, scripted models."""

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.client.conftest import Daemon
from tests.serve.processes import EngineProcess, engine_process, write_config
from tests.serve.standin import run, until
from umad.config import parse
from umad.errors import (
    ConfigError,
    ModelFailed,
    QuotaDenied,
    QuotaExceeded,
    UmadError,
    WorkerLost,
)

pytestmark = pytest.mark.slow
PROCESS = {"isolation": "process"}
MIXED: dict[str, dict[str, Any]] = {"alone": PROCESS, "among": {}}


@pytest.fixture
def daemon(tmp_path: Path):
    daemon = Daemon(tmp_path / "umad.sock").start()
    yield daemon
    daemon.stop()


async def back(engine: EngineProcess, model: str) -> None:
    """Wait until it has been told of as lost, and is ready again."""
    await until(lambda: engine.state(model) != "ready")
    await engine.ready(model)


async def pid_of(engine: EngineProcess, model: str) -> int:
    return int((await engine.run(model, prompt="who"))["pid"])


def threads_of(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def comm_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def sockets_of(pid: int) -> set[str]:
    links = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    return {link for link in links if link.startswith("socket:")}


async def ended(*pids: int) -> None:
    def gone(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    await until(lambda: all(map(gone, pids)))


def test_threads_and_processes_side_by_side(tmp_path, daemon):
    async def scenario():
        async with engine_process(write_config(tmp_path, MIXED)) as engine:
            await engine.ready(*MIXED)
            workers = [params["model"] for params in daemon.of("register")]
            assert sorted(workers[:2]) == ["runtime", "zygote"]
            assert sorted(workers[2:]) == sorted(MIXED)
            alone, among = await pid_of(engine, "alone"), await pid_of(engine, "among")
            assert among == engine.process.pid
            assert alone not in (among, engine.logged("zygote.start")[0]["pid"])
            # Its own connection, in its first thread, with its own quota and its own reports.
            registered = next(one for one in daemon.of("register") if one["model"] == "alone")
            assert (registered["thread"], registered["quota"]) == (alone, 2000)
            assert engine.link.status("alone")["resident"] == 1000
            await until(lambda: len(daemon.of("forward_done")) == 2)
            packed = await engine.run("alone", texts=["a"])
            assert packed["vectors"] == [b"\0\0\0\x3f\0\0\x80\x3f"]
            # The zygote has one thread, the child none but those it needs.
            zygote = engine.logged("zygote.start")[0]["pid"]
            assert threads_of(zygote) == 1
            assert comm_of(alone) == "umad alone/0"
            assert threads_of(alone) <= 4  # the model's, the link's, the client's, the guard's
            # Of the zygote's descriptors it has kept none: neither its link nor its books.
            assert not sockets_of(alone) & sockets_of(zygote)
            assert not sockets_of(alone) & sockets_of(among)

    run(scenario())


def test_the_books_must_have_room_for_both_holders_of_the_libraries(tmp_path):
    config = write_config(tmp_path, {"alone": {**PROCESS, "quota": "1GiB"}, "among": {}})
    text = config.read_text() + '[memory]\nbudget = "4GiB"\n'
    with pytest.raises(ConfigError, match=r'can never fit: .*twice: isolation = "process"'):
        parse(text)  # twice serve.runtime_quota and the model's own
    parse(text.replace('isolation = "process"', 'isolation = "thread"'))


def test_with_processes_alone_the_engine_is_no_worker(tmp_path, daemon):
    async def scenario():
        async with engine_process(write_config(tmp_path, {"one": PROCESS})) as engine:
            await engine.ready("one")
            assert [params["model"] for params in daemon.of("register")] == ["zygote", "one"]

    run(scenario())


def test_a_thousand_round_trips_each_its_own_answer(tmp_path, daemon):
    async def scenario():
        config = write_config(tmp_path, {"one": {**PROCESS, "instances": 2}})
        async with engine_process(config) as engine:
            await until(
                lambda: (
                    [one["state"] for one in engine.link.status("one")["instances"]]
                    == ["ready", "ready"]
                )
            )
            pids = set()
            room = asyncio.Semaphore(50)

            async def ask(number: int) -> None:
                async with room:
                    answer = await engine.run("one", prompt=f"number {number}")
                assert answer["text"] == f"number {number}"
                pids.add(answer["pid"])

            await asyncio.gather(*(ask(number) for number in range(1000)))
            assert len(pids) == 2

    run(scenario())


def test_large_jobs_and_answers_cross(tmp_path, daemon):
    async def scenario():
        async with engine_process(write_config(tmp_path, {"one": PROCESS})) as engine:
            await engine.ready("one")
            for size in (1, 3 << 20, 20 << 20):
                image = os.urandom(size)
                assert (await engine.run("one", image=image))["images"] == [image]

    run(scenario())


def test_refusals_of_the_model_cross_with_their_kind(tmp_path, daemon):
    async def scenario():
        async with engine_process(write_config(tmp_path, {"one": PROCESS})) as engine:
            await engine.ready("one")
            with pytest.raises(QuotaExceeded):
                await engine.run("one", prompt="memory")
            with pytest.raises(ModelFailed, match="ValueError"):
                await engine.run("one", prompt="raise")
            assert not any("secret" in line for line in engine.log)

    run(scenario())


def test_cancellation_reaches_the_child(tmp_path, daemon):
    async def scenario():
        async with engine_process(write_config(tmp_path, {"one": PROCESS})) as engine:
            await engine.ready("one")
            first = asyncio.ensure_future(engine.run("one", prompt="wait"))
            await until(lambda: (tmp_path / "one" / "waiting").exists())
            queued = [asyncio.ensure_future(engine.run("one", prompt="q")) for _ in range(5)]
            await asyncio.sleep(0)
            for task in (*queued[:4], first):  # else one begins as the first one ends
                task.cancel()
            assert (await queued[4])["text"] == "q"
            await until(lambda: len(daemon.of("forward_done")) == 2)

    run(scenario())


def test_a_child_that_dies_takes_its_own_job_only(tmp_path, daemon):
    async def scenario():
        models = {"alone": {**PROCESS, "priority": 2}, "other": PROCESS, "among": {}}
        async with engine_process(write_config(tmp_path, models)) as engine:
            await engine.ready(*models)
            before, other = await pid_of(engine, "alone"), await pid_of(engine, "other")
            neighbours = {
                name: asyncio.ensure_future(engine.run(name, prompt="wait"))
                for name in ("other", "among")
            }
            for name in neighbours:
                await until(lambda name=name: (tmp_path / name / "waiting").exists())
            dying = asyncio.ensure_future(engine.run("alone", prompt="die"))
            behind = asyncio.ensure_future(engine.run("alone", prompt="next"))
            for task in (dying, behind):
                with pytest.raises(WorkerLost) as caught:
                    await task
                assert caught.value.retry_after_s == 5
            await until(lambda: engine.state("alone") == "failed")
            assert engine.link.status("alone")["retry_after_s"] == 5
            with pytest.raises(UmadError) as refused:
                engine.link.check("alone")
            assert refused.value.http_status == 503

            def reaped() -> list[int]:
                told = engine.logged("zygote.reaped")
                return [one["status"] for one in told if one["pid"] == before]

            await until(lambda: bool(reaped()))
            assert reaped() == [-9]
            for name, task in neighbours.items():
                (tmp_path / name / "release").touch()
                assert (await task)["text"] == "wait"
            await engine.ready("alone")
            assert await pid_of(engine, "alone") not in (before, other)
            assert await pid_of(engine, "other") == other
            assert engine.process.returncode is None
            with pytest.raises(WorkerLost) as again:
                await engine.run("alone", prompt="die")
            assert again.value.retry_after_s == 10

    run(scenario())


def test_a_device_fault_ends_the_child_after_the_answer(tmp_path, daemon):
    async def scenario():
        async with engine_process(write_config(tmp_path, {"one": PROCESS})) as engine:
            await engine.ready("one")
            before = await pid_of(engine, "one")
            with pytest.raises(ModelFailed, match="device"):
                await engine.run("one", prompt="device")
            await ended(before)
            await back(engine, "one")
            assert await pid_of(engine, "one") != before

    run(scenario())


def test_children_outlive_the_zygote_and_the_next_fork_starts_another(tmp_path, daemon):
    async def scenario():
        async with engine_process(write_config(tmp_path, {"one": PROCESS})) as engine:
            await engine.ready("one")
            before = await pid_of(engine, "one")
            zygote = engine.logged("zygote.start")[0]["pid"]
            os.kill(zygote, signal.SIGKILL)
            await ended(zygote)
            assert await pid_of(engine, "one") == before
            with pytest.raises(WorkerLost):
                await engine.run("one", prompt="die")
            await back(engine, "one")
            assert await pid_of(engine, "one") != before
            assert len(engine.logged("zygote.start")) == 2
            # The first child's parent was gone, and the lifeline is not.
            child = await pid_of(engine, "one")
            os.kill(engine.logged("zygote.start")[1]["pid"], signal.SIGKILL)
            engine.process.kill()
            await ended(child)

    run(scenario())


@pytest.mark.parametrize("stuck", [False, True])
def test_nothing_is_left_of_a_killed_engine(tmp_path, daemon, stuck):
    async def scenario():
        config = write_config(tmp_path, {"one": {**PROCESS, "instances": 2}, "two": PROCESS})
        async with engine_process(config) as engine:
            await engine.ready("one", "two")
            await until(lambda: len(engine.logged("model.forked")) == 3)
            pids = [line["pid"] for line in engine.logged("model.forked")]
            pids.append(engine.logged("zygote.start")[0]["pid"])
            if stuck:  # no thread of theirs can do anything about it
                for pid in pids:
                    os.kill(pid, signal.SIGSTOP)
            engine.process.kill()
            await ended(*pids)

    run(scenario())


@pytest.mark.parametrize("how", ["stop", "signal"])
def test_it_stops_in_order_with_work_in_flight(tmp_path, daemon, how):
    async def scenario():
        async with engine_process(write_config(tmp_path, {"one": PROCESS})) as engine:
            await engine.ready("one")
            first = asyncio.ensure_future(engine.run("one", prompt="wait"))
            await until(lambda: (tmp_path / "one" / "waiting").exists())
            if how == "stop":
                await engine.link.stop(5)
            else:
                engine.process.terminate()
            with pytest.raises(UmadError):
                await first
            assert await engine.process.wait() == 0
            assert [params["worker"] for params in daemon.of("unregister")] != []
            assert daemon.leaked == 0

    run(scenario())


def test_a_child_that_hears_nothing_ends_with_the_engine(tmp_path, daemon):
    async def scenario():
        async with engine_process(write_config(tmp_path, {"one": PROCESS})) as engine:
            await engine.ready("one")
            child = await pid_of(engine, "one")
            os.kill(child, signal.SIGSTOP)
            await engine.link.stop(10)
            assert await engine.process.wait() == 0
            await ended(child)

    run(scenario())


def test_a_zygote_with_two_threads_refuses_to_fork(tmp_path, daemon, monkeypatch):
    monkeypatch.setenv("UMAD_TEST_THREAD", "1")

    async def scenario():
        async with engine_process(write_config(tmp_path, {"one": PROCESS})) as engine:
            await until(lambda: engine.state("one") == "failed")
            assert "2 threads" in engine.link.status("one")["error"]["message"]
            assert engine.logged("model.forked") == []

    run(scenario())


def test_a_zygote_without_room_waits_and_tries_again(tmp_path, daemon):
    room = threading.Event()

    def reserve(params: dict[str, Any]) -> Any:
        if not room.is_set():
            raise QuotaDenied("no room now", retry_after_s=0.1)
        return daemon.grant(params["bytes"])

    daemon.handlers["reserve"] = reserve

    async def scenario():
        async with engine_process(write_config(tmp_path, {"one": PROCESS})) as engine:
            await until(
                lambda: (engine.link.status("one")["error"] or {}).get("code") == "quota_denied"
            )
            assert engine.state("one") == "waiting"
            room.set()
            await engine.ready("one")

    run(scenario())


def test_without_a_daemon_a_process_waits_until_it_is_there(tmp_path):
    daemon = Daemon(tmp_path / "umad.sock")

    async def scenario():
        async with engine_process(write_config(tmp_path, {"one": PROCESS})) as engine:
            await until(
                lambda: (
                    (engine.link.status("one")["error"] or {}).get("code") == "arbiter_unavailable"
                )
            )
            assert not (tmp_path / "loads").exists()
            daemon.start()
            await engine.ready("one")

    try:
        run(scenario())
    finally:
        daemon.stop()


def test_the_zygote_comes_back_to_a_new_daemon_with_what_it_holds(tmp_path, daemon):
    async def scenario():
        async with engine_process(write_config(tmp_path, {"one": PROCESS})) as engine:
            await engine.ready("one")
            daemon.stop()
            daemon.calls.clear()
            daemon.start()
            await until(lambda: len(daemon.of("register")) == 2)
            back = {one["model"]: one for one in daemon.of("register")}
            assert set(back) == {"zygote", "one"}
            assert all("held" in one and one["baseline"] == 0 for one in back.values())
            (tmp_path / "one" / "release").touch()
            assert (await engine.run("one", prompt="on"))["text"] == "on"

    run(scenario())


def test_a_broken_checkpoint_fails_alone_and_is_tried_again(tmp_path, daemon):
    async def scenario():
        config = write_config(tmp_path, {"bad": {**PROCESS, "priority": 1}, "good": PROCESS})
        (tmp_path / "bad" / "broken").touch()
        async with engine_process(config) as engine:
            await engine.ready("good")
            await until(lambda: engine.state("bad") == "failed")
            assert "no weights in bad" in engine.link.status("bad")["error"]["message"]
            (tmp_path / "bad" / "broken").unlink()
            await engine.ready("bad")
            assert len(engine.logged("model.forked")) == 2  # in the same child

    run(scenario())


def test_a_held_model_is_not_forked_before_its_time(tmp_path, daemon):
    async def scenario():
        config = write_config(tmp_path, {"one": PROCESS, "two": PROCESS})
        async with engine_process(config, None, "--hold=one=300") as engine:
            await engine.ready("two")
            assert engine.link.status("one")["error"]["code"] == "worker_revoked"
            assert [line["model"] for line in engine.logged("model.forked")] == ["two"]

    run(scenario())
