"""``umadctl events``: what the daemon decided lately, a line each, and what it decides from now on.

Also puts an event into words, for whoever shows one (``in_words``).
"""

import json
import os
import select
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final

import click

from umad.cli.params import DURATION
from umad.client import Client, DaemonUnavailable, connect
from umad.client.link import Link
from umad.units import format_bytes, format_duration, printable

Event = Mapping[str, Any]

_ASK_EVERY_S: Final = 1.0  # where no notification came: that one may have been dropped
_STYLES: Final = {"warning": "yellow", "error": "red"}
_HEAD: Final = ("seq", "name", "unix_s", "level", "worker", "pid", "comm")

# The fields stand with their units; one that an event lacks is "?".
_WORDS: Final[Mapping[str, str]] = {
    "registered": "{worker} registered: quota {quota_bytes}, peak {peak_bytes}",
    "rejoined": "{worker} is back after its connection was lost",
    "loaded": "{worker} has loaded: {measured_bytes} measured, {booked_bytes} booked",
    "launched": "{worker} was started under quota: {booked_bytes} booked",
    "adopted": "{worker} ({unit}) is under quota now: it holds {held_bytes}",
    "disowned": "{worker} goes on without a quota: {freed_bytes} free again",
    "unloaded": "{worker} gave its model back: {bytes}",
    "left": "{worker} has left: {why}",
    "exited": "pid {pid} ({workers}) has ended: {freed_bytes} free again",
    "refused": "{worker} was refused {asked_bytes} to {what}: {why}",
    "revoked": "{worker} holds {measured_bytes}, may hold {limit_bytes}: told to stop",
    "complied": "{worker} is within {limit_bytes} again, after {after_s}",
    "stopped": "{worker} was stopped ({fence}): it held {measured_bytes} of {limit_bytes}; "
    "gone {seen_to_gone_s} after it was seen",
    "unkillable": "{worker} (pid {pid}) is still there {after_s} after SIGKILL",
    "orphaned": "pid {pid} of {worker} has ended and its children hold memory: they are stopped",
    "evicting": "{worker} is asked to go{for}: {reason}; {booked_bytes} booked, idle {idle_s}",
    "evict_cancelled": "{worker} may stay",
    "evict_missed": "{worker} was asked to go and has not gone in time",
    "pinned": "{worker} is pinned: never evicted for another model",
    "unpinned": "{worker} is not pinned any more",
    "quota_set": "{worker} may hold {quota_bytes} now, it was {was_bytes}",
    "leaked": "{worker} forgot to give back {bytes}",
    "leaking": "{worker} said it gave its memory back and keeps {held_bytes}",
    "lease_expired": "a lease of {worker} ended by its deadline: {bytes}",
    "init_lock_expired": "{worker} held the init mutex for too long",
    "prediction_exceeded": "a forward of {worker} took {took_bytes}, {predicted_bytes} predicted",
    "migrated": "pages of {worker} moved: {swapped_bytes} in swap, {evicted_bytes} out of the "
    "GPU's memory",
    "admission_closed": "the machine is below its reserve: {free_bytes} free of {reserve_bytes}; "
    "nothing is granted",
    "admission_opened": "the reserve is free again: {free_bytes}",
    "shrinking": "all workers are asked to shrink: {free_bytes} free of {reserve_bytes}",
    "oom_kill": "the kernel's OOM killer was here before umad: {count} killed",
    "drained": "no load begins from now on (uid {uid})",
    "resumed": "loads may begin again (uid {uid})",
    "reloaded": "the configuration was read again",
    "page_found": "pid {pid} is back after a restart: {accounts} accounts of {limit_bytes}",
    "accounts_abandoned": "nobody came back for pid {pid}: {limit_bytes} free again",
    "fragmentation_risk": "free memory lies in crumbs: {reason}",
}
_ASKED_FOR: Final = {"reserve": "load", "admit": "answer a request", "init_lock": "load"}


def in_words(event: Event) -> str:
    """What happened, in one line that speaks to no terminal."""
    shown = _Shown({key: _value(key, value) for key, value in event.items()})
    if (text := _WORDS.get(event["name"])) is not None:
        shown["for"] = f" for {shown['for_worker']}" if event.get("for_worker") else ""
        if event["name"] == "refused":
            shown["what"] = _ASKED_FOR.get(shown["what"], shown["what"])
            times = event.get("times", 1)
            text += f" ({times} times)" if isinstance(times, int) and times > 1 else ""
        return printable(text.format_map(shown))
    name = f"{event['name'].replace('_', ' ')} {event.get('worker', '')}".rstrip()
    rest = (f"{key}={value}" for key, value in shown.items() if key not in _HEAD)
    return printable("  ".join([name, *rest]))


class _Shown(dict[str, str]):
    """Fields as text; one that is not there is a question mark."""

    def __missing__(self, key: str) -> str:
        return "?"


def _value(key: str, value: object) -> str:
    if value is None:
        return "?"
    if isinstance(value, int) and key.endswith("bytes"):
        return format_bytes(value)
    if isinstance(value, int | float) and key.endswith("_s"):
        return format_duration(value)
    return str(value)


def as_line(event: Event) -> str:
    """The local time, how serious it is, and what happened."""
    at = datetime.fromtimestamp(event["unix_s"]).strftime("%b %d %H:%M:%S")
    level = printable(str(event.get("level", "")))
    style = _STYLES.get(level)
    text = in_words(event)
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
            for found in _follow(client, bell):
                show(found)
    except KeyboardInterrupt:
        return
    finally:
        os.close(bell)


def _follow(client: Client, bell: int) -> Iterator[list[dict[str, Any]]]:
    """What has happened and happens; outlives the daemon, and ends when nobody reads any more.

    Args:
        client: asks.
        bell: an eventfd that a notification rings.
    """
    waits = select.poll()
    waits.register(bell, select.POLLIN)
    waits.register(1, 0)  # only that the reader has gone: `umadctl events -f | head`
    known, generation, away = 0, None, False
    while True:
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
