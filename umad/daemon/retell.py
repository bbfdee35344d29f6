"""What an engine is told and what it does, in words: for people who read a replay."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from umad.core.state import State
from umad.units import format_bytes, format_duration
from umad.values import SYSTEM_POOL, Identity

_SIZES: Final = frozenset(
    {"quota", "peak", "bytes", "measured", "held", "baseline", "predicted", "reserved"}
)
# What says nothing to people, and a pool that goes without saying.
_LEFT_OUT: Final = {"token": None, "thread": None, "pool": SYSTEM_POOL}
# What comes all the time, and is worth a line only when something follows from it.
_USUAL: Final = frozenset({"forward_done", "progress", "segments"})


def question(state: State, method: str, given: Mapping[str, Any]) -> str:
    """What came, "" for what comes all the time.

    Args:
        state: before the input.
        method: the input.
        given: its arguments as plain data.
    """
    if method == "request" or (method == "notification" and given["method"] not in _USUAL):
        return f"{_caller(state, given)} asks: {_call(state, given)}"
    if method in ("exited", "kill_sent"):
        identity = Identity(**given["identity"])
        if identity not in state.processes:
            return ""
        what = "has ended" if method == "exited" else "was sent SIGKILL"
        return f"process {identity.pid} {state.processes[identity].comm} {what}"
    if method == "disconnected" and state.clients[given["connection"]].workers:
        return f"{_caller(state, given)} has closed its connection"
    if method == "found":
        return f"process {given['identity']['pid']} has a page of before the daemon's restart"
    return ""


def deeds(state: State, method: str, actions: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was done, without what follows from it by itself.

    Args:
        state: after the input.
        method: the input.
        actions: as plain data.
    """
    asked = method in ("request", "notification")
    told = (_deed(state, action) for action in actions if not (asked and _expected(action)))
    return [text for text in told if text]


def _expected(action: Mapping[str, Any]) -> bool:
    """An event that repeats what somebody asked for."""
    return (action["do"], action.get("level")) == ("Event", "info")


def _deed(state: State, action: Mapping[str, Any]) -> str:
    kind = action["do"]
    if kind == "Reply":
        return _answer(action["result"])
    if kind == "Refuse":
        return f"refused, {action['error']['code']}: {action['error']['message']}"
    if kind == "Notify":
        params = action["params"]
        who = f" {_worker(state, params['worker'])}" if "worker" in params else ""
        return f"{action['method']}{who}: {params.get('reason', '')}"
    if kind == "Kill":
        return f"SIGKILL to process {action['identity']['pid']}: {action['reason']}"
    if kind == "CloseAccount":
        return f"closes account {action['account']} of process {action['identity']['pid']}"
    if kind == "Compact":
        return "asks the kernel to compact memory"
    if kind == "Event":
        return f"event {action['name']}: {', '.join(_fields(state, action['fields']))}"
    return ""  # limits that follow the books, who is watched, and when to look again


def _answer(result: Mapping[str, Any]) -> str:
    if "lease" in result and "deadline_s" in result:
        return f"granted: lease {result['lease']} of {format_bytes(result['bytes'])}"
    if "deadline_s" in result:
        return "granted: the device-init mutex"
    if "generation" in result:
        return f"registered as worker {result['worker']}"
    return "done"


def _caller(state: State, given: Mapping[str, Any]) -> str:
    peer = state.clients[given["connection"]].peer
    return f"process {peer.identity.pid} {peer.comm}"


def _call(state: State, given: Mapping[str, Any]) -> str:
    return " ".join([given["method"], *_fields(state, given["params"])])


def _fields(state: State, fields: Mapping[str, Any]) -> Iterator[str]:
    """``key=value`` with units; what is empty or nothing is left out."""
    for key, value in fields.items():
        if value in (None, "", 0, False) and key != "left_bytes":
            continue
        if key in _LEFT_OUT and _LEFT_OUT[key] in (None, value):
            continue
        name, shown = key, str(value)
        if key == "worker" and isinstance(value, int):
            shown = _worker(state, value)
        elif isinstance(value, int) and (key in _SIZES or key.endswith("_bytes")):
            name, shown = key.removesuffix("_bytes"), format_bytes(value)
        elif isinstance(value, int | float) and key.endswith("_s"):
            name, shown = key.removesuffix("_s"), format_duration(value)
        yield f"{name}={shown}"


def _worker(state: State, key: int) -> str:
    member = state.members.get(key)
    return f"worker {key}" if member is None else member.worker.name
