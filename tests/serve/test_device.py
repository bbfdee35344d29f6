"""Models on a device: the engine's decisions, and its quotas over a fake driver.

The daemon, the engine, the guard and the device allocator are real; the driver is
tests/guard_device's, torch's pools are fake_torch's.  Nothing here has run on a GPU.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.daemon.running import Daemon
from tests.demo.fixtures import checkpoints
from tests.guard_device import rig
from tests.serve import fake_torch
from tests.serve.processes import engine_process, scripted_command, write_config
from tests.serve.standin import run, until
from umad.client.accounts import ProcessPage
from umad.errors import ConfigError, ModelFailed, QuotaExceeded
from umad.guard import device, preload
from umad.guard.page import AccountPage
from umad.serve import devices
from umad.serve.loader import load
from umad.serve.supervisor import engine_environment
from umad.settings import ModelSettings

LLAMA = ModelSettings(name="llama", kind="chat", path="/nowhere", quota=1 << 30, device="cuda")


def on(name: str) -> ModelSettings:
    return ModelSettings(name="llama", kind="chat", path="/nowhere", quota=1 << 30, device=name)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if rig.CC is None:
        pytest.skip("there is no C compiler")
    device.build()
    return rig.compile_fake(tmp_path_factory.mktemp("cuda"), "cuda", "libcudart.so.12")


@pytest.fixture
def card(tmp_path: Path, driver: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[rig.Rig]:
    """This process with a GPU: a stand-in for torch, and nothing prepared yet."""
    made = rig.Rig(tmp_path, driver)
    monkeypatch.setattr(device, "library", lambda: made.library)
    monkeypatch.setattr(device, "_allocators", [])
    monkeypatch.setattr(devices, "_prepared", set())
    monkeypatch.setattr(devices, "process_page", ProcessPage())
    monkeypatch.setitem(sys.modules, "torch", fake_torch.module())
    yield made
    made.page.close()


def test_a_model_on_the_cpu_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # an import of it would fail
    place = devices.place(on("cpu"), 3, "required")
    with place.use():
        assert (place.status, place.release()) == ("", 0)


@pytest.mark.parametrize("guard", ["auto", "required", "off"])
def test_without_a_gpu_the_load_says_so(
    card: rig.Rig, monkeypatch: pytest.MonkeyPatch, guard: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch.module(available=False))
    with pytest.raises(ModelFailed, match=r"^llama cannot run on cuda: torch 2.13.0 sees no CUDA"):
        devices.place(LLAMA, 0, guard)
    assert devices._prepared == set()


def test_without_the_library_the_load_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch.module())
    monkeypatch.setattr(device, "LIBRARY", tmp_path / "none.so")
    monkeypatch.setattr(device, "library", device.library.__wrapped__)  # not one of another test
    with pytest.raises(ModelFailed, match=r"cannot run on cuda: the device allocator was not b"):
        devices.place(LLAMA, 0, "auto")


def test_pages_that_may_move_are_refused_on_rocm(
    card: rig.Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch.module(hip="7.0"))
    monkeypatch.setenv("HSA_XNACK", "1")
    monkeypatch.setenv("HSA_ENABLE_SDMA", "0")
    with pytest.raises(ModelFailed, match=r"umad-serve before it starts: HSA_XNACK=0$"):
        devices.place(LLAMA, 0, "off")


@pytest.mark.parametrize(
    ("name", "slot", "conf", "why"),
    [
        ("cuda", None, "", "guard"),  # this process has none, and says why
        ("cuda", 0, "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF sets expandable_segments"),
        ("xpu", 0, "", "umad has no allocator for xpu"),
    ],
)
def test_without_a_quota_it_runs_and_says_why_unless_that_is_required(
    card: rig.Rig,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    slot: int | None,
    conf: str,
    why: str,
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", conf)
    with capture_logs() as logs:
        place = devices.place(on(name), slot, "auto")
    assert place.status.startswith("off: ")
    assert why in place.status
    assert "device quotas: off" not in place.status  # once is enough
    assert [line["event"] for line in logs] == ["model.device_quota_off"]
    with place.use():
        assert place.release() == 0
    with pytest.raises(ModelFailed, match=f'"required", and llama has no quota on {name}: .*{why}'):
        devices.place(on(name), slot, "required")


def test_a_page_that_is_not_fit_turns_the_quota_off(
    card: rig.Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attach_with(attach: Any) -> None:
        attach(os.memfd_create("no page"))

    monkeypatch.setattr(devices, "process_page", SimpleNamespace(attach_with=attach_with, off=""))
    assert "off: " in devices.place(LLAMA, 0, "auto").status
    assert devices.place(LLAMA, None, "auto").status == "off: the daemon gave it no account"


def test_a_device_is_prepared_once_and_reaches_the_others(card: rig.Rig) -> None:
    flags, peers = card.fake("flags", rig.Row), card.fake("peers", rig.Row * 4)
    for name in ("cuda", "cuda:0", "cuda:2"):
        assert devices.place(on(name), 0, "required").status == "on"
    assert list(flags) == [9, 8, 9, 8]
    reached = [(one, other) for one in range(4) for other in range(4) if peers[one][other]]
    assert reached == [(0, 2), (2, 0)]
    flags[0] = 8
    devices.place(LLAMA, 0, "required")
    assert flags[0] == 8


def test_a_device_that_failed_costs_no_second_error(
    card: rig.Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = devices.place(LLAMA, 0, "auto")

    def fail() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(sys.modules["torch"].cuda, "empty_cache", fail)  # type: ignore[attr-defined]
    with capture_logs() as logs:
        assert place.release() == 0
    assert logs == [
        {"event": "model.device_release_failed", "log_level": "error", "kind": "RuntimeError"}
    ]


def test_later_pages_are_bound_by_whoever_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr("umad.guard.account.attach", lambda _: seen.append("guard"))
    mine = ProcessPage()
    for generation in (1, 2):
        with closing(AccountPage.create(generation)) as page:
            assert mine.attach(os.dup(page.fd))
        if generation == 1:
            mine.attach_with(lambda _: seen.append("device"))
    assert seen == ["guard", "device", "device"]

    def refuse(_fd: int) -> None:
        raise ConfigError("not this one")

    with pytest.raises(ConfigError):
        mine.attach_with(refuse)
    with closing(AccountPage.create(3)) as page:
        assert mine.attach(os.dup(page.fd))
    assert seen[3:] == ["device"]


def test_the_launcher_refuses_where_the_quota_cannot_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    preload.build()
    monkeypatch.setattr(device, "LIBRARY", tmp_path / "none.so")
    own = {"PATH": "/bin"}
    with pytest.raises(ConfigError, match='"required", but the device allocator was not built'):
        engine_environment(own, "required", on_device=True)
    made = engine_environment(own, "required")
    assert (made["HSA_ENABLE_SDMA"], made["HSA_XNACK"]) == ("0", "0")
    assert engine_environment(own, "auto", on_device=True)["UMAD_GUARD_OFF"] == ""


@pytest.mark.models
@pytest.mark.slow
def test_transformers_reads_weights_in_the_thread_that_is_inside_the_quota(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(**_: Any) -> None:
        pytest.fail("threads were made")

    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "")  # and back to what it was
    monkeypatch.setattr("transformers.core_model_loading.ThreadPoolExecutor", refuse)
    path = str(checkpoints() / "llama")
    runner = load("chat", path, device="cpu:0", progress=lambda _stage, _ratio: None)
    assert runner.resident_bytes > 0


# --- the whole engine -----------------------------------------------------------------------


@pytest.fixture
def served(
    tmp_path: Path, driver: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Path, Daemon]]:
    """The models' configuration, and a real daemon; in the engine a guard is preloaded."""
    preload.build()
    if why := preload.obstacle(""):
        pytest.skip(f"the guard cannot be preloaded: {why}")
    monkeypatch.setenv("UMAD_DEVICE_RUNTIME", str(driver))
    models: dict[str, dict[str, Any]] = {
        "big": {"quota": "64MiB", "priority": 2},
        "tight": {"quota": "16MiB", "priority": 1},
        "alone": {"quota": "64MiB", "isolation": "process"},
    }
    config = write_config(
        tmp_path,
        {name: {"device": "cuda", **keys} for name, keys in models.items()},
        serve='runtime_quota = "256MiB"\nguard = "required"',
    )
    text = config.read_text().replace("[daemon]", '[daemon]\ngroup = "root"\nadmin_group = "root"')
    config.write_text(text + '[memory]\nreserve = "64MiB"\nbudget = "2GiB"\ninterval = "100ms"\n')
    daemon = Daemon(tmp_path, text=config.read_text()).start()
    yield config, daemon
    daemon.stop()


@pytest.mark.slow
def test_a_model_on_a_device_stays_within_its_quota(served: tuple[Path, Daemon]) -> None:
    config, daemon = served
    command = [*scripted_command(config)]
    command[command.index("tests.serve.scripted")] = "tests.serve.scripted_device"

    async def scenario() -> None:
        async with engine_process(config, command) as engine:
            await engine.ready("big", "alone")
            assert engine.link.status("big")["device_quota"] == "on"
            assert engine.link.status("alone")["device_quota"] == "on"
            # Its first half, and what went with it, is back: only big's weights are there.
            await until(lambda: engine.state("tight") == "failed")
            told = engine.link.status("tight")["error"]
            assert (told["code"], told["details"]["quota_bytes"]) == ("quota_exceeded", 16 << 20)
            answer = await engine.run("big", take=20)
            assert (answer["live"], answer["spin"]) == (44, 9)

            with pytest.raises(QuotaExceeded, match=r"asked for 60\.0 MiB more") as caught:
                await engine.run("big", take=60)
            assert caught.value.details["by_quota"] is True
            assert (await engine.run("big"))["live"] == 24  # what torch kept is back as well

            # Booked beyond the quota: the limit follows, and nothing stays when the lease ends.
            assert (await engine.run("big", take=60, need=60))["live"] == 84
            assert (await engine.run("big"))["live"] == 24

            # Neither is what another process does on the same device.
            other = await engine.run("alone", take=30)
            assert (other["live"], other["spin"]) == (54, 9)
            assert other["pid"] != engine.process.pid
            with pytest.raises(QuotaExceeded):
                await engine.run("alone", take=60)

            # After a refusal it keeps what it may not, so it is unloaded whole and comes back.
            assert (await engine.run("big", keep=20))["live"] == 44
            await until(lambda: engine.state("big") == "failed")
            await engine.ready("big")
            assert (await engine.run("big"))["live"] == 24
            assert not [line for line in engine.log if "device_bytes_left" in line]

    run(scenario())
    assert not [line for line in daemon.log if line["event"] in ("revoked", "stopped", "breach")]
