"""Engines of other kinds under umad's contract: the commands ``run``, ``adopt`` and ``disown``."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from umad.cli.params import DURATION, SIZE
from umad.cli.run import Order
from umad.cli.run import run as run_program
from umad.client import connect
from umad.errors import Recovering
from umad.units import format_bytes

F = TypeVar("F", bound=Callable[..., Any])


def _contract(command: F) -> F:
    """The options that both kinds share."""
    options = [
        click.option("--quota", type=SIZE, required=True, help="Bytes it may hold, GPU included."),
        click.option("--peak", type=SIZE, help="Bytes it may hold while it starts.  [quota]"),
        click.option(
            "--settle",
            type=DURATION,
            default="60s",
            show_default=True,
            help="It has started once it has held half its quota, is within it, and has not grown "
            "for this long.",
        ),
        click.option("--priority", type=click.IntRange(-1000, 1000), default=0),
        click.option("--pool", default="system", show_default=True, help="Where it is booked."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _params(**given: Any) -> dict[str, Any]:
    return {key: value for key, value in given.items() if value is not None}


# Options after the program's name are the program's, with or without "--".
@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--name", required=True, help="What it is called in umadctl status.")
@_contract
@click.option(
    "--wait",
    type=DURATION,
    default="60s",
    show_default=True,
    help="How long to wait for room.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def run(
    context: click.Context,
    name: str,
    quota: int,
    peak: int | None,
    settle: float,
    priority: int,
    pool: str,
    wait: float,
    command: tuple[str, ...],
) -> None:
    """Run a program under a quota: umadctl run --name X --quota 40GiB -- COMMAND...

    Its memory is booked before it starts. All that it and its children hold counts, GPU pages
    included; over its quota it is killed, alone. It must stay in the foreground: what it leaves
    behind when it ends is killed too. Signals pass through, and so does its exit status: 128 + N
    where signal N ended it, 125 where it was not started, 126 and 127 where it cannot be.
    """
    registration = _params(
        model=name, quota=quota, peak=peak, settle_s=settle, priority=priority, pool=pool
    )
    context.exit(run_program(context.obj, Order(command, registration, wait)))


@click.command()
@click.option("--unit", required=True, help="A system unit, like llama-cpp.service.")
@click.option("--name", help="What it is called in umadctl status.  [the unit's]")
@_contract
@click.pass_obj
def adopt(
    socket: str | None,
    unit: str,
    name: str | None,
    quota: int,
    peak: int | None,
    settle: float,
    priority: int,
    pool: str,
) -> None:
    """Put a running systemd unit under a quota, now and whenever it starts until the next boot.

    For good: a [[worker]] table in umad.toml. 'umadctl disown NAME' ends it.
    """
    if "." not in unit:
        unit += ".service"
    name = name or unit.rpartition(".")[0]
    params = _params(
        model=name,
        unit=unit,
        quota=quota,
        peak=peak,
        settle_s=settle,
        priority=priority,
        pool=pool,
    )
    with connect(socket, name="umadctl") as client:
        try:
            told = client.call("adopt", params)
        except Recovering as error:  # the daemon has just started; it will not be long
            client.closing.wait(error.retry_after_s)
            told = client.call("adopt", params)
    click.echo(
        f"{name}: {unit} (pid {told['pid']}) holds {format_bytes(told['held'])}, "
        f"{format_bytes(told['booked'])} are booked"
    )


@click.command()
@click.argument("name")
@click.pass_obj
def disown(socket: str | None, name: str) -> None:
    """End the quota of an adopted unit; it runs on, and nothing is booked for it."""
    with connect(socket, name="umadctl") as client:
        told = client.call("disown", {"name": name})
    click.echo(f"{name}: {format_bytes(told['freed'])} are no longer booked")
