"""Models that come and go: cold ones, hot switches, other places, new configurations."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.client.conftest import Daemon
from tests.serve.processes import EngineProcess, engine_process, read_settings, write_config
from tests.serve.standin import run, until
from umad.errors import ModelFailed, ModelNotFound, NeverFits, QuotaDenied, UmadError

pytestmark = pytest.mark.slow
ISOLATIONS = pytest.mark.parametrize("isolation", ["thread", "process"])


@pytest.fixture
def daemon(tmp_path: Path):
    daemon = Daemon(tmp_path / "umad.sock").start()
    yield daemon
    daemon.stop()


def loads(folder: Path) -> list[str]:
    log = folder / "loads"
    return log.read_text().split() if log.exists() else []


def served_worker(daemon: Daemon) -> int:
    """The worker that was loaded last."""
    return int([one["worker"] for one in daemon.of("progress") if one["stage"] == "serving"][-1])


def evict(daemon: Daemon) -> None:
    worker = served_worker(daemon)
    daemon.tell("evict", worker=worker, reason="other waits", for_worker="other", deadline_s=30.0)


async def cold(engine: EngineProcess, model: str = "one") -> None:
    await until(lambda: engine.state(model) == "cold")


@ISOLATIONS
def test_one_load_for_many_callers(tmp_path, daemon, isolation):
    async def scenario():
        config = write_config(tmp_path, {"one": {"load": "request", "isolation": isolation}})
        async with engine_process(config) as engine:
            await cold(engine)
            assert "one" in [one["model"] for one in daemon.of("register")]
            assert loads(tmp_path) == []
            engine.link.check("one")
            assert engine.link.ready() == (1, 1)
            answers = await asyncio.gather(*(engine.run("one", prompt=str(n)) for n in range(9)))
            assert [answer["text"] for answer in answers] == [str(n) for n in range(9)]
            assert loads(tmp_path) == ["one"]
            asked = daemon.of("reserve")[-1]
            assert asked["evict"]
            assert 5 < asked["wait_s"] <= 10

    run(scenario())


@ISOLATIONS
@pytest.mark.parametrize("refusal", [QuotaDenied, NeverFits])
def test_a_refused_load_answers_all_with_the_true_reason(tmp_path, daemon, isolation, refusal):
    def reserve(params: dict[str, Any]) -> Any:
        if params["bytes"] == 7000:
            raise refusal("held by others", retry_after_s=0.2)
        return daemon.grant(params["bytes"])

    daemon.handlers["reserve"] = reserve

    async def scenario():
        keys = {"load": "request", "isolation": isolation, "quota": "7000B"}
        async with engine_process(write_config(tmp_path, {"one": keys})) as engine:
            await cold(engine)
            calls = [engine.run("one", prompt="x") for _ in range(3)]
            errors = await asyncio.gather(*calls, return_exceptions=True)
            for error in errors:
                assert isinstance(error, UmadError)
                # What can never be loaded is no fault of the request (413).
                assert type(error) is (QuotaDenied if refusal is QuotaDenied else ModelFailed)
                assert error.http_status == 503
                assert "held by others" in error.message
            await until(lambda: engine.state("one") in ("waiting", "failed"))
            with pytest.raises(UmadError, match="held by others"):
                engine.link.check("one")
            if refusal is QuotaDenied:
                await cold(engine)  # and soon the next request may try again

    run(scenario())


@ISOLATIONS
def test_who_has_to_go_finishes_its_work_and_is_loaded_for_those_who_came(
    tmp_path, daemon, isolation
):
    async def scenario():
        async with engine_process(
            write_config(tmp_path, {"one": {"isolation": isolation}})
        ) as engine:
            await engine.ready("one")
            at_work = asyncio.ensure_future(engine.run("one", prompt="wait"))
            await until((tmp_path / "one" / "waiting").exists)
            evict(daemon)
            await until(lambda: engine.state("one") == "draining")
            assert engine.link.ready() == (1, 1)
            came = asyncio.ensure_future(engine.run("one", prompt="next"))
            await until(lambda: bool(daemon.of("keep")))
            assert not daemon.of("release")
            (tmp_path / "one" / "release").touch()
            assert (await at_work)["text"] == "wait"
            assert (await came)["text"] == "next"
            assert loads(tmp_path) == ["one", "one"]
            assert len(daemon.of("release")) == 1
            assert daemon.leaked == 0

    run(scenario())


@ISOLATIONS
def test_who_is_spared_goes_on(tmp_path, daemon, isolation):
    daemon.handlers["keep"] = lambda params: spared.append(params["worker"])
    spared: list[int] = []

    async def scenario():
        async with engine_process(
            write_config(tmp_path, {"one": {"isolation": isolation}})
        ) as engine:
            await engine.ready("one")
            at_work = asyncio.ensure_future(engine.run("one", prompt="wait"))
            await until((tmp_path / "one" / "waiting").exists)
            evict(daemon)
            await until(lambda: engine.state("one") == "draining")
            came = asyncio.ensure_future(engine.run("one", prompt="next"))
            await until(lambda: bool(spared))
            daemon.tell("evict_cancelled", worker=spared[0])
            await engine.ready("one")
            (tmp_path / "one" / "release").touch()
            assert (await at_work)["text"] == "wait"
            assert (await came)["text"] == "next"
            assert loads(tmp_path) == ["one"]

    run(scenario())


@ISOLATIONS
def test_an_idle_model_goes_at_once_and_comes_back_at_the_daemons_word(tmp_path, daemon, isolation):
    workers: list[int] = []

    def register(params: dict[str, Any]) -> Any:
        answer = daemon.do_register(params)
        if params["model"] == "one":
            workers.append(answer["worker"])
        return answer

    daemon.handlers["register"] = register

    async def scenario():
        config = write_config(tmp_path, {"one": {"isolation": isolation}})
        async with engine_process(config) as engine:
            await engine.ready("one")
            evict(daemon)
            await cold(engine)
            assert len(daemon.of("release")) == 1
            # A process has ended with its model, and another is known in its place.
            assert len(workers) == (1 if isolation == "thread" else 2)
            daemon.tell("load", worker=workers[-1])
            await engine.ready("one")
            assert loads(tmp_path) == ["one", "one"]

    run(scenario())


@ISOLATIONS
def test_a_model_that_nobody_uses_goes_by_itself(tmp_path, daemon, isolation):
    async def scenario():
        keys = {"idle_unload": "400ms", "isolation": isolation}
        async with engine_process(write_config(tmp_path, {"one": keys})) as engine:
            await engine.ready("one")
            at_work = asyncio.ensure_future(engine.run("one", prompt="wait"))
            await until((tmp_path / "one" / "waiting").exists)
            await asyncio.sleep(0.5)  # its time runs from the end of the request
            (tmp_path / "one" / "release").touch()
            await at_work
            assert engine.state("one") == "ready"
            await cold(engine)
            assert (await engine.run("one", prompt="again"))["text"] == "again"

    run(scenario())


def test_who_finds_no_room_at_the_start_drives_nobody_out_until_it_is_called(tmp_path, daemon):
    def reserve(params: dict[str, Any]) -> Any:
        if params["bytes"] == 7000 and not params["evict"]:
            raise QuotaDenied("held by others", retry_after_s=60)
        return daemon.grant(params["bytes"])

    daemon.handlers["reserve"] = reserve

    async def scenario():
        async with engine_process(write_config(tmp_path, {"big": {"quota": "7000B"}})) as engine:
            await cold(engine, "big")
            assert engine.link.status("big")["error"]["code"] == "quota_denied"
            assert (await engine.run("big", prompt="now"))["text"] == "now"

    run(scenario())


def test_where_the_device_has_no_room_the_cpu_stands_in(tmp_path, daemon):
    pools: dict[int, str] = {}

    def register(params: dict[str, Any]) -> Any:
        answer = daemon.do_register(params)
        pools[answer["worker"]] = params["pool"]
        return answer

    def reserve(params: dict[str, Any]) -> Any:
        if pools[params["worker"]] == "vram":
            raise QuotaDenied("no room in vram")
        if params["bytes"] == 7000 and full:
            raise QuotaDenied("nor in system")
        return daemon.grant(params["bytes"])

    daemon.handlers |= {"register": register, "reserve": reserve}
    full = True

    async def scenario():
        nonlocal full
        keys = {"device": "cuda:0", "pool": "vram", "load": "request", "quota": "7000B"}
        config = write_config(tmp_path, {"one": keys})
        config.write_text(config.read_text() + 'fallback = ["cpu"]\n')
        async with engine_process(config) as engine:
            await cold(engine)
            with pytest.raises(QuotaDenied, match=r"no room in vram; and on cpu: nor in system"):
                await engine.run("one", prompt="x")
            full = False
            await cold(engine)
            answer = await engine.run("one", prompt="x")
            assert (answer["text"], answer["device"]) == ("x", "cpu")
            assert engine.link.status("one")["device"] == "cpu"

    run(scenario())


def test_who_stands_in_elsewhere_is_there_after_a_new_configuration_too(tmp_path, daemon):
    pools: dict[int, str] = {}

    def register(params: dict[str, Any]) -> Any:
        answer = daemon.do_register(params)
        pools[answer["worker"]] = params["pool"]
        return answer

    def reserve(params: dict[str, Any]) -> Any:
        if pools[params["worker"]] == "vram":
            raise QuotaDenied("no room in vram")
        return daemon.grant(params["bytes"])

    daemon.handlers |= {"register": register, "reserve": reserve}
    keys = {"device": "cuda:0", "pool": "vram", "load": "request"}

    def write(**more: Any) -> Path:
        config = write_config(tmp_path, {"one": keys | more})
        config.write_text(config.read_text() + 'fallback = ["cpu"]\n')
        return config

    async def scenario():
        async with engine_process(write()) as engine:
            await cold(engine)
            assert (await engine.run("one", prompt="x"))["device"] == "cpu"
            config = write(idle_unload="300s")
            await engine.link.reload(read_settings(config), config.read_text())
            assert (await engine.run("one", prompt="x"))["device"] == "cpu"
            evict(daemon)
            await cold(engine)
            asked = len(daemon.of("reserve"))
            assert (await engine.run("one", prompt="x"))["device"] == "cpu"
            again = [pools[one["worker"]] for one in daemon.of("reserve")[asked:]]
            assert again == ["vram", "system"], "each in its own pool"
            assert loads(tmp_path) == ["one", "one"], "a new configuration alone loads nothing"

    run(scenario())


def test_who_is_asked_to_go_before_it_serves_goes(tmp_path, daemon):
    draining = threading.Event()

    def cost(_: dict[str, Any]) -> Any:  # asked when it is loaded, and does not serve yet
        worker = daemon.of("reserve")[-1]["worker"]
        daemon.tell("evict", worker=worker, reason="r", for_worker="other", deadline_s=30.0)
        draining.wait(3)
        return {}

    daemon.handlers["cost"] = cost

    async def scenario():
        async with engine_process(write_config(tmp_path, {"one": {}})) as engine:
            await until(lambda: engine.state("one") == "draining")
            draining.set()
            await cold(engine)
            assert len(daemon.of("release")) == 1

    run(scenario())


def test_a_new_configuration_leaves_those_alone_that_it_does_not_change(tmp_path, daemon):
    async def scenario():
        models: dict[str, dict[str, Any]] = {
            "same": {},
            "more": {"quota": "1GiB"},
            "gone": {},
            "other": {},
        }
        config = write_config(tmp_path, models)
        async with engine_process(config) as engine:
            await engine.ready(*models)
            del models["gone"]
            models["more"] = {"quota": "2GiB"}
            models["other"] = {"priority": 7}
            models["new"] = {}
            text = write_config(tmp_path, models).read_text()
            at_work = asyncio.ensure_future(engine.run("gone", prompt="wait"))
            await until((tmp_path / "gone" / "waiting").exists)
            await engine.link.reload(read_settings(config), text)
            (tmp_path / "gone" / "release").touch()
            assert (await at_work)["text"] == "wait"
            await engine.ready("new", "other")
            assert daemon.of("set_quota")[0]["quota"] == 2 << 30
            assert loads(tmp_path) == ["same", "more", "gone", "other", "other", "new"]
            for name in models:
                assert (await engine.run(name, prompt=name))["text"] == name
            with pytest.raises(ModelNotFound):
                await engine.run("gone", prompt="x")
            with pytest.raises(UmadError, match="unknown key"):
                await engine.link.reload(read_settings(config), text + "nonsense = 1\n")
            assert (await engine.run("same", prompt="on"))["text"] == "on"

    run(scenario())
