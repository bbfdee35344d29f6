"""umadctl: the operator's commands, each a thin call over the client.

Exit codes: 0 done, 2 wrong usage, 3 no daemon, 4 not allowed, 78 a configuration with problems.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, Final

import click
import psutil
from rich.console import Console

from umad import __version__, config
from umad.cli import render
from umad.client import UmadError, connect
from umad.errors import ConfigError

DEFAULT_CONFIG: Final = "/etc/umad/umad.toml"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="umadctl")
@click.option(
    "--socket",
    metavar="PATH",
    envvar="UMAD_SOCKET",
    help="Where the daemon listens.  [default: /run/umad/umad.sock]",
)
@click.pass_context
def cli(context: click.Context, socket: str | None) -> None:
    """Look at umad, the memory contract of this machine."""
    context.obj = socket


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print the whole state for programs.")
@click.pass_obj
def status(socket: str | None, as_json: bool) -> None:  # noqa: FBT001  click passes flags so
    """Show who holds how much memory."""
    with connect(socket, name="umadctl") as client:
        state: dict[str, Any] = client.call("status")
    if as_json:
        click.echo(json.dumps(state, indent=2))
        return
    # A pipe has no width of its own; 80 columns is what a terminal has at least.
    console = Console(width=None if sys.stdout.isatty() else 80, highlight=False)
    for part in render.status(state):
        console.print(part)


@cli.command("check-config")
@click.argument("file", type=click.Path(path_type=Path), default=DEFAULT_CONFIG)
def check_config(file: Path) -> None:
    """Judge a configuration file; change nothing."""
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    settings = config.parse(
        text,
        source=str(file),
        path_exists=os.path.isdir,
        physical_bytes=psutil.virtual_memory().total,
    )
    names = ", ".join(model.name for model in settings.models) or "no models"
    click.echo(f"{file}: no problem; {names}")


def main() -> int:
    """The console script; turns umad's errors into one message and an exit code."""
    try:
        cli(standalone_mode=False)
    except click.exceptions.Exit as request:
        return request.exit_code
    except click.Abort:
        return 130
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except UmadError as error:
        click.echo(f"umadctl: {error.message}", err=True)
        return error.exit_code
    except BrokenPipeError:
        # `umadctl status | head -1` is no error; keep the interpreter from saying so at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
