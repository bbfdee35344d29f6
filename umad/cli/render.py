"""The state as people read it: values in, rich tables out; nothing is asked or printed here.

Every table fits 80 columns.  What is not known is shown as "?", never as 0.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from umad.units import format_bytes, format_duration, printable

_BAR_CELLS: Final = 20
STATE_STYLES: Final = {
    "ready": "green",
    "loading": "yellow",
    "waiting": "yellow",
    "cut off": "red",
    "leaving": "dim",
    "fenced": "bold red",
    "leaking": "red",
    "revoked": "bold red",
    "killed": "bold red",
    "unkillable": "bold red",
    "orphaned": "bold red",
}


def status(state: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The parts of ``umadctl status``, top to bottom."""
    daemon = state["daemon"]
    yield Text.assemble(
        (f"umad {daemon['version']}", "bold"),
        f"  pid {daemon['pid']}  up {format_duration(daemon['uptime_s'])}"
        f"  generation {state['generation']}",
        ("  recovering: former workers may return", "yellow") if state["recovering"] else "",
    )
    if daemon["conservative"]:
        yield Text("conservative mode: half of the memory may be booked", style="yellow")
    yield Text(daemon["socket"], style="dim")
    yield from pace(state)
    yield ""
    yield _pools(state)
    if state["workers"]:
        yield ""
        yield _workers(state)
        yield ""
        yield _processes(state)
    else:
        yield Text("\nno workers; start umad-serve, or connect with umad.client", style="dim")
    if state["queue"]:
        yield ""
        yield _queue(state)
    yield from _notes(state)


_REASONS: Final = {
    "ease": "at ease",
    "returning": "bytes are on their way back",
    "growing": "a limit is coming nearer",
    "near_limit": "a limit is near",
    "short_memory": "the machine is short of memory",
}


def pace(state: Mapping[str, Any]) -> Iterator[Text]:
    """How often memory is looked at and why, and whether it is short by the kernel's word."""
    if (now := state["pace"]) is not None:
        glances = f", a glance every {format_duration(now['glance_s'])}" if now["glance_s"] else ""
        look = format_duration(now["look_s"])
        yield Text(f"a look every {look}{glances}: {_REASONS.get(now['reason'], '?')}", style="dim")
    if state["pressed"]:
        yield Text("tasks stall on memory: twice the reserve is kept", style="yellow")


def _pools(state: Mapping[str, Any]) -> RenderableType:
    if not state["pools"]:
        return Text("memory has not been read yet", style="yellow")
    table = _table("POOL", "BOOKED", "", "BUDGET", "FREE", "BOUND BY")
    for pool in state["pools"]:
        table.add_row(
            pool["name"],
            _size(pool["booked"]),
            _bar(pool["booked"], pool["budget"]),
            _size(pool["budget"]),
            _size(pool["free"]),
            pool["problem"] or pool["binding"],
        )
    return table


def _workers(state: Mapping[str, Any]) -> Table:
    table = _table("WORKER", "STATE", "BOOKED", "", "QUOTA", "MEASURED", "PID")
    for worker in state["workers"]:
        shown = worker["state"]
        if shown == "loading" and worker["stage"]:
            shown = f"{printable(worker['stage'])} {worker['ratio']:.0%}"
        table.add_row(
            worker["name"],
            Text(shown, style=STATE_STYLES.get(worker["state"], "")),
            _size(worker["booked"]),
            _bar(worker["measured"], worker["quota"], 10),
            _size(worker["quota"]),
            _size(worker["measured"]),
            str(worker["pid"]),
        )
    hidden = state["workers_total"] - len(state["workers"])
    if hidden:
        table.add_row(f"... {hidden} more", "", "", "", "", "", "")
    return table


def _processes(state: Mapping[str, Any]) -> Table:
    table = _table("PID", "PROGRAM", "HOLDS", "", "LIMIT", "WORKERS", "GUARD", "VERDICT")
    for process in state["processes"]:
        table.add_row(
            str(process["pid"]),
            Text(printable(process["comm"])),
            _size(process["bytes"]),
            _bar(process["bytes"], process["limit"], 10),
            _size(process["limit"]),
            str(process["workers"]),
            "on" if process["guard"] else "off",
            Text(process["verdict"], style=STATE_STYLES.get(process["verdict"], "green")),
        )
    return table


def _queue(state: Mapping[str, Any]) -> Table:
    table = _table("WAITS", "FOR", "ASKS", "SINCE")
    for waiter in state["queue"]:
        table.add_row(
            waiter["worker"],
            {"reserve": "memory to load", "admit": "memory for a request"}.get(
                waiter["what"], "the init mutex"
            ),
            _size(waiter["bytes"]) if waiter["bytes"] else "",
            format_duration(waiter["waited_s"]),
        )
    return table


def _notes(state: Mapping[str, Any]) -> Iterator[RenderableType]:
    for why in sorted({process["guard_off"] for process in state["processes"]} - {""}):
        pids = [str(one["pid"]) for one in state["processes"] if one["guard_off"] == why]
        of = ", ".join(pids[:5])
        yield Text(f"\nguard: off in pid {of}: {printable(why)}", style="yellow")
    yield from fragmented(state["fragmentation"])
    sample = state["sample"]
    if sample is not None and sample["age_s"] > 2:
        yield Text(f"\nlast look at memory {format_duration(sample['age_s'])} ago", style="red")
    for anomaly in sample["anomalies"] if sample else ():
        yield Text(f"\nreading that contradicts itself: {anomaly}", style="yellow")
    yield from _preflight(state["daemon"])


def fragmented(lies: Mapping[str, Any]) -> Iterator[Text]:
    """A line for whatever lies in crumbs; nothing for a risk that is low or not known."""
    devices = [(one, f"device memory of pid {one['pid']}") for one in lies["devices"]]
    for one, of in [(lies, "free memory"), *devices]:
        if one["risk"] == "high":
            step = f"; step: {lies['step']}" if one is lies and lies["step"] else ""
            yield Text(f"\n{of} is fragmented: {one['reason']}{step}", style="yellow")


def _preflight(daemon: Mapping[str, Any]) -> Iterator[RenderableType]:
    """In spite of what it runs, one line each; the doctor has the commands."""
    for warning in daemon["warnings"]:
        yield Text(f"\nnot set up: {warning}", style="yellow")
    if daemon["warnings"]:
        names = ", ".join(daemon["permissive"])
        yield Text(f"\nstarted all the same: --permissive={names}; mend it: umadctl doctor")
    elif daemon["advice"]:
        yield Text(f"\n{len(daemon['advice'])} advised: umadctl doctor", style="dim")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in columns:
        numeric = name in (
            "BOOKED",
            "BUDGET",
            "FREE",
            "QUOTA",
            "MEASURED",
            "HOLDS",
            "LIMIT",
            "ASKS",
        )
        table.add_column(name, justify="right" if numeric else "left", overflow="ellipsis")
    return table


def _size(count: int | None) -> str:
    return "?" if count is None else format_bytes(count)


def _bar(part: int | None, whole: int | None, cells: int = _BAR_CELLS) -> Text:
    """How full; the share that is used up is drawn, the rest dotted."""
    if part is None or not whole:
        return Text("")
    full = min(cells, round(cells * part / whole))
    style = "red" if part > whole else "yellow" if part > 0.9 * whole else "cyan"
    return Text("█" * full, style=style) + Text("·" * (cells - full), style="dim")
