"""A daemon that a test starts, stops and kills, and an umad-serve that stays.

Its models are ``plain_engine``'s, which load at once: what is tested is who gets memory.
"""

import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.daemon.running import ROOT, Daemon, eventually
from tests.demo import ask
from tests.demo.run import free_port

QUOTA_MIB, RUNTIME_MIB = 64, 1024
CONFIG = """
[daemon]
socket = "{folder}/umad.sock"
[memory]
reserve = "64MiB"
budget = "{budget_mib}MiB"
interval = "100ms"
[leases]
{leases}
[serve]
listen = "{address}"
runtime_quota = "{runtime_mib}MiB"
{serve}
"""
MODEL = """
[[model]]
name = "{name}"
kind = "chat"
path = "{path}"
quota = "{quota_mib}MiB"
{model}
"""


class PlainStack:
    """Both, started; ``address`` is the front's, ``log`` umad-serve's file."""

    def __init__(
        self,
        folder: Path,
        names: Iterable[str],
        *,
        budget_mib: int,
        leases: str = "",
        serve: str = "",
        model: str = "",
    ) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.log = folder / "log"
        text = CONFIG.format(
            folder=folder,
            budget_mib=budget_mib,
            leases=leases,
            address=self.address,
            runtime_mib=RUNTIME_MIB,
            serve=serve,
        )
        for name in names:
            (folder / name).mkdir()
            text += MODEL.format(name=name, path=folder / name, quota_mib=QUOTA_MIB, model=model)
        self.daemon = Daemon(folder, text=text).start()
        self.front = self._serve(self.daemon.config)

    @contextmanager
    def second(self) -> Iterator[str]:
        """One more umad-serve on the same daemon, with models of its own; its address."""
        address = f"127.0.0.1:{free_port()}"
        text = self.daemon.config.read_text().replace(self.address, address)
        config = self.daemon.config.with_name("second.toml")
        config.write_text(text.replace('name = "', 'name = "second-'))
        front = self._serve(config)
        try:
            eventually(lambda: ask.get(address, "/readyz").status == 200, within_s=60)
            yield address
        finally:
            front.terminate()
            front.wait(20)

    def _serve(self, config: Path) -> "subprocess.Popen[bytes]":
        program = [sys.executable, "-m", "tests.integration.plain_engine", "front"]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*program, "--config", str(config), "--log-format", "json"], cwd=ROOT, stderr=log
            )

    def chat(self, model: str, size_mib: int = 4) -> ask.Answer:
        """A forward of a model that takes so much."""
        return ask.chat(self.address, model, str(size_mib))

    def states(self) -> dict[str, str]:
        """Of the models, as the front shows them."""
        models: dict[str, Any] = ask.get(self.address, "/status").body["models"]
        return {name: model["state"] for name, model in models.items()}


@contextmanager
def plain_stack(folder: Path, names: Iterable[str], **more: Any) -> Iterator[PlainStack]:
    made = PlainStack(folder, names, **more)
    try:
        eventually(lambda: ask.get(made.address, "/readyz").status == 200, within_s=60)
        yield made
    except BaseException:
        print("\n".join(made.log.read_text(errors="replace").splitlines()[-30:]))
        raise
    finally:
        made.front.terminate()
        made.front.wait(20)
        made.daemon.stop()
