"""The daemon's entry: flags, configuration, preflight, exit codes; builds every part, alone.

Exit codes: 0 ended as asked, 65 an archive that cannot be replayed, 69 the machine is not set up
(preflight), 70 broken invariant, 78 configuration.  systemd does not restart after 69 and 78: the
same would happen again.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from umad import __version__, config
from umad.config import Settings
from umad.core.access import Access
from umad.daemon import exporter, listen, logs, up
from umad.daemon.loop import Daemon
from umad.daemon.pages import is_page
from umad.errors import BadArchive, ConfigError, PreflightError, UmadError
from umad.host import peercred, preflight, procs, store
from umad.host.history import History
from umad.host.memory import MachineProbe
from umad.host.notify import Notifier, listen_fds
from umad.host.pressure import measure_fill_rate
from umad.units import printable
from umad.values import SYSTEM_POOL

DEFAULT_CONFIG: Final = Path("/etc/umad/umad.toml")


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line said."""

    config: Path
    config_given: bool
    permissive: frozenset[str]
    dry_run: bool
    log_format: logs.Format


def main(argv: list[str] | None = None) -> int:
    """Run ``umad``; returns the exit code."""
    arguments = command_line().parse_args(argv)
    if arguments.replay is not None:
        return _replay(Path(arguments.replay))
    options = Options(
        config=Path(arguments.config or DEFAULT_CONFIG).absolute(),
        config_given=arguments.config is not None,
        permissive=_permissive(arguments),
        dry_run=arguments.dry_run,
        log_format=arguments.log_format,
    )
    try:
        settings = load_settings(options)
        if arguments.root is not None:
            memory = replace(settings.memory, root=str(Path(arguments.root).absolute()))
            settings = replace(settings, memory=memory)
        if arguments.check_config:
            there = "" if options.config.exists() else " (there is no such file: the defaults)"
            count = len(settings.models)
            sys.stdout.write(f"{options.config}{there}: {count} models, no problem\n")
            return 0
        if arguments.preflight:
            return _preflight_only(settings, options.permissive)
        looked = pass_preflight(settings, options.permissive)
        if arguments.command == "up":
            return up.run(options.config, settings, _for_daemon(arguments, options))
        return asyncio.run(_serve(settings, options, looked))
    except UmadError as error:
        return logs.exit_with(error.exit_code, f"umad: {error.message}")


def _replay(source: Path) -> int:
    # Only now: the daemon itself has no use for it.
    from umad.daemon.replay import replay

    try:
        replay(source, sys.stdout)
    except BadArchive as error:
        sys.stdout.flush()
        return logs.exit_with(error.exit_code, f"umad: {printable(error.message)}")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _for_daemon(arguments: argparse.Namespace, options: Options) -> list[str]:
    """The flags of 'umad up' that are the daemon's."""
    flags = [f"--log-format={options.log_format}"]
    flags += [f"--permissive={','.join(options.permissive)}"] if options.permissive else []
    flags += ["--dry-run"] if options.dry_run else []
    return flags + ([f"--root={arguments.root}"] if arguments.root else [])


def load_settings(options: Options) -> Settings:
    """Read and check the configuration file; without one, the defaults.

    Raises:
        ConfigError: the file cannot be read or used.
    """
    try:
        text = options.config.read_text()
    except FileNotFoundError as error:
        if options.config_given:
            raise ConfigError(f"there is no file {options.config}") from error
        text = ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {options.config}: {error}") from error
    snapshot = MachineProbe("/", gpu="none").sample((), 0.0)
    return config.parse(
        text,
        source=str(options.config),
        path_exists=os.path.isdir,
        physical_bytes=snapshot.pools[SYSTEM_POOL].capacity.value,
    )


def _permissive(arguments: argparse.Namespace) -> frozenset[str]:
    """The names that ``--permissive`` gave; ``umad up``, the first try, forgives all by itself."""
    if arguments.permissive is not None:
        return frozenset(arguments.permissive)
    first_try = arguments.command == "up" and not arguments.strict
    return frozenset({preflight.ALL} if first_try else ())


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in (preflight.ALL, *preflight.PERMISSIBLE):
            known = ", ".join(preflight.PERMISSIBLE)
            raise argparse.ArgumentTypeError(f"{name!r} is no check to forgive; those are: {known}")
    return names


@dataclass(frozen=True, slots=True)
class Passed:
    """The preflight's findings that let the daemon start: what was forgiven, and advice."""

    forgiven: tuple[preflight.Finding, ...] = ()
    advice: tuple[preflight.Finding, ...] = ()


def pass_preflight(settings: Settings, permissive: frozenset[str]) -> Passed:
    """Judge the machine before anything is granted on it.

    Raises:
        PreflightError: a hard finding that was not forgiven; the message holds the commands that
            mend it.
    """
    facts = preflight.read(settings.memory.root, settings.memory.gpu)
    findings = preflight.judge(facts, settings.memory)
    passed = Passed(
        tuple(preflight.forgiven(findings, permissive)),
        tuple(finding for finding in findings if finding.severity == "advice"),
    )
    stops = [one for one in findings if one.severity == "hard" and one not in passed.forgiven]
    if not stops:
        return passed
    can = ",".join(dict.fromkeys(one.name for one in stops if one.permissible))
    other_way = f", or start with --permissive={can}" if can else ""
    listed = "\n".join(preflight.describe(finding) for finding in stops)
    raise PreflightError(
        f"this machine is not set up for umad; mend it with these commands{other_way}:\n{listed}"
    )


def _preflight_only(settings: Settings, permissive: frozenset[str]) -> int:
    passed = pass_preflight(settings, permissive)
    found = [*passed.forgiven, *passed.advice]
    text = "\n\n".join(preflight.describe(finding) for finding in found)
    sys.stdout.write(f"{text or 'nothing to mend'}\n")
    return 0


async def _serve(settings: Settings, options: Options, looked: Passed) -> int:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()
    # First of all: from here on a signal leaves nothing behind.
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, _end_once, ended)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)  # until there is something to reload
    log = logs.configure(options.log_format)
    if not procs.lock_memory():
        log.info("memory_not_locked", why="RLIMIT_MEMLOCK; the daemon can be swapped out")
    for finding in looked.forgiven:
        log.warning("preflight", finding=finding.summary, why=finding.why, now=finding.fix_now)
    for finding in looked.advice:
        log.info("preflight", finding=finding.summary, why=finding.why, now=finding.fix_now)
    access = Access(
        uid=os.getuid(),
        worker_gid=peercred.group_id(settings.daemon.group),
        admin_gid=peercred.group_id(settings.daemon.admin_group),
    )
    path = Path(settings.daemon.socket)
    passed = listen_fds(os.environ)
    sockets = [given.fd for given in passed if not is_page(given)]
    listener = None if sockets else listen.bind(path, access.worker_gid)
    scraped = None
    try:
        scraped = exporter.bind(settings.metrics.listen, access.worker_gid)
    except ConfigError as error:  # a guard that cannot be watched still guards
        log.error("metrics_not_served", why=error.message)
    try:
        generation, restarted = store.next_generation(path.parent)
        daemon = Daemon(
            settings,
            probe=MachineProbe(settings.memory.root, settings.memory.gpu),
            access=access,
            notifier=Notifier(os.environ),
            log=log,
            generation=generation,
            restarted=restarted,
            kept=History.open(_state_folder(settings, os.environ)),
            reread=partial(load_settings, options),
            pages=[given for given in passed if is_page(given)],
            preflight={
                "warnings": [finding.summary for finding in looked.forgiven],
                "advice": [finding.summary for finding in looked.advice],
                "permissive": sorted(options.permissive),
            },
            dry_run=options.dry_run,
            fill_rate=measure_fill_rate(),
            ended=ended,
        )
        loop.add_signal_handler(signal.SIGHUP, _reload, daemon)
        control = listen.adopt(sockets) if listener is None else listener.socket
        return await daemon.run(control, None if scraped is None else scraped.socket)
    finally:
        for made in (scraped, listener):
            if made is not None:
                made.close()


def _state_folder(settings: Settings, environment: Mapping[str, str]) -> Path:
    """What is configured, else what systemd made (StateDirectory=), else beside the socket."""
    given = settings.daemon.state or environment.get("STATE_DIRECTORY", "").partition(":")[0]
    return Path(given or Path(settings.daemon.socket).parent)


def _reload(daemon: Daemon) -> None:
    """As ``umadctl reload`` does; whoever sends a signal finds in the log what is wrong."""
    with contextlib.suppress(ConfigError):
        daemon.reload()


def _end_once(ended: asyncio.Future[int]) -> None:
    if not ended.done():
        ended.set_result(0)


def command_line() -> argparse.ArgumentParser:
    """Flags and arguments; the manual page is made from them, too."""
    parser = argparse.ArgumentParser(
        prog="umad",
        description="Memory as a contract: keeps the books and stops who breaks them.",
        epilog="Without a command it runs the daemon, as umad.service does. "
        "'umad up' runs the daemon and umad-serve in this terminal.",
    )
    parser.add_argument("command", nargs="?", choices=["up"], help="run everything here")
    parser.add_argument("--config", metavar="FILE", help=f"default: {DEFAULT_CONFIG}")
    parser.add_argument("--check-config", action="store_true", help="judge the file and end")
    parser.add_argument("--preflight", action="store_true", help="judge the machine and end")
    parser.add_argument(
        "--replay",
        metavar="ARCHIVE",
        help="tell what umad decides on what 'umadctl snapshot' has kept, and end",
    )
    parser.add_argument(
        "--permissive",
        nargs="?",
        type=_names,
        const=[preflight.ALL],
        metavar="NAME[,NAME]",
        help="start though the machine is not set up: in spite of these checks, or of all",
    )
    parser.add_argument(
        "--strict", action="store_true", help="with 'up': refuse to start where the daemon would"
    )
    parser.add_argument("--dry-run", action="store_true", help="decide and tell, but kill nobody")
    parser.add_argument("--root", metavar="DIR", help="read proc/ and sys/ below this folder")
    parser.add_argument(
        "--log-format", choices=["auto", "console", "json", "journal"], default="auto"
    )
    parser.add_argument("--version", action="version", version=f"umad {__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
