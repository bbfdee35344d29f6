"""The engine as a process, against a scripted daemon and scripted models."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.client.conftest import Daemon
from tests.daemon.running import running
from tests.serve.processes import ROOT, engine_process, scripted_command, write_config
from tests.serve.standin import run, until
from umad.errors import (
    DaemonUnavailable,
    ModelFailed,
    ModelNotFound,
    NeverFits,
    QuotaDenied,
    QuotaExceeded,
    UmadError,
    WaitedTooLong,
    WorkerLost,
    WorkerRevoked,
)

pytestmark = pytest.mark.slow
TWO: dict[str, dict[str, Any]] = {"low": {}, "high": {"priority": 5}}


@pytest.fixture
def daemon(tmp_path: Path):
    daemon = Daemon(tmp_path / "umad.sock").start()
    yield daemon
    daemon.stop()


async def refused(work: Any, kind: type[UmadError]) -> UmadError:
    with pytest.raises(kind) as caught:
        await work
    assert type(caught.value) is kind
    return caught.value


def test_several_share_a_daemon_and_each_has_its_runtime_booked(tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    for folder in (first, second):
        folder.mkdir()

    async def scenario() -> None:
        with running(tmp_path) as daemon:
            for folder in (first, second):
                (folder / "umad.sock").symlink_to(daemon.socket)
            small = 'runtime_quota = "256MiB"'
            quota = {"quota": "64MiB"}
            async with (
                engine_process(write_config(first, {"chat": quota}, small)) as one,
                engine_process(write_config(second, {"image": quota}, small)) as other,
            ):
                await one.ready("chat")
                await other.ready("image")
                workers = {worker["name"]: worker["pid"] for worker in daemon.status()["workers"]}
                assert set(workers) == {"chat", "image", "runtime", "runtime/1"}
                assert len(set(workers.values())) == 2

    run(scenario())


def test_the_runtime_is_booked_first_then_models_by_priority(tmp_path, daemon):
    async def scenario():
        async with engine_process(write_config(tmp_path, TWO)) as engine:
            await engine.ready("low", "high")
            workers = [params["model"] for params in daemon.of("register")]
            assert workers == ["runtime", "high", "low"]
            assert (tmp_path / "loads").read_text().split() == ["high", "low"]
            asked = [name for name, _ in daemon.calls]
            first = asked.index("register", asked.index("register") + 1)
            assert asked[first : first + 3] == ["register", "reserve", "init_lock"]
            registered = daemon.of("register")[1]
            assert (registered["quota"], registered["priority"]) == (2000, 5)
            assert registered["thread"] not in (0, engine.process.pid)
            assert engine.link.status("low")["resident"] == 1000
            answer = await engine.run("low", prompt="hi")
            assert answer["text"] == "hi"
            assert answer["thread"] == daemon.of("register")[2]["thread"]
            await until(lambda: bool(daemon.of("forward_done")))
            assert daemon.of("forward_done")[0]["predicted"] == 10
            packed = await engine.run("high", texts=["a"])
            assert packed["vectors"] == [b"\0\0\0\x3f\0\0\x80\x3f"]

    run(scenario())


def test_a_run_is_admitted_with_what_it_needs_beyond_the_quota(tmp_path, daemon):
    def admit(params: dict[str, Any]) -> Any:
        if params["bytes"] > 5000:
            raise NeverFits("larger than the pool", details={"asked": params["bytes"]})
        return daemon.grant(params["bytes"])

    daemon.handlers["admit"] = admit

    async def scenario():
        async with engine_process(write_config(tmp_path, {"one": {}})) as engine:
            await engine.ready("one")
            await engine.run("one", prompt="fits", need=1000)  # 1000 + 1000 = the quota
            assert daemon.of("admit") == []
            await engine.run("one", prompt="beyond", need=1001)
            assert daemon.of("admit")[0]["bytes"] == 1
            assert 9 < daemon.of("admit")[0]["wait_s"] <= 10
            error = await refused(engine.run("one", prompt="huge", need=10_000), NeverFits)
            assert error.details == {"asked": 9000}
            assert (await engine.run("one", prompt="on"))["text"] == "on"

    run(scenario())


def test_what_a_model_raises_becomes_an_error_and_the_worker_goes_on(tmp_path, daemon):
    async def scenario():
        async with engine_process(write_config(tmp_path, {"one": {}})) as engine:
            await engine.ready("one")
            error = await refused(engine.run("one", prompt="raise"), ModelFailed)
            assert "ValueError" in error.message
            assert "secret" not in error.message
            await refused(engine.run("one", prompt="memory"), QuotaExceeded)
            await refused(engine.run("one", prompt="allocator"), QuotaExceeded)
            assert (await engine.run("one", prompt="on"))["text"] == "on"
            await until(lambda: any("ValueError" in line for line in engine.log))
            assert any("scripted.py:" in line for line in engine.log)
            assert not any("secret" in line for line in engine.log)
            assert engine.state("one") == "ready"
            # A refusal is no fault of the model's code, and is told once.
            await until(lambda: len(engine.logged("model.over_quota")) == 2)
            for line in engine.logged("model.over_quota"):
                assert line["level"] == "warning"
                assert line["place"].startswith("scripted.py:")
            assert [line["kind"] for line in engine.logged("model.error")] == ["ValueError"]

    run(scenario())


def test_a_device_fault_ends_the_process_after_the_answer(tmp_path, daemon):
    async def scenario():
        async with engine_process(write_config(tmp_path, {"one": {}})) as engine:
            await engine.ready("one")
            await refused(engine.run("one", prompt="device"), ModelFailed)
            assert await engine.process.wait() == 70
            await until(lambda: engine.state("one") != "ready")
            await refused(engine.run("one", prompt="x"), WorkerLost)

    run(scenario())


def test_an_import_that_is_broken_off_ends_the_engine(tmp_path, daemon):
    """As when the daemon dies in the middle of it: half a torch is imported by nobody again."""

    async def scenario():
        config = write_config(tmp_path, {"one": {}})
        (tmp_path / "one" / "refused").touch()
        async with engine_process(config) as engine, asyncio.timeout(20):
            assert await engine.process.wait() == 70
        async with engine_process(config) as engine, asyncio.timeout(20):
            await engine.ready("one")

    run(scenario())


def test_a_refused_load_waits_and_tries_again_while_others_load(tmp_path, daemon):
    room = False

    def reserve(params: dict[str, Any]) -> Any:
        worker = daemon.of("register")
        if params["bytes"] == 7000 and not room:
            raise QuotaDenied("no room now", retry_after_s=0.1, details={"workers": len(worker)})
        return daemon.grant(params["bytes"])

    daemon.handlers["reserve"] = reserve

    async def scenario():
        nonlocal room
        models = {"big": {"quota": "7000B", "priority": 9}, "small": {}}
        async with engine_process(write_config(tmp_path, models)) as engine:
            await engine.ready("small")
            await until(lambda: engine.link.status("big")["error"] is not None)
            state = engine.link.status("big")
            assert state["state"] == "cold"  # a request would have others go for it
            assert state["error"]["code"] == "quota_denied"
            room = True
            await engine.ready("big")

    run(scenario())


def test_a_broken_checkpoint_fails_alone_and_is_tried_again(tmp_path, daemon):
    async def scenario():
        config = write_config(tmp_path, {"bad": {"priority": 1}, "good": {}})
        (tmp_path / "bad" / "broken").touch()
        async with engine_process(config) as engine:
            await engine.ready("good")
            await until(lambda: engine.state("bad") == "failed")
            error = engine.link.status("bad")["error"]
            assert error["code"] == "model_failed"
            assert "no weights in bad" in error["message"]
            assert len(daemon.of("void")) >= 1  # what was booked for it is given back
            (tmp_path / "bad" / "broken").unlink()
            await engine.ready("bad")

    run(scenario())


def test_without_a_daemon_all_models_wait_until_it_is_there(tmp_path):
    daemon = Daemon(tmp_path / "umad.sock")

    async def scenario():
        async with engine_process(write_config(tmp_path, TWO)) as engine:
            await until(
                lambda: (
                    (engine.link.status("low")["error"] or {}).get("code") == "arbiter_unavailable"
                )
            )
            with pytest.raises(DaemonUnavailable, match="systemctl start umad"):
                engine.link.check("low")
            assert not (tmp_path / "loads").exists()  # nothing is loaded unbooked
            daemon.start()
            await engine.ready("low", "high")

    try:
        run(scenario())
    finally:
        daemon.stop()


def test_a_revoked_worker_is_fenced_at_once_and_comes_back(tmp_path, daemon):
    async def scenario():
        async with engine_process(write_config(tmp_path, TWO)) as engine:
            await engine.ready("low", "high")
            at_work = asyncio.ensure_future(engine.run("high", prompt="wait"))
            await until(lambda: (tmp_path / "high" / "waiting").exists())
            behind = asyncio.ensure_future(engine.run("high", prompt="next"))
            neighbour = asyncio.ensure_future(engine.run("low", prompt="wait"))
            await until(lambda: (tmp_path / "low" / "waiting").exists())
            (worker,) = {
                params["worker"] for params in daemon.of("progress") if params["stage"] == "serving"
            } - {daemon.of("progress")[-1]["worker"]}
            daemon.tell(
                "revoke",
                worker=worker,
                reason="over its quota",
                quota=2000,
                measured=9000,
                source="pss",
                grace_s=0.1,
            )
            error = await refused(at_work, WorkerRevoked)
            assert error.details["measured"] == 9000
            await refused(behind, WorkerRevoked)
            assert engine.state("high") == "failed"
            await until(lambda: bool(daemon.of("unregister")))
            assert daemon.of("unregister")[0]["worker"] == worker
            assert daemon.leaked == 0
            assert not neighbour.done()
            (tmp_path / "low" / "release").touch()
            assert (await neighbour)["text"] == "wait"
            await engine.ready("high")
            assert (await engine.run("high", prompt="again"))["text"] == "again"

    run(scenario())


def test_cancelled_and_late_jobs_never_begin(tmp_path, daemon):
    async def scenario():
        async with engine_process(write_config(tmp_path, {"one": {}})) as engine:
            await engine.ready("one")
            first = asyncio.ensure_future(engine.run("one", prompt="wait"))
            await until(lambda: (tmp_path / "one" / "waiting").exists())
            queued = [asyncio.ensure_future(engine.run("one", prompt="q")) for _ in range(50)]
            late = asyncio.ensure_future(engine.run("one", prompt="late", deadline_s=0.05))
            await asyncio.sleep(0)
            for task in queued[:40]:
                task.cancel()
            await refused(late, WaitedTooLong)  # though the worker is still busy
            (tmp_path / "one" / "release").touch()
            await first
            assert len(await asyncio.gather(*queued[40:])) == 10
            await until(lambda: len(daemon.of("forward_done")) == 11)

    run(scenario())


def test_a_client_that_leaves_during_admission_costs_no_forward(tmp_path, daemon):
    asked, granted = threading.Event(), threading.Event()

    def admit(params: dict[str, Any]) -> Any:
        asked.set()
        assert granted.wait(10)
        return daemon.grant(params["bytes"])

    daemon.handlers["admit"] = admit

    async def scenario():
        async with engine_process(write_config(tmp_path, {"one": {}})) as engine:
            await engine.ready("one")
            first = asyncio.ensure_future(engine.run("one", prompt="wait", need=5000))
            await until(asked.is_set)
            first.cancel()
            # Answered by the engine's loop, so it has read the cancellation before.
            await refused(engine.link.run("nobody", {}, request="x", deadline_s=1), ModelNotFound)
            granted.set()
            assert (await engine.run("one", prompt="next"))["text"] == "next"
            assert not (tmp_path / "one" / "waiting").exists()
            # Its burst was given back all the same.
            await until(lambda: len(daemon.of("forward_done")) == 2)

    run(scenario())


def test_a_cancelled_job_at_work_ends_its_forward(tmp_path, daemon):
    async def scenario():
        async with engine_process(write_config(tmp_path, {"one": {}})) as engine:
            await engine.ready("one")
            first = asyncio.ensure_future(engine.run("one", prompt="wait"))
            await until(lambda: (tmp_path / "one" / "waiting").exists())
            first.cancel()
            assert (await engine.run("one", prompt="next"))["text"] == "next"

    run(scenario())


def test_instances_share_one_queue(tmp_path, daemon):
    async def scenario():
        async with engine_process(write_config(tmp_path, {"one": {"instances": 2}})) as engine:
            await until(
                lambda: (
                    [one["state"] for one in engine.link.status("one")["instances"]]
                    == ["ready", "ready"]
                )
            )
            busy = asyncio.ensure_future(engine.run("one", prompt="wait"))
            await until(lambda: (tmp_path / "one" / "waiting").exists())
            assert (await engine.run("one", prompt="beside"))["text"] == "beside"
            (tmp_path / "one" / "release").touch()
            await busy

    run(scenario())


def test_held_models_wait_for_their_time(tmp_path, daemon):
    async def scenario():
        config = write_config(tmp_path, TWO)
        async with engine_process(config, None, "--hold=high=300") as engine:
            await engine.ready("low")
            assert engine.link.status("high")["error"]["code"] == "worker_revoked"
            with pytest.raises(WorkerRevoked):
                engine.link.check("high")

    run(scenario())


@pytest.mark.parametrize("how", ["stop", "signal"])
def test_it_stops_in_order_with_work_in_flight(tmp_path, daemon, how):
    async def scenario():
        async with engine_process(write_config(tmp_path, {"one": {}})) as engine:
            await engine.ready("one")
            first = asyncio.ensure_future(engine.run("one", prompt="wait"))
            await until(lambda: (tmp_path / "one" / "waiting").exists())
            engine.process.send_signal(signal.SIGINT)  # a terminal's Ctrl-C is the front's affair
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


def test_it_ends_with_its_parent(tmp_path, daemon):
    """The kernel ends it, though its end of the link is kept open by somebody else."""
    config = write_config(tmp_path, {"one": {}})
    code = (
        "import os, signal, socket, subprocess, sys\n"
        "ours, theirs = socket.socketpair()\n"
        "os.set_inheritable(ours.fileno(), True)\n"
        "held = subprocess.Popen(['sleep', '60'], pass_fds=[ours.fileno()])\n"
        "engine = subprocess.Popen([*sys.argv[1:], f'--parent={os.getpid()}',\n"
        "    f'--fd={theirs.fileno()}'], pass_fds=[theirs.fileno()])\n"
        "print(held.pid, engine.pid, flush=True)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, *scripted_command(config)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        held, engine = (int(pid) for pid in parent.stdout.readline().split())
        pidfd = os.pidfd_open(engine)
        try:
            daemon.wait(lambda: any(one["model"] == "one" for one in daemon.of("register")))
            parent.kill()
            run(_readable(pidfd))
        finally:
            os.close(pidfd)
            os.kill(held, signal.SIGKILL)


async def _readable(fd: int) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(fd, ended.set)
    async with asyncio.timeout(10):
        await ended.wait()
    asyncio.get_running_loop().remove_reader(fd)
