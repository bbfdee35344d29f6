"""``umadctl top``: who holds how much, live in a terminal, with keys to sort, pin and evict.

Owns what one view remembers: the sparklines' last minute, who is chosen, what was asked.  The
picture is made by ``frame`` from values alone; the terminal is put back however the command ends.
"""

import os
import select
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import click
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from umad.cli import render
from umad.client import Client, UmadError, connect
from umad.units import format_bytes, format_duration, printable

EVERY_S: Final = 1.0
_MINUTE: Final = 60
_SPARKS: Final = "▁▂▃▄▅▆▇█"
_SORTS: Final = {"b": "booked", "u": "holds", "Q": "quota", "n": "name"}
_ARROWS: Final = {"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down"}
_HELP: Final = """\
  b u Q n    sort by what is booked, held, by quota, by name
  up down    choose a worker (also k and j)
  p          pin it: never evicted for another model; or unpin it
  e          evict it: it unloads its model as soon as it is idle
  h          this help
  q          quit

  A bar is a worker's quota:  █ held  ▒ booked, not held  ┃ the most  · rest

  BOOKED     is promised to it
  USED       is charged to its account, where a guard keeps one
  HELD       is physically there: of its account, or of its process where
             it is alone in it
  PEAK       is the most that was charged, or was seen held here

  "?" is not known, * is pinned; K, M and G are powers of 1024."""


@dataclass(slots=True)
class View:
    """What is shown and how; written by the keys."""

    state: Mapping[str, Any] = field(default_factory=dict)
    sort: str = "booked"
    chosen: str = ""
    problem: str = ""  # why the picture is old
    said: str = ""  # what came of the last key
    evict: str = ""  # who is to go, once that is confirmed
    help: bool = False
    quit: bool = False
    minute: dict[str, deque[int | None]] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)

    def take(self, state: Mapping[str, Any]) -> None:
        """The state as it is now."""
        self.state, self.problem = state, ""
        names = {worker["name"] for worker in state["workers"]}
        self.minute = {
            name: self.minute.get(name, deque([None] * _MINUTE, _MINUTE)) for name in names
        }
        self.most = {name: self.most.get(name, 0) for name in names}
        for worker in state["workers"]:
            name = worker["name"]
            self.minute[name].append(worker["holds"])
            seen = (worker["holds"], worker["charged_most"])
            self.most[name] = max(self.most[name], *(one for one in seen if one is not None), 0)

    def workers(self) -> list[Mapping[str, Any]]:
        """In order; the largest first, unknown ones last."""

        def key(worker: Mapping[str, Any]) -> tuple[float, str]:
            value = worker[self.sort]
            return (0 if self.sort == "name" else -(-1 if value is None else value), worker["name"])

        return sorted(self.state.get("workers", ()), key=key)

    def at(self) -> int:
        """Which line is chosen."""
        names = [worker["name"] for worker in self.workers()]
        return names.index(self.chosen) if self.chosen in names else 0

    def choose(self, step: int) -> None:
        """Go up or down a line."""
        if workers := self.workers():
            self.chosen = workers[min(max(self.at() + step, 0), len(workers) - 1)]["name"]


@click.command()
@click.pass_obj
def top(socket: str | None) -> None:
    """Watch who holds how much memory, live; h shows the keys.

    Without a terminal it shows everything once.
    """
    view = View()
    with connect(socket, name="umadctl") as client:
        view.take(client.call("status"))
        if not (sys.stdout.isatty() and sys.stdin.isatty()):
            console = Console(width=None if sys.stdout.isatty() else 80, highlight=False)
            console.print(frame(view, console.width, None))
            return
        _watch(client, view)


def _watch(client: Client, view: View) -> None:
    console = Console(highlight=False)
    with ExitStack() as stack:
        bell = stack.enter_context(_signals(view))
        screen = stack.enter_context(console.screen(hide_cursor=True))
        stack.enter_context(_keys_at_once())
        due_s = time.monotonic() + EVERY_S
        while not view.quit:
            width, height = console.size
            screen.update(frame(view, width, height))
            left_s = max(0.0, due_s - time.monotonic())
            ready, _, _ = select.select([sys.stdin, bell], [], [], left_s)
            if bell in ready:
                os.read(bell, 4096)
            if sys.stdin in ready:
                if not (typed := os.read(sys.stdin.fileno(), 64)):
                    return  # the terminal has gone
                for key in _keys(typed.decode(errors="replace")):
                    press(client, view, key)
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + EVERY_S
                _refresh(client, view)


def _refresh(client: Client, view: View) -> None:
    try:
        view.take(client.call("status"))
    except UmadError as error:
        view.problem = error.message


@contextmanager
def _signals(view: View) -> Iterator[int]:
    """A descriptor that is readable after a signal: a resized terminal, or the wish to end."""
    bell, ring = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def end(*_: object) -> None:
        view.quit = True

    handlers: dict[signal.Signals, Any] = dict.fromkeys(
        (signal.SIGINT, signal.SIGTERM, signal.SIGHUP), end
    )
    handlers[signal.SIGWINCH] = lambda *_: None
    before = {one: signal.signal(one, handler) for one, handler in handlers.items()}
    woken = signal.set_wakeup_fd(ring)
    try:
        yield bell
    finally:
        signal.set_wakeup_fd(woken)
        for one, handler in before.items():
            signal.signal(one, handler)
        os.close(bell)
        os.close(ring)


@contextmanager
def _keys_at_once() -> Iterator[None]:
    """Each key comes as it is pressed and is not shown; Ctrl-Z would leave a stopped picture."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    now = termios.tcgetattr(fd)
    now[6][termios.VSUSP] = b"\0"
    termios.tcsetattr(fd, termios.TCSANOW, now)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _keys(typed: str) -> Iterator[str]:
    """Single keys; arrows are three characters each, other sequences are none of ours."""
    while typed:
        if typed[0] == "\x1b":
            key, typed = typed[:3], typed[3:]
            yield _ARROWS.get(key, "")
        else:
            key, typed = typed[0], typed[1:]
            yield key


def press(client: Client, view: View, key: str) -> None:
    """Do what a key asks for."""
    if view.evict:
        name, view.evict, view.said = view.evict, "", ""
        if key in ("y", "Y"):
            _ask(client, view, "evict", {"name": name}, f"{name}: told to go")
        return
    view.said = ""
    if key in _SORTS:
        view.sort = _SORTS[key]
    elif key in ("up", "k", "down", "j"):
        view.choose(-1 if key in ("up", "k") else 1)
    elif key == "h":
        view.help = not view.help
    elif key == "q":
        view.quit = True
    elif key in ("p", "e") and (workers := view.workers()):
        worker = workers[view.at()]
        name, pinned = worker["name"], worker["pin"]
        if key == "e":
            view.evict = name
        else:
            done = f"{name}: {'not pinned any more' if pinned else 'pinned'}"
            _ask(client, view, "pin", {"name": name, "pin": not pinned}, done)


def _ask(client: Client, view: View, method: str, params: dict[str, Any], done: str) -> None:
    try:
        client.call(method, params)
    except UmadError as error:
        view.said = error.message
        return
    _refresh(client, view)
    view.said = done


def frame(view: View, width: int, height: int | None) -> RenderableType:
    """The whole picture.

    Args:
        view: what to show.
        width: in cells; 80 is enough.
        height: lines at most, None for as many as it takes.
    """
    state = view.state
    head = [_title(view), *_pools(state, width), _waiting(state), Text("")]
    foot = [Text(""), _foot(view)] if height is not None else []
    if view.help:
        body: RenderableType = Text(_HELP)
    else:
        room = None if height is None else max(1, height - len(head) - len(foot) - 2)
        body = _workers(view, width, room, choosing=height is not None)
    for line in (*head, *foot):
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*head, body, *foot)


def _title(view: View) -> Text:
    state, daemon = view.state, view.state["daemon"]
    if view.problem:
        return Text(f"OLD: {view.problem}".splitlines()[0], style="bold red")
    recovering = "  recovering: former workers may return" if state["recovering"] else ""
    drained = "  drained: no load begins" if state["drained"] else ""
    line = Text.assemble(
        (f"umad {daemon['version']}", "bold"),
        f"  up {format_duration(daemon['uptime_s'])}  {time.strftime('%H:%M:%S')}",
        (f"{recovering}{drained}", "yellow"),
    )
    if (pace := state["pace"]) is not None:
        line.append(f"  looks {format_duration(pace['look_s'])} apart", "dim")
    if state["pressed"]:
        line.append("  tasks stall on memory", "yellow")
    return line


def _pools(state: Mapping[str, Any], width: int) -> Iterator[Text]:
    if not state["pools"]:
        yield Text("memory has not been read yet", style="yellow")
    for pool in state["pools"][:4]:
        yield Text.assemble(
            (f"{pool['name']}", "bold"),
            f"  used {_size(pool['used'])} of {_size(pool['capacity'])}"
            f"  reserve {_size(pool['reserve'])}  budget {_size(pool['budget'])}"
            f"  booked {_size(pool['booked'])}",
        )
        bar = _bar(None, pool["booked"], None, pool["budget"], max(10, width - 44))
        bound = printable(pool["problem"] or pool["binding"])
        yield Text("  ") + bar + Text(f"  free {_size(pool['free'])}, bound by {bound}")


def _waiting(state: Mapping[str, Any]) -> Text:
    queue = state["queue"]
    if not queue:
        return Text("nobody waits", style="dim")
    first = "; ".join(
        f"{one['worker']} {_size(one['bytes'])} for {format_duration(one['waited_s'])}"
        for one in queue[:3]
    )
    return Text(f"{len(queue)} wait: {first}", style="yellow")


def _workers(view: View, width: int, room: int | None, *, choosing: bool) -> RenderableType:
    workers = view.workers()
    if not workers:
        return Text("no workers; start umad-serve, or connect with umad.client", style="dim")
    first = 0
    if room is not None and len(workers) > room:
        room -= 1  # for the line that says so
        first = min(max(0, view.at() - room // 2), len(workers) - room)
    shown = workers[first : None if room is None else first + room]
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1, 0, 0), expand=True)
    table.add_column("WORKER", no_wrap=True, overflow="ellipsis", ratio=1, min_width=8)
    table.add_column("STATE", no_wrap=True, width=10)
    for name in ("BOOKED", "USED", "HELD", "PEAK", "QUOTA"):
        table.add_column(name, justify="right", no_wrap=True, min_width=6)
    more = max(0, width - 80)
    table.add_column("OF QUOTA", no_wrap=True, width=10 + more // 3)
    table.add_column("MINUTE", no_wrap=True, width=8 + more // 3)
    for worker in shown:
        table.add_row(*_row(view, worker, 10 + more // 3, 8 + more // 3))
        if choosing and worker is workers[view.at()]:
            table.rows[-1].style = "reverse"
    hidden = len(workers) - len(shown)
    return Group(table, Text(f"  {hidden} more; up and down", style="dim")) if hidden else table


def _row(view: View, worker: Mapping[str, Any], bar: int, sparks: int) -> list[RenderableType]:
    name, most = worker["name"], view.most[worker["name"]]
    known = worker["holds"] is not None or worker["charged_most"] is not None
    style = render.STATE_STYLES.get(worker["state"], "")
    return [
        Text(f"{name}{' *' if worker['pin'] else ''}"),
        Text(worker["state"], style=style),
        *(_size(one) for one in (worker["booked"], worker["charged"], worker["holds"])),
        _size(most if known else None),
        _size(worker["quota"]),
        _bar(worker["holds"], worker["booked"], most if known else None, worker["quota"], bar),
        Text(_spark([*view.minute[name]], worker["quota"], sparks)),
    ]


def _bar(
    held: int | None, booked: int | None, most: int | None, whole: int | None, cells: int
) -> Text:
    """What is held, then booked, of the whole; the most that was held as a mark."""
    if not whole:
        return Text("")

    def place(size: int | None) -> int:
        return min(cells, round(cells * (size or 0) / whole))

    full, promised = place(held), max(place(held), place(booked))
    text = "█" * full + "▒" * (promised - full) + "·" * (cells - promised)
    if most is not None and (mark := place(most)) > full:
        text = text[: mark - 1] + "┃" + text[mark:]
    return Text(text, style="red" if (held or 0) > whole else "cyan")


def _spark(values: Sequence[int | None], whole: int, cells: int) -> str:
    """The last minute in so many cells, each the most of its seconds; a gap where unknown."""
    out = ""
    for cell in range(cells):
        part = values[len(values) * cell // cells : len(values) * (cell + 1) // cells]
        known = [value for value in part if value is not None]
        high = min(1.0, max(known) / whole) if known else 0.0
        out += _SPARKS[round(high * (len(_SPARKS) - 1))] if known else " "
    return out


def _foot(view: View) -> Text:
    if view.evict:
        return Text(f"evict {view.evict}? y or n", style="bold yellow")
    if view.said:
        return Text(printable(view.said), style="yellow")
    keys = f"b u Q n sort ({view.sort})  up down choose  p pin  e evict  h help  q quit"
    return Text(keys, style="dim")


def _size(size: int | None) -> str:
    """Short, as a column needs it: "1.5G"."""
    return "?" if size is None else format_bytes(size).replace(" ", "").removesuffix("iB")
