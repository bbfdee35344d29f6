"""umad-serve as a program: flags, exit codes, systemd, signals, with a scripted daemon."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.client.conftest import Daemon
from tests.serve.processes import ROOT, write_config

pytestmark = pytest.mark.slow


def start(*arguments: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "umad.serve.main", *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


@contextlib.contextmanager
def started(*arguments: str, **environment: str) -> Iterator["subprocess.Popen[str]"]:
    with start(*arguments, **environment) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_configuration_that_cannot_be_used_is_said_and_ends_with_78(tmp_path):
    bad = tmp_path / "bad.toml"
    bad.write_text('[serve]\nlisten = "nowhere"\n')
    for config, says in ((bad, "serve.listen"), (tmp_path / "none.toml", "cannot be read")):
        with start("--config", str(config)) as process:
            out, err = process.communicate(timeout=30)
        assert (process.returncode, out) == (78, "")
        assert says in err
        assert "Traceback" not in err


def test_an_address_in_use_is_one_line_and_ends_with_1(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        config = tmp_path / "umad.toml"
        config.write_text(f'[serve]\nlisten = "127.0.0.1:{port}"\n')
        with start("--config", str(config)) as process:
            _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert len(err.splitlines()) == 1
    assert f"127.0.0.1:{port}" in err


def test_help_loads_neither_torch_nor_the_web_framework():
    code = (
        "import sys, contextlib\n"
        "from umad.serve.main import main\n"
        "with contextlib.suppress(SystemExit):\n"
        "    main(['--help'])\n"
        "print('loaded:', *sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    shown, _, loaded = done.stdout.partition("loaded:")
    assert "--config" in shown
    assert not {"torch", "starlette", "uvicorn", "pydantic"} & set(loaded.split())


def fill(address: Path) -> None:
    """Send to a socket that nobody reads until it takes no more."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.connect(str(address))
        with contextlib.suppress(BlockingIOError):
            while True:
                sender.send(b"STATUS=")


def test_it_serves_tells_systemd_and_ends_cleanly(tmp_path: Path):
    """A folder that holds no checkpoint: the front is up, the model failed, SIGTERM ends all."""
    daemon = Daemon(tmp_path / "umad.sock").start()
    config = write_config(tmp_path, {"one": {"quota": "1GiB"}})
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices,
        contextlib.closing(notices),
    ):
        notices.bind(str(tmp_path / "notify"))
        notices.settimeout(30)
        with started(
            f"--config={config}", "--log-format=json", NOTIFY_SOCKET=str(tmp_path / "notify")
        ) as process:
            assert process.stderr is not None
            first = json.loads(process.stderr.readline())
            assert first["event"] == "serve.listening"
            told = notices.recv(4096).decode().split("\n")
            assert "READY=1" in told
            base = f"http://127.0.0.1:{first['port']}"
            assert httpx.get(base + "/healthz", trust_env=False).status_code == 200
            answer = httpx.post(
                base + "/v1/completions",
                json={"model": "one", "prompt": "secret"},
                trust_env=False,
            )
            assert answer.status_code == 503
            engine = json.loads(next(line for line in process.stderr if '"engine.start"' in line))[
                "pid"
            ]
            # A file that changes under a running service changes nothing for its next engine.
            config.write_text("[nonsense")
            os.kill(engine, signal.SIGKILL)
            lines = iter(process.stderr)
            engine = json.loads(next(line for line in lines if '"engine.start"' in line))["pid"]
            next(line for line in lines if '"model.failed"' in line)
            while b"STATUS=0/1 models ready" not in notices.recv(4096):
                pass
            fill(tmp_path / "notify")  # a service manager that is behind holds nobody up
            process.send_signal(signal.SIGTERM)
            _, rest = process.communicate(timeout=30)
            assert process.returncode == 0
            assert '"serve.ended"' in rest
            assert "secret" not in rest
            assert not Path(f"/proc/{engine}").exists()
    daemon.stop()
