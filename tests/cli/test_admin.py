"""The commands that move models, against a real daemon and a worker that does what it is told."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_umadctl import run
from tests.daemon.running import Daemon, eventually, running
from umad.client import Client

pytestmark = pytest.mark.slow


class Obedient:
    """A worker whose model is a word; it loads and unloads when it is told to."""

    def __init__(self, client: Client) -> None:
        self.model: object = None
        self._told = threading.Event()
        self._load = False
        self._worker = client.worker(
            "llama",
            quota="64MiB",
            on_evict=lambda _: self._tell(load=False),
            on_load=lambda _: self._tell(load=True),
        )
        threading.Thread(target=self._obey, daemon=True).start()

    def _tell(self, *, load: bool) -> None:
        self._load = load
        self._told.set()

    def _obey(self) -> None:
        while self._told.wait(30):
            self._told.clear()
            if self._load:
                self.model = self._worker.load(lambda: ("a", "word"))
            else:
                self.model = None
                self._worker.unload()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with running(tmp_path) as daemon:
        yield daemon


def test_a_model_is_moved_and_each_command_says_what_came_of_it(daemon: Daemon) -> None:
    def said(*words: str) -> tuple[int, str, str]:
        done = run("--socket", daemon.socket, *words)
        assert all(len(line) <= 80 for line in done.stdout.splitlines()), done.stdout
        return done.returncode, done.stdout, done.stderr

    with daemon.client() as client:
        worker = Obedient(client)
        code, out, _ = said("load", "llama")
        assert (code, out[:15]) == (0, "llama: loaded, ")
        assert worker.model is not None
        assert said("pin", "llama")[0] == 0
        code, out, err = said("evict", "llama")
        assert (code, out) == (1, "")
        assert "pinned" in err
        assert said("unpin", "llama") == (0, "llama: not pinned\n", "")
        assert said("evict", "llama") == (0, "llama: unloaded, its memory is back\n", "")
        assert said("evict", "llama") == (0, "llama: not loaded\n", "")
        assert said("drain")[0] == 0
        code, _, err = said("load", "llama")
        assert code == 1
        assert "umadctl resume" in err
        assert json.loads(said("resume", "--json")[1]) == {"drained": False}
        assert said("set-quota", "llama", "80MiB") == (0, "llama: quota 80.0 MiB\n", "")
        code, _, err = said("set-quota", "llama", "80")
        assert code == 2
        assert "unit" in err
        code, _, err = said("evict", "nobody")
        assert code == 1
        assert "umadctl status" in err


def test_a_new_configuration_takes_effect_or_changes_nothing(daemon: Daemon) -> None:
    good = daemon.config.read_text()
    assert run("--socket", daemon.socket, "reload").stdout == "reloaded: nothing has changed\n"
    daemon.config.write_text(good.replace("2GiB", "2GiB?"))
    done = run("--socket", daemon.socket, "reload")
    assert (done.returncode, done.stdout) == (78, "")
    assert "line 6: memory.budget" in done.stderr
    daemon.config.write_text(good.replace("2GiB", "1GiB") + '[metrics]\nlisten = "127.0.0.1:9"\n')
    done = run("--socket", daemon.socket, "reload")
    assert (done.returncode, done.stdout) == (0, "reloaded: memory.budget\n")
    assert done.stderr == "needs a restart: metrics.listen\n"
    eventually(lambda: daemon.status()["pools"][0]["budget"] == 1 << 30)  # at the next look
