"""A model whose device has no room is loaded in the system's memory, and that is said.

The daemon, umad-serve, the guard and the device allocator are real, and so is the machine's
memory; the card's figures are a file of the test's, its driver a stand-in.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.daemon.running import ROOT, Daemon, eventually
from tests.data.machine_tree import lay_out
from tests.demo import ask
from tests.demo.run import free_port
from tests.guard_device import rig
from umad.guard import device, preload
from umad.units import MIB

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

CARD = "sys/class/drm/card0/device"
CARD_MIB = 512
CONFIG = """
[daemon]
socket = "{folder}/umad.sock"
[memory]
reserve = "64MiB"
budget = "1GiB"
interval = "100ms"
[leases]
residence_min = "0s"
[serve]
listen = "{address}"
runtime_quota = "256MiB"
guard = "required"
wait_max = "3s"
"""
MODEL = """
[[model]]
name = "{name}"
kind = "chat"
path = "{folder}"
quota = "64MiB"
device = "cuda"
pool = "vram"
load = "request"
"""


class Served:
    """A daemon on a machine with a card, and an umad-serve with two models for it."""

    def __init__(self, folder: Path, driver: Path) -> None:
        self.root = folder / "machine"
        lay_out("discrete-amd", folder / "recorded")
        (self.root / "sys").mkdir(parents=True)
        (folder / "recorded/sys/class").rename(self.root / "sys/class")
        (self.root / "proc").symlink_to("/proc")
        (self.root / CARD / "mem_info_vram_total").write_text(f"{CARD_MIB * MIB}\n")
        self.leave(0)
        self.address = f"127.0.0.1:{free_port()}"
        text = CONFIG.format(folder=folder, address=self.address)
        text += MODEL.format(name="may", folder=folder) + 'fallback = ["cpu"]\n'
        text += MODEL.format(name="must", folder=folder)
        self.daemon = Daemon(folder, "", f"--root={self.root}", text=text).start()
        program = [sys.executable, "-m", "tests.integration.device_engine", "front"]
        with (folder / "log").open("ab") as log:
            self.front = subprocess.Popen(
                [*program, "--config", str(self.daemon.config), "--log-format", "json"],
                cwd=ROOT,
                env=os.environ | {"UMAD_DEVICE_RUNTIME": str(driver)},
                stderr=log,
            )

    def leave(self, free_mib: int) -> None:
        """Somebody else has all of the card but this."""
        used = (CARD_MIB - free_mib) * MIB
        (self.root / CARD / "mem_info_vram_used").write_text(f"{used}\n")

    def pool_of(self, name: str) -> str:
        workers = {worker["name"]: worker for worker in self.daemon.status()["workers"]}
        return str(workers[name]["pool"])

    def model(self, name: str) -> dict[str, Any]:
        return dict(ask.get(self.address, "/status").body["models"][name])

    def evict(self, name: str) -> None:
        with self.daemon.client() as client:
            client.call("evict", {"name": name})
        eventually(lambda: self.model(name)["state"] == "cold")

    def chat(self, name: str, *, stream: bool = False) -> httpx.Response:
        messages = [{"role": "user", "content": "hello"}]
        return httpx.post(
            f"http://{self.address}/v1/chat/completions",
            json={"model": name, "messages": messages, "stream": stream},
            timeout=30,
        )


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    if rig.CC is None:
        pytest.skip("there is no C compiler")
    preload.build()
    device.build()
    if why := preload.obstacle(""):
        pytest.skip(f"the guard cannot be preloaded: {why}")
    made = Served(folder, rig.compile_fake(folder, "cuda", "libcudart.so.12"))
    try:
        eventually(lambda: ask.get(made.address, "/readyz").status == 200, within_s=60)
        yield made
    except BaseException:
        print("\n".join((folder / "log").read_text(errors="replace").splitlines()[-30:]))
        raise
    finally:
        made.front.terminate()
        made.front.wait(20)
        made.daemon.stop()


def where(answer: httpx.Response) -> tuple[int, str | None, str]:
    """The status, the header, and the MiB that lay on the device."""
    text = answer.json()["choices"][0]["message"]["content"] if answer.is_success else ""
    return answer.status_code, answer.headers.get("x-umad-device"), text


def refused(answer: httpx.Response) -> str:
    """The message of a 503 that says when to come again."""
    error = answer.json()["error"]
    assert answer.status_code == 503, error
    assert int(answer.headers["retry-after"]) >= 1
    return str(error["message"])


def test_the_cpu_stands_in_where_the_device_has_no_room(served: Served) -> None:
    # Nothing is free on the card: one stands in, the other says when to come again.
    assert where(served.chat("may")) == (200, "cpu", "0")
    assert (served.model("may")["device"], served.pool_of("may")) == ("cpu", "system")
    assert served.chat("may", stream=True).headers["x-umad-device"] == "cpu"
    assert "of pool 'vram'" in refused(served.chat("must"))
    assert served.pool_of("must") == "vram"

    # There is room: what is loaded stays, and the next load is where it should be.
    served.leave(CARD_MIB)
    assert where(served.chat("may")) == (200, "cpu", "0")
    served.evict("may")
    assert where(served.chat("may")) == (200, None, "8")
    assert (served.model("may")["device"], served.pool_of("may")) == ("cuda", "vram")
    eventually(lambda: served.model("must")["state"] == "cold")  # it may be tried again
    assert where(served.chat("must")) == (200, None, "16")

    # Neither here nor there.
    served.evict("may")
    served.evict("must")
    served.leave(0)
    with served.daemon.client() as client:
        rest = client.call("status")["pools"][0]["free"]
        hog = client.worker("hog", quota=rest - MIB)
        kept = hog.load(threading.Event)
        assert "of pool 'system'" in refused(served.chat("may"))
        hog.close()
        del kept
    # It may still wait, and be loaded for nobody.
    eventually(lambda: served.model("may")["state"] in ("cold", "ready"))
    assert where(served.chat("may")) == (200, "cpu", "0")
    assert not [line for line in served.daemon.log if line["event"] in ("revoked", "stopped")]
