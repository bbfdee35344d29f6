"""``umad-serve``: the HTTP front with its engine behind it.

Builds every part and owns the process: flags, signals, the listening socket, systemd, exit codes.
Exit codes: 0 ended as asked, 1 the address cannot be had, 2 wrong flags, 78 the configuration
cannot be used.  Imports nothing heavy before the flags are read; torch never.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from umad import __version__
from umad.config import Settings, parse
from umad.errors import ConfigError
from umad.serve.logs import FORMATS

if TYPE_CHECKING:
    import uvicorn

DEFAULT_CONFIG: Final = "/etc/umad/umad.toml"


def main(arguments: list[str] | None = None) -> int:
    """Run the front until SIGTERM or SIGINT; returns the exit code."""
    flags = command_line().parse_args(arguments)
    from umad.serve.supervisor import engine_environment  # structlog is not for --help

    try:
        text = read_config(flags.config)
        settings = check_config(text, flags.config)
        environment = engine_environment(
            os.environ,
            settings.serve.guard,
            on_device=any(model.device != "cpu" for model in settings.models),
        )
    except ConfigError as error:
        print(error.message, file=sys.stderr)  # noqa: T201  for whoever started it
        return error.exit_code
    try:
        listener = _listen(*settings.serve.listen)
    except OSError as error:
        host, port = settings.serve.listen
        print(  # noqa: T201
            f"umad-serve: cannot listen on {host}:{port}: {error.strerror or error}; "
            "end what holds it or change serve.listen",
            file=sys.stderr,
        )
        return 1
    from umad.serve import logs

    logs.configure(flags.log_format, "umad-serve")
    asyncio.run(_serve(flags, text, settings, listener, environment))
    return 0


def read_config(config: str) -> str:
    """The text of a configuration file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return Path(config).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ConfigError(f"{config}: cannot be read: {why}; name another with --config") from error


def check_config(text: str, source: str) -> Settings:
    """The settings in a configuration's text.

    Raises:
        ConfigError: they cannot be used; the message says where and why.
    """
    return parse(text, source=source, path_exists=lambda path: Path(path).exists())


def command_line() -> argparse.ArgumentParser:
    """Flags and arguments; the manual page is made from them, too."""
    parser = argparse.ArgumentParser(
        prog="umad-serve", description="The OpenAI-compatible inference server of umad."
    )
    parser.add_argument("--config", default=DEFAULT_CONFIG, help="default: %(default)s")
    parser.add_argument("--log-format", choices=FORMATS, default="auto", help="default: auto")
    parser.add_argument("--version", action="version", version=f"umad {__version__}")
    return parser


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024)


def kept(text: str) -> int:
    """A file descriptor that holds the configuration as it was read.

    Every engine reads this one: the file may change long before somebody reloads it, and a new
    engine must not know other models than the front.
    """
    fd = os.memfd_create("umad.toml")
    with open(fd, "wb", closefd=False) as file:
        file.write(text.encode())
    return fd


async def _serve(
    flags: argparse.Namespace,
    text: str,
    settings: Settings,
    listener: socket.socket,
    environment: dict[str, str],
) -> None:
    import structlog

    from umad.host.notify import Notifier
    from umad.serve.app import create_app
    from umad.serve.http import make_server
    from umad.serve.link import EngineLink, ModelState
    from umad.serve.reload import Reloader
    from umad.serve.supervisor import Supervisor, engine_command

    log = structlog.get_logger()
    host, port = listener.getsockname()[:2]
    log.info("serve.listening", host=host, port=port, models=[m.name for m in settings.models])
    notifier = Notifier()
    link = EngineLink(settings)
    config_fd = kept(text)
    command = engine_command(config_fd, flags.log_format)
    supervisor = Supervisor(link, command, environment, (config_fd,))
    app = create_app(settings, link)
    reloader = Reloader(flags.config, text, settings, config_fd, app.state.front, link)
    reloads: set[asyncio.Task[None]] = set()

    def tell_status() -> None:
        ready, models = link.ready()
        notifier.status(f"{ready}/{models} models ready")

    def on_change(model: str, state: ModelState) -> None:
        supervisor.note_state(model, state)
        tell_status()

    async def on_tick() -> None:
        # READY once the socket is served; systemd takes a second one for what it is, nothing.
        # WATCHDOG comes from the loop that serves, so a hung loop does not look well.
        notifier.ready()
        notifier.watchdog()
        tell_status()

    def reload() -> None:
        task = asyncio.ensure_future(reloader.reload())
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    link.on_change = on_change
    link.on_reloaded = reload
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
    server = make_server(app, on_tick)
    with _signals_end(server):
        supervision = asyncio.ensure_future(supervisor.run())
        # A supervisor that fails is our bug: end, so that systemd starts all of it afresh.
        supervision.add_done_callback(lambda _: setattr(server, "should_exit", True))
        await server.serve(sockets=[listener])
        notifier.stopping()
        supervisor.stop()
        await supervision
    log.info("serve.ended")


@contextlib.contextmanager
def _signals_end(server: "uvicorn.Server") -> Iterator[None]:
    """SIGTERM and SIGINT end the server, the engine after it, and then this program with 0.

    uvicorn catches both while it serves and raises them again when it has ended, for a program
    that has nothing left to do; ours still has its engine to stop, so the echo lands here.
    """
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, setattr, server, "should_exit", True)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


if __name__ == "__main__":
    sys.exit(main())
