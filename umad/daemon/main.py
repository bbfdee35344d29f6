"""The daemon's entry: flags, configuration, preflight, exit codes; builds every part, alone.

Exit codes: 0 ended as asked, 69 the machine is not set up (preflight), 70 broken invariant,
78 configuration.  systemd does not restart after 69 and 78: the same would happen again.
"""

import argparse
import asyncio
import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from umad import __version__, config
from umad.config import Settings
from umad.core.access import Access
from umad.daemon import listen, logs, up
from umad.daemon.loop import Daemon
from umad.errors import ConfigError, PreflightError, UmadError
from umad.host import kernel, peercred, procs, store
from umad.host.memory import MachineProbe
from umad.host.notify import Notifier, listen_fds
from umad.values import SYSTEM_POOL

DEFAULT_CONFIG: Final = Path("/etc/umad/umad.toml")


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line said."""

    config: Path
    config_given: bool
    permissive: bool
    dry_run: bool
    log_format: logs.Format


def main(argv: list[str] | None = None) -> int:
    """Run ``umad``; returns the exit code."""
    arguments = _parser().parse_args(argv)
    options = Options(
        config=Path(arguments.config or DEFAULT_CONFIG).absolute(),
        config_given=arguments.config is not None,
        permissive=arguments.permissive or (arguments.command == "up" and not arguments.strict),
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
        warnings = preflight(settings, permissive=options.permissive)
        if arguments.preflight:
            sys.stdout.write("\n\n".join(warnings) + "\n" if warnings else "nothing to mend\n")
            return 0
        if arguments.command == "up":
            return up.run(options.config, settings, _for_daemon(arguments, options))
        return asyncio.run(_serve(settings, options, warnings))
    except UmadError as error:
        return logs.exit_with(error.exit_code, f"umad: {error.message}")


def _for_daemon(arguments: argparse.Namespace, options: Options) -> list[str]:
    """The flags of 'umad up' that are the daemon's."""
    flags = [f"--log-format={options.log_format}"]
    flags += ["--permissive"] if options.permissive else []
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


def preflight(settings: Settings, *, permissive: bool) -> tuple[str, ...]:
    """Judge the machine before anything is granted on it.

    Returns:
        The findings, as texts for people.

    Raises:
        PreflightError: a hard finding and not permissive, or memory that cannot be believed.
    """
    faults = MachineProbe(settings.memory.root, settings.memory.gpu).check()
    if faults:
        raise PreflightError("\n  ".join(["memory on this machine cannot be believed:", *faults]))
    findings = kernel.preflight(kernel.read_parameters(settings.memory.root))
    hard = [finding for finding in findings if finding.severity == "hard"]
    if hard and not permissive:
        raise PreflightError(
            "this machine is not set up for umad; mend it with these commands, or start with "
            "--permissive:\n" + "\n".join(_describe(finding) for finding in hard)
        )
    return tuple(_describe(finding) for finding in findings)


def _describe(finding: kernel.Finding) -> str:
    return (
        f"{finding.name} is {finding.found}, should be {finding.should}: {finding.why}\n"
        f"    now:      {finding.fix_now}\n"
        f"    for good: echo '{finding.fix_forever}' >> {kernel.DROP_IN}"
    )


async def _serve(settings: Settings, options: Options, warnings: tuple[str, ...]) -> int:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()
    # First of all: from here on a signal leaves nothing behind.
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, _end_once, ended)
    log = logs.configure(options.log_format)
    if not procs.lock_memory():
        log.info("memory_not_locked", why="RLIMIT_MEMLOCK; the daemon can be swapped out")
    for warning in warnings:
        log.warning("preflight", finding=warning.replace("\n", "; "))
    access = Access(
        uid=os.getuid(),
        worker_gid=peercred.group_id(settings.daemon.group),
        admin_gid=peercred.group_id(settings.daemon.admin_group),
    )
    path = Path(settings.daemon.socket)
    passed = listen_fds(os.environ)
    listener = None if passed else listen.bind(path, access.worker_gid)
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
            warnings=warnings,
            dry_run=options.dry_run,
            ended=ended,
        )
        return await daemon.run(listen.adopt(passed) if listener is None else listener.socket)
    finally:
        if listener is not None:
            listener.close()


def _end_once(ended: asyncio.Future[int]) -> None:
    if not ended.done():
        ended.set_result(0)


def _parser() -> argparse.ArgumentParser:
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
        "--permissive", action="store_true", help="start though the machine is not set up"
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
