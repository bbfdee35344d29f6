"""umadctl: the operator's commands, each a thin call over the client; ``bench`` asks a server.

Exit codes: 0 done, 1 the doctor found what keeps umad from starting, or bench got no answer,
2 wrong usage, 3 no daemon, 4 not allowed, 78 a configuration with problems.
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
from umad.cli import admin, adopt, bench, events, render
from umad.cli import doctor as report
from umad.cli import fit as costs
from umad.cli import report as hour
from umad.cli import snapshot as bundle
from umad.cli import top as live
from umad.client import UmadError, connect
from umad.errors import ConfigError
from umad.host import preflight
from umad.settings import Settings

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


@cli.command()
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print everything for programs.")
@click.option(
    "--picture",
    metavar="FILE.svg|FILE.png",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Draw what was measured against the formula.",
)
@click.pass_obj
def fit(
    socket: str | None,
    model: str,
    as_json: bool,  # noqa: FBT001  click passes flags so
    picture: Path | None,
) -> None:
    """Show what a model's forwards took, and the formula that predicts it."""
    if picture is not None and picture.suffix not in costs.PICTURES:
        raise click.BadParameter(
            f"{picture} must end in {' or '.join(costs.PICTURES)}", param_hint="--picture"
        )
    with connect(socket, name="umadctl") as client:
        answer: dict[str, Any] = client.call("cost", {"model": model})
    if as_json:
        click.echo(json.dumps(costs.as_values(answer), indent=2))
    else:
        console = Console(width=None if sys.stdout.isatty() else 80, highlight=False)
        for part in costs.as_text(answer):
            console.print(part)
    if picture is not None:
        costs.draw(answer, picture)


@cli.command("check-config")
@click.argument("file", type=click.Path(path_type=Path), default=DEFAULT_CONFIG)
def check_config(file: Path) -> None:
    """Judge a configuration file; change nothing."""
    settings = _settings(file)
    names = ", ".join(model.name for model in settings.models) or "no models"
    click.echo(f"{file}: no problem; {names}")


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings for programs.")
@click.option(
    "--root",
    type=click.Path(exists=True, file_okay=False),
    default="/",
    help="Judge another machine's files: a folder that holds proc/ and sys/.",
)
@click.option(
    "--config",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=f"The configuration to judge with.  [default: {DEFAULT_CONFIG}]",
)
@click.pass_context
def doctor(
    context: click.Context,
    as_json: bool,  # noqa: FBT001  click passes flags so
    root: str,
    file: Path | None,
) -> None:
    """Judge this machine: what keeps umad from its promises, and what mends it.

    Needs no daemon. Exits with 1 when something keeps umad from starting.
    """
    settings, findings = Settings(), []
    wanted = file or Path(DEFAULT_CONFIG)
    if file or wanted.exists():
        try:
            settings = _settings(wanted)
        except ConfigError as error:
            check = f"umadctl check-config {wanted}"
            findings.append(
                preflight.Finding(
                    "config.file",
                    "hard",
                    "cannot be used",
                    "without a problem",
                    f"{error.message.splitlines()[0]} The rest was judged with the defaults.",
                    check,
                    permissible=False,
                )
            )
    here = root == "/"
    state, problem = report.daemon_state(context.obj) if here else (None, "another machine's files")
    workers = [process["pid"] for process in state["processes"]] if state else []
    facts = preflight.read(root, settings.memory.gpu, workers)
    findings += preflight.judge(facts, settings.memory)
    if as_json:
        click.echo(json.dumps(report.as_values(findings, state, problem), indent=2))
    else:
        for line in report.as_lines(findings, state, problem):
            click.echo(line)
    if any(finding.severity == "hard" for finding in findings):
        context.exit(1)


@cli.command()
@click.option(
    "-o",
    "--output",
    "target",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="[default: umad-snapshot-HOST-DATE.tar.gz]",
)
@click.pass_obj
def snapshot(socket: str | None, target: Path | None) -> None:
    """Write all that a bug report needs into one archive.

    The daemon's settings, books, events and last minute, and the files it reads; no prompts, no
    environments, no command lines. Works without a daemon, too. Nothing is sent anywhere.
    """
    path = target or Path(f"{bundle.default_name()}.tar.gz")
    made = bundle.gather(socket)
    try:
        bundle.write(made, path)
    except FileExistsError as error:
        raise click.UsageError(f"{path} is there already; choose another name with -o") from error
    except OSError as error:
        raise click.UsageError(f"cannot write {path}: {error.strerror}") from error
    for line in bundle.described(made, path):
        click.echo(line)


def _settings(file: Path) -> Settings:
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    return config.parse(
        text,
        source=str(file),
        path_exists=os.path.isdir,
        physical_bytes=psutil.virtual_memory().total,
    )


for command in (
    bench.bench,
    adopt.run,
    adopt.adopt,
    adopt.disown,
    events.events,
    hour.report,
    live.top,
    *admin.COMMANDS,
):
    cli.add_command(command)


def main() -> int:
    """The console script; turns umad's errors into one message and an exit code."""
    try:
        # Without standalone mode click hands the code of context.exit() back.
        code = cli(standalone_mode=False)
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
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
