"""What people may ask of the daemon beyond what a worker may: (state, call) -> actions."""

from collections.abc import Iterator
from dataclasses import replace

from umad.core import switching
from umad.core.actions import Action, Event, Notify, Reload
from umad.core.membership import Call, event
from umad.core.report import worker_state
from umad.core.state import Member, State
from umad.errors import Drained, InvalidParams, LeaseNotFound, Overloaded


def evict(state: State, call: Call) -> Iterator[Action]:
    """Ask a model to go; nobody takes its place, and nothing spares it."""
    member = _able(state, call)
    worker = member.worker
    if worker.pin:
        raise InvalidParams(f"{worker.name} is pinned; unpin it first")
    if member.state in ("waiting", "loading"):
        raise Overloaded(f"{worker.name} is {member.state}; ask again when it has loaded")
    if member.state == "ready":
        yield from switching.drain(state, member, None, "asked by a person", call.now_s)
    left_s = 0.0
    if (draining := member.draining) is not None:
        draining.rival = None  # whoever it was for: a person wants it gone
        left_s = round(draining.deadline_s - call.now_s, 3)
    yield call.reply({"state": worker_state(state, member), "deadline_s": left_s})


def load(state: State, call: Call) -> Iterator[Action]:
    """Have a model loaded that is not."""
    member = _able(state, call)
    if state.drained:
        raise Drained("no load begins: umad was drained; umadctl resume", retry_after_s=5.0)
    if member.state == "registered":
        assert member.client is not None
        yield Notify(member.client, "load", {"worker": member.worker.id})
    yield call.reply({"state": worker_state(state, member)})


def pin(state: State, call: Call) -> Iterator[Action]:
    """Let a model never go for another one, or again; until its worker registers anew."""
    member, pinned = _named(state, call), call.params["pin"]
    member.worker = replace(member.worker, pin=pinned)
    yield call.reply({"pin": pinned})
    yield event("pinned" if pinned else "unpinned", member)
    if pinned and member.draining is not None:
        yield from switching.spare(member, "evict_cancelled")


def drain(state: State, call: Call) -> Iterator[Action]:
    """Let no load begin; what is loaded works on."""
    yield from _drained(state, call, drained=True)


def resume(state: State, call: Call) -> Iterator[Action]:
    """Let loads begin again."""
    yield from _drained(state, call, drained=False)


def reload(_state: State, call: Call) -> Iterator[Action]:
    """Read the configuration again."""
    assert call.request is not None
    yield Reload(call.client.id, call.request)


def _drained(state: State, call: Call, *, drained: bool) -> Iterator[Action]:
    yield call.reply({"drained": drained})
    if state.drained != drained:
        state.drained = drained
        yield Event("drained" if drained else "resumed", "warning", {"uid": call.client.peer.uid})


def _named(state: State, call: Call) -> Member:
    name = call.params["name"]
    member = state.named(name)
    if member is None:
        raise LeaseNotFound(f"there is no worker {name!r}; see umadctl status")
    return member


def _able(state: State, call: Call) -> Member:
    """The worker named, which loads and unloads when it is told to."""
    member = _named(state, call)
    if not member.evicts:
        raise InvalidParams(
            f"{member.worker.name} (pid {member.worker.identity.pid}) neither loads nor unloads "
            "when told to; stop or start its program"
        )
    if member.client is None:
        raise Overloaded(f"{member.worker.name} has lost its connection", retry_after_s=1.0)
    return member
