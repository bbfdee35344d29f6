"""The supervisor with real engine processes: death, back-off, end."""

import asyncio
import os
import signal
import sys

import pytest
from structlog.testing import capture_logs

from tests.client.conftest import Daemon
from tests.serve.processes import ROOT, read_settings, scripted_command, write_config
from tests.serve.standin import make_settings, run, until
from umad.errors import ConfigError, WorkerLost, WorkerRevoked
from umad.guard import preload
from umad.serve import supervisor as module
from umad.serve.link import EngineLink, ModelState
from umad.serve.supervisor import Supervisor, engine_environment


def test_the_engines_environment():
    own = {
        "PATH": "/bin",
        "NOTIFY_SOCKET": "/run/x",
        "WATCHDOG_USEC": "1",
        "WATCHDOG_PID": "1",
        "LISTEN_FDS": "1",
        "HSA_ENABLE_SDMA": "1",
        "OMP_NUM_THREADS": "64",
    }
    made = engine_environment(own, "off")
    assert made == {
        "UMAD_GUARD_OFF": 'serve.guard is "off"',
        "PATH": "/bin",
        "HSA_ENABLE_SDMA": "1",  # the user's own stands
        "HSA_XNACK": "0",
        "MALLOC_TRIM_THRESHOLD_": "131072",
        "LRU_CACHE_CAPACITY": "256",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def test_the_guard_is_preloaded_or_said_to_be_off():
    preload.build()
    made = engine_environment({"PATH": "/bin"}, "auto")
    assert made["LD_PRELOAD"].endswith("libumadguard.so")
    assert made["UMAD_GUARD_OFF"] == ""
    beside = {"PATH": "/bin", "LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}
    off = engine_environment(beside, "auto")
    assert off["LD_PRELOAD"] == beside["LD_PRELOAD"]
    assert "jemalloc" in off["UMAD_GUARD_OFF"]
    with pytest.raises(ConfigError, match="jemalloc"):
        engine_environment(beside, "required")


@pytest.mark.slow
def test_a_killed_engine_is_replaced_at_once(tmp_path):
    config = write_config(tmp_path, {"one": {}})
    daemon = Daemon(tmp_path / "umad.sock").start()

    async def scenario():
        link = EngineLink(read_settings(config))
        environment = engine_environment({**os.environ, "PYTHONPATH": str(ROOT)}, "auto")
        supervisor = Supervisor(link, scripted_command(config), environment)
        supervision = asyncio.ensure_future(supervisor.run())
        await until(lambda: link.ready() == (1, 1))
        first = supervisor.pid
        work = asyncio.ensure_future(link.run("one", {"prompt": "wait"}, request="a", deadline_s=5))
        await until(lambda: (tmp_path / "one" / "waiting").exists())
        os.kill(first, signal.SIGKILL)
        with pytest.raises(WorkerLost):
            await work
        await until(lambda: link.ready() == (1, 1))
        assert supervisor.pid != first
        assert link.restarts == 1
        result = await link.run("one", {"prompt": "on"}, request="b", deadline_s=5)
        assert result["text"] == "on"
        last = supervisor.pid
        supervisor.stop()
        await supervision
        with pytest.raises(ProcessLookupError):
            os.kill(last, 0)

    try:
        run(scenario())
    finally:
        daemon.stop()


@pytest.mark.slow
def test_an_engine_that_keeps_dying_is_started_ever_more_rarely(monkeypatch):
    waits = []
    monkeypatch.setattr(module, "BACKOFF_MIN_S", 0.01)
    monkeypatch.setattr(module, "BACKOFF_MAX_S", 0.04)
    monkeypatch.setattr(
        module.log, "warning", lambda event, **keys: waits.append(keys["wait_s"]), raising=False
    )

    async def scenario():
        link = EngineLink(make_settings())
        supervisor = Supervisor(link, [sys.executable, "-c", "import sys; sys.exit(3)"], {})
        supervision = asyncio.ensure_future(supervisor.run())
        await until(lambda: link.restarts == 4)
        supervisor.stop()
        await supervision
        assert waits[:4] == [0.01, 0.02, 0.04, 0.04]

    run(scenario())


def test_a_setting_that_lets_pages_move_is_told_at_the_start():
    async def scenario():
        environment = engine_environment({"PATH": "/bin", "HSA_XNACK": "1"}, "off")
        supervisor = Supervisor(EngineLink(make_settings()), ["/no/such/program"], environment)
        supervisor.stop()
        with capture_logs() as logs:
            await supervisor.run()
        assert [(line["event"], line["wanted"]) for line in logs] == [
            ("engine.environment", "HSA_XNACK=0")
        ]

    run(scenario())


def test_an_engine_that_cannot_be_started_is_no_end(monkeypatch):
    monkeypatch.setattr(module, "BACKOFF_MIN_S", 0.01)

    async def scenario():
        link = EngineLink(make_settings())
        supervisor = Supervisor(link, ["/no/such/program"], {})
        supervision = asyncio.ensure_future(supervisor.run())
        await until(lambda: link.restarts == 2)
        supervisor.stop()
        await supervision

    run(scenario())


@pytest.mark.slow
def test_an_engine_that_ignores_everything_is_killed(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "STOP_S", 0.1)
    code = (
        "import pathlib, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"pathlib.Path('{tmp_path}/up').touch();"
        "[signal.pause() for _ in iter(int, 1)]"
    )

    async def scenario():
        link = EngineLink(make_settings())
        supervisor = Supervisor(link, [sys.executable, "-c", code], {})
        supervision = asyncio.ensure_future(supervisor.run())
        await until(lambda: (tmp_path / "up").exists())
        pid = supervisor.pid
        supervisor.stop()
        await supervision
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    run(scenario())


@pytest.mark.slow
def test_a_revoked_model_is_held_back_in_the_next_engine_and_longer_each_time(tmp_path):
    code = (
        "import sys, pathlib; log = pathlib.Path(sys.argv[1]).open('a');"
        "print(*[a for a in sys.argv if a.startswith('--hold')], file=log)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "log")]
    revoked = ModelState("failed", error=WorkerRevoked("over its quota").to_wire())

    def lines() -> list[str]:
        log = tmp_path / "log"
        return log.read_text().splitlines() if log.exists() else []

    async def scenario():
        supervisor = Supervisor(EngineLink(make_settings()), command, {})
        supervisor.note_state("talk", revoked)
        supervisor.note_state("see", ModelState("loading"))
        supervision = asyncio.ensure_future(supervisor.run())
        await until(lambda: len(lines()) == 2)
        supervisor.note_state("talk", revoked)
        await until(lambda: len(lines()) == 3)
        supervisor.stop()
        await supervision
        assert lines()[:3] == ["--hold=talk=5.0", "", "--hold=talk=10.0"]

    run(scenario())


@pytest.mark.slow
def test_what_was_loaded_when_the_engine_died_is_held_back(tmp_path):
    """Killed while it loads one model, with the other one loaded: only the first waits."""
    config = write_config(tmp_path, {"heavy": {"priority": -1}, "light": {}})
    daemon = Daemon(tmp_path / "umad.sock").start()

    async def scenario():
        link = EngineLink(read_settings(config))
        environment = engine_environment({**os.environ, "PYTHONPATH": str(ROOT)}, "auto")
        supervisor = Supervisor(link, scripted_command(config), environment)
        supervision = asyncio.ensure_future(supervisor.run())
        link.on_change = supervisor.note_state
        await until(lambda: link.ready() == (2, 2))
        assert supervisor._holds() == {}
        # As if it had been loaded again just now.
        link._states["heavy"] = [ModelState("loading")]
        os.kill(supervisor.pid, signal.SIGKILL)
        await until(lambda: link.restarts == 1)
        # Each model's thread reports for itself, in no order.
        await until(lambda: link.status("light")["state"] == "ready")
        await until(lambda: link.status("heavy")["retry_after_s"] == 5.0)
        assert link.status("heavy")["state"] == "waiting"
        supervisor.stop()
        await supervision

    try:
        run(scenario())
    finally:
        daemon.stop()
