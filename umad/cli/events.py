"""``umadctl events``: what the daemon decided lately, a line each, and what comes from now on."""

import json
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from types import FrameType
from typing import Any, Final

import click

from umad.cli.params import DURATION
from umad.client import Client, DaemonUnavailable, connect
from umad.client.link import Link
from umad.events import Event, in_words
from umad.units import printable

_ASK_EVERY_S: Final = 1.0  # where no notification came: that one may have been dropped
_STYLES: Final = {"warning": "yellow", "error": "red"}


def as_line(event: Event) -> str:
    """The local time, how serious it is, and what happened."""
    at = datetime.fromtimestamp(event["unix_s"]).strftime("%b %d %H:%M:%S")
    level = printable(str(event.get("level", "")))
    style = _STYLES.get(level)
    _, text = in_words(event)
    return f"{at} {click.style(f'{level:7}', fg=style)} {click.style(text, fg=style)}"


def of_worker(event: Event, name: str) -> bool:
    """Whether a worker, or an instance of a model, is in it."""
    fields = (str(event.get(key, "")) for key in ("worker", "workers", "for_worker"))
    named = {one for field in fields for one in field.split(",")}
    return any(name in (one, one.partition("/")[0]) for one in named)


def fetch(client: Client, link: Link, since: int = 0) -> list[dict[str, Any]]:
    """The events after ``since`` that the daemon still has, oldest first; they come in parts.

    Args:
        client: asks.
        link: the connection: numbers count only within the daemon's life that gave them.
        since: the last one known.

    Raises:
        DaemonUnavailable: this connection has ended.
    """
    found: list[dict[str, Any]] = []
    params = {"since": since}
    while part := client.call_on(link, "events", params)["events"]:
        found[:0] = part
        params["before"] = part[0]["seq"]
        if part[0]["seq"] <= since + 1:
            break
    return found


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Go on with what happens from now on.")
@click.option("--since", "since_s", type=DURATION, metavar="TIME", help='Not older, like "10min".')
@click.option("--worker", metavar="NAME", help="Only those of a worker, or of a model's workers.")
@click.option("--json", "as_json", is_flag=True, help="Print one object a line, for programs.")
@click.pass_obj
def events(
    socket: str | None, since_s: float | None, worker: str | None, *, follow: bool, as_json: bool
) -> None:
    """Show what umad decided lately, oldest first.

    It keeps the last 256 decisions since its start; the journal has the others:
    journalctl -u umad. Ctrl-C ends --follow.
    """
    oldest = 0.0 if since_s is None else time.time() - since_s
    plain = bool(os.environ.get("NO_COLOR"))

    def show(found: list[dict[str, Any]]) -> None:
        for event in found:
            if event["unix_s"] < oldest or not (worker is None or of_worker(event, worker)):
                continue
            line = json.dumps(event) if as_json else as_line(event)
            click.echo(line, color=False if plain else None)

    bell = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        with connect(socket, name="umadctl") as client:
            if not follow:
                show(fetch(client, client.current_link()))
                return
            client.on("event", lambda _: os.eventfd_write(bell, 1))
            with _interrupted(bell) as interrupted:
                for found in _follow(client, bell, interrupted):
                    show(found)
    finally:
        os.close(bell)


@contextmanager
def _interrupted(bell: int) -> Iterator[threading.Event]:
    """Set by Ctrl-C, which rings the bell: an exception could be raised where it is swallowed.

    A second one ends the program, wherever it is.
    """
    interrupted = threading.Event()

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        interrupted.set()
        os.eventfd_write(bell, 1)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _follow(
    client: Client, bell: int, interrupted: threading.Event
) -> Iterator[list[dict[str, Any]]]:
    """What has happened and happens; outlives the daemon, and ends when nobody reads any more.

    Args:
        client: asks.
        bell: an eventfd that a notification rings.
        interrupted: ends it, too; who sets it rings the bell.
    """
    waits = select.poll()
    waits.register(bell, select.POLLIN)
    waits.register(1, 0)  # only that the reader has gone: `umadctl events -f | head`
    known, generation, away = 0, None, False
    while not interrupted.is_set():
        try:
            link = client.current_link()
            if generation not in (None, link.generation):
                click.echo("umad was restarted; its events begin anew", err=True)
                known = 0
            elif away:
                click.echo("umad answers again", err=True)
            generation, away = link.generation, False
            if found := fetch(client, link, known):
                known = found[-1]["seq"]
                yield found
        except DaemonUnavailable as error:
            if not away:
                click.echo(f"waiting for umad: {error.message}", err=True)
            away = True
        ready = dict(waits.poll(_ASK_EVERY_S * 1000))
        if 1 in ready:
            return
        if bell in ready:
            os.eventfd_read(bell)
