"""``umadctl top`` in a terminal of its own, against a real daemon; pyte reads the screen."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyte
import pytest

from tests.cli.test_umadctl import run
from tests.core.drive import Drive
from tests.core.fakes import MB, engine
from tests.daemon.running import ROOT, Daemon, eventually, running
from umad.cli import top
from umad.cli.top import View


class Terminal:
    """A process in a terminal, and what its screen shows."""

    def __init__(self, command: list[str], width: int, height: int, env: Mapping[str, str]) -> None:
        self.screen = pyte.Screen(width, height)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.fd, inner = pty.openpty()
        self.inner = inner
        self.resize(width, height)
        self.before = termios.tcgetattr(inner)
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env={**os.environ, "TERM": "xterm-256color", **env},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    def resize(self, width: int, height: int) -> None:
        self.screen.resize(height, width)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def until(self, holds: Callable[[str], bool], within_s: float = 20.0) -> str:
        """Read until the screen is as it should be; its text."""
        deadline_s = time.monotonic() + within_s
        while not holds(text := "\n".join(self.screen.display)):
            left_s = deadline_s - time.monotonic()
            ready, _, _ = select.select([self.fd], [], [], max(0.0, left_s))
            assert ready, f"the screen stays\n{text}"
            self.raw += (data := os.read(self.fd, 65536))
            self._stream.feed(data)
        return text

    def shows(self, *words: str) -> str:
        return self.until(lambda text: all(word in text for word in words))

    def ended(self) -> int:
        """The exit code; what it says while it ends is read, too."""

        def code() -> int | None:
            while select.select([self.fd], [], [], 0)[0]:
                self.raw += os.read(self.fd, 65536)
            return self.process.poll()

        eventually(lambda: code() is not None, within_s=20)
        return self.process.wait()


@contextmanager
def terminal(daemon: Daemon, width: int = 80, height: int = 24, **env: str) -> Iterator[Terminal]:
    command = [sys.executable, "-m", "umad.cli.main", "--socket", str(daemon.socket), "top"]
    made = Terminal(command, width, height, env)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()
        os.close(made.fd)
        os.close(made.inner)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with running(tmp_path) as made:
        yield made


@pytest.mark.slow
def test_a_worker_is_shown_sorted_chosen_pinned_and_asked_to_go(daemon: Daemon) -> None:
    with daemon.client() as client:
        told: list[dict[str, object]] = []
        big = client.worker("big", quota="200MiB", on_evict=told.append)
        small = client.worker("small", quota="300MiB", on_evict=told.append)
        models = [big.load(lambda: bytearray(1)), small.load(lambda: bytearray(1))]
        with terminal(daemon) as screen:
            text = screen.shows("big", "small", "200.0M", "budget 2.0G", "bound by", "q quit")
            assert text.index("small") < text.index("big"), "by what is booked"
            screen.press("n")
            screen.until(lambda text: text.find("big") < text.find("small"))
            screen.press("\x1b[B")  # down: small
            screen.press("e")
            screen.shows("evict small? y or n")
            screen.press("n")
            assert "told to go" not in screen.until(lambda text: "evict small" not in text)
            screen.press("p")
            screen.shows("small *", "small: pinned")
            screen.press("ey")
            screen.shows("pinned")  # refused, and says why
            screen.press("p")
            screen.shows("small: not pinned any more")
            screen.press("ey")
            screen.shows("small: told to go", "draining")
            eventually(lambda: len(told) == 1)
            screen.press("h")
            screen.shows("A bar is a worker's quota")
            screen.press("q")
            assert screen.ended() == 0
            assert b"\x1b[?1049l" in screen.raw, "the screen is put back"
            assert termios.tcgetattr(screen.inner) == screen.before
        del models


@pytest.mark.slow
def test_it_outlives_the_daemon_fits_a_resized_terminal_and_ends_by_a_signal(
    daemon: Daemon,
) -> None:
    with daemon.client() as client:
        workers = [client.worker(f"model-{at:02}", quota="1MiB") for at in range(30)]
        with terminal(daemon, NO_COLOR="1") as screen:
            screen.shows("model-00", "more; up and down", "q quit")
            assert not set(colours(screen)) - {"default"}
            screen.resize(100, 50)
            text = screen.shows("model-29", "q quit")
            assert "more; up and down" not in text
            daemon.kill()
            screen.shows("OLD:", "model-00")
            daemon.start()
            screen.until(lambda text: "OLD:" not in text and "generation" not in text)
            screen.process.send_signal(signal.SIGTERM)
            assert screen.ended() == 0
            assert b"\x1b[?1049l" in screen.raw
        assert workers


def colours(terminal: Terminal) -> Iterator[str]:
    for line in terminal.screen.buffer.values():
        yield from (cell.fg for cell in line.values())


@pytest.mark.slow
def test_without_a_terminal_it_is_one_picture(daemon: Daemon) -> None:
    with daemon.client() as client:
        client.worker("llama", quota="64MiB")
        done = run("--socket", daemon.socket, "top")
    assert (done.returncode, done.stderr) == (0, "")
    assert "llama" in done.stdout
    assert "\x1b" not in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())


def shown(view: View, width: int = 80, height: int = 24) -> list[str]:
    from rich.console import Console

    console = Console(width=width, height=height, highlight=False)
    with console.capture() as captured:
        console.print(top.frame(view, width, height), end="")
    return captured.get().splitlines()


def state(drive: Drive) -> dict[str, object]:
    return {"daemon": {"version": "1.0", "uptime_s": 5.0}, **drive.engine.status(drive.now_s)}


def test_a_crowd_fits_and_the_chosen_one_is_always_in_sight() -> None:
    drive = Drive(engine())
    for at in range(40):
        drive.connect(at + 1)
        drive.call(at + 1, "register", model=f"a-model-with-quite-a-long-name-{at:02}", quota=MB)
    view = View()
    view.take(state(drive))
    view.sort = "name"
    for _ in range(60):
        lines = shown(view)
        assert len(lines) <= 24
        assert all(len(line) <= 80 for line in lines)
        assert any(view.chosen[:8] in line for line in lines)
        view.choose(1)
    assert view.chosen.endswith("39")
    assert len(shown(view, 60, 6)) >= 6, "a small one shows what it can"


def test_what_is_not_known_is_a_question_mark_and_who_waits_is_told() -> None:
    drive = Drive(engine())
    drive.loaded(7, "greedy", 100 * MB)
    drive.connect(8)
    worker = drive.call(8, "register", model="late", quota=1999 * MB)["worker"]
    drive.ask(8, "reserve", worker=worker, wait_s=60.0)
    drive.look({7: None, 8: 30 * MB}, safe=None)
    view = View()
    view.take(state(drive))
    text = "\n".join(shown(view))
    [greedy] = [line for line in text.splitlines() if line.startswith("greedy")]
    assert greedy.split()[3:6] == ["?", "?", "?"]
    assert "1 wait: late 2.0G" in text
    assert "free ?, bound by" in text


def test_a_minute_of_what_was_held_is_a_sparkline() -> None:
    drive = Drive(engine())
    drive.loaded(7, "llama", 100 * MB)
    view = View()
    for held in (0, 50, 100):
        for _ in range(20):
            drive.look({7: held * MB})
            view.take(state(drive))
    [line] = [line for line in shown(view, 104) if line.startswith("llama")]
    spark = line.split()[-1]
    assert [spark[0], spark[len(spark) // 2], spark[-1]] == ["▁", "▅", "█"]
    assert "100.0M" in line.split()[5]
