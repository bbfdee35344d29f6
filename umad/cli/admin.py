"""What people ask of a running umad: load, evict, pin, unpin, drain, resume, set-quota, reload.

Each says in one line what came of it.  ``load`` and ``evict`` wait for that, unless told not to.
"""

import json
from collections.abc import Callable, Mapping
from threading import Event
from time import monotonic
from typing import Any, Final

import click

from umad.cli.params import DURATION, SIZE
from umad.client import Client, connect
from umad.errors import QuotaDenied, WaitedTooLong
from umad.units import format_bytes

POLL_S: Final = 0.2
_JSON = click.option("--json", "as_json", is_flag=True, help="Print the answer for programs.")
_NOWAIT = click.option("--no-wait", is_flag=True, help="Only ask; do not wait for the end of it.")
_NAME = click.argument("name")


def _say(answer: Mapping[str, Any], text: str, *, as_json: bool) -> None:
    click.echo(json.dumps(answer) if as_json else text)


@click.command()
@_NAME
@click.option(
    "--wait", "wait_s", type=DURATION, default="10min", show_default=True, help="At most so long."
)
@_NOWAIT
@_JSON
@click.pass_obj
def load(socket: str | None, name: str, wait_s: float, *, no_wait: bool, as_json: bool) -> None:
    """Load a model that is not loaded; idle models may have to go for it."""
    with connect(socket, name="umadctl") as client:
        answer = client.call("load", {"name": name})
        if no_wait:
            _say(answer, f"{name}: told to load ({answer['state']})", as_json=as_json)
            return
        worker = _follow(client, name, wait_s, _loaded())
    text = f"{name}: loaded, {format_bytes(worker['measured'] or worker['booked'])}"
    _say(worker, text, as_json=as_json)


def _loaded() -> Callable[[Mapping[str, Any]], bool]:
    """Whether it is loaded; raises once it has been waiting and does not any more."""
    tried = False
    asked_s = monotonic()

    def judge(worker: Mapping[str, Any]) -> bool:
        nonlocal tried
        tried = tried or worker["state"] in ("waiting", "loading")
        if worker["state"] == "cold" and (tried or monotonic() - asked_s > 10):
            raise QuotaDenied(
                f"{worker['name']} was not loaded; the log of umad-serve and its /status say why"
            )
        return bool(worker["state"] == "ready")

    return judge


@click.command()
@_NAME
@_NOWAIT
@_JSON
@click.pass_obj
def evict(socket: str | None, name: str, *, no_wait: bool, as_json: bool) -> None:
    """Unload a model as soon as it is idle; a request for it loads it again."""
    with connect(socket, name="umadctl") as client:
        answer = client.call("evict", {"name": name})
        if no_wait or answer["state"] == "cold":
            told = "not loaded" if answer["state"] == "cold" else "told to go"
            _say(answer, f"{name}: {told}", as_json=as_json)
            return

        def gone(worker: Mapping[str, Any]) -> bool:
            return worker["state"] == "cold" and not worker["booked"]

        worker = _follow(client, name, answer["deadline_s"] + 1, gone)
    _say(worker, f"{name}: unloaded, its memory is back", as_json=as_json)


def _follow(
    client: Client, name: str, wait_s: float, judge: Callable[[Mapping[str, Any]], bool]
) -> dict[str, Any]:
    """Look at a worker until it is as it should be.

    Raises:
        WaitedTooLong: it was not within ``wait_s``; the message says what it waits for.
    """
    pause, deadline_s = Event(), monotonic() + wait_s
    while True:
        state = client.call("status")
        worker: dict[str, Any] = next(
            # A model that had to go may leave its process with its memory, and come back.
            (one for one in state["workers"] if one["name"] == name),
            {"name": name, "state": "away", "booked": 0, "measured": None},
        )
        if judge(worker):
            return worker
        if monotonic() >= deadline_s:
            waits = next((one for one in state["queue"] if one["worker"] == name), None)
            why = f": {waits['reason']}" if waits and waits.get("reason") else ""
            raise WaitedTooLong(f"{name} is still {worker['state']} after {wait_s:.0f} s{why}")
        pause.wait(POLL_S)


def _pins(*, pin: bool) -> Callable[..., None]:
    def command(socket: str | None, name: str, *, as_json: bool) -> None:
        with connect(socket, name="umadctl") as client:
            answer = client.call("pin", {"name": name, "pin": pin})
        text = "pinned; it never goes for another model" if pin else "not pinned"
        _say(answer, f"{name}: {text}", as_json=as_json)

    return command


def _drains(method: str, text: str) -> Callable[..., None]:
    def command(socket: str | None, *, as_json: bool) -> None:
        with connect(socket, name="umadctl") as client:
            answer = client.call(method)
        _say(answer, text, as_json=as_json)

    return command


def _command(function: Callable[..., None], name: str, meaning: str, *more: Any) -> click.Command:
    """A command out of a function that has no name of its own."""
    for option in (click.pass_obj, _JSON, *more):
        function = option(function)
    return click.command(name, help=meaning)(function)


pin = _command(_pins(pin=True), "pin", "Never let a model go for another one.", _NAME)
unpin = _command(_pins(pin=False), "unpin", "Let a model go for another one again.", _NAME)
drain = _command(
    _drains("drain", "drained: no load begins; what is loaded works on; end it: umadctl resume"),
    "drain",
    "Let no load begin from now on; what is loaded works on.",
)
resume = _command(_drains("resume", "loads may begin"), "resume", "Let loads begin again.")


@click.command("set-quota")
@_NAME
@click.argument("quota", type=SIZE)
@_JSON
@click.pass_obj
def set_quota(socket: str | None, name: str, quota: int, *, as_json: bool) -> None:
    """Change a worker's quota now; QUOTA is like 40GiB.

    It holds until the worker or the daemon starts again; to keep it, write it into the
    configuration and say umadctl reload. Who holds more than its new quota is stopped for it.
    """
    with connect(socket, name="umadctl") as client:
        answer = client.call("set_quota", {"name": name, "quota": quota})
    _say(answer, f"{name}: quota {format_bytes(answer['quota'])}", as_json=as_json)


@click.command()
@_JSON
@click.pass_obj
def reload(socket: str | None, *, as_json: bool) -> None:
    """Have umad and umad-serve read their configuration again; a bad one changes nothing."""
    with connect(socket, name="umadctl") as client:
        answer = client.call("reload")
    changed = ", ".join(answer["changed"]) or "nothing has changed"
    click.echo(json.dumps(answer) if as_json else f"reloaded: {changed}")
    if answer["restart"] and not as_json:
        click.echo(f"needs a restart: {', '.join(answer['restart'])}", err=True)


COMMANDS: Final = (load, evict, pin, unpin, drain, resume, set_quota, reload)
