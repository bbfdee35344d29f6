"""The daemon's timeline as values: who held how much at which moment.

What stands where in an answer is told in PROTOCOL.md; what is not known is None.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from umad.client import Client


@dataclass(frozen=True, slots=True)
class Held:
    """What a worker had at one moment; ``holds`` is None where nobody could tell."""

    pool: str
    quota: int
    holds: int | None
    booked: int

    @property
    def shown(self) -> int:
        """What it held; where that is not known, what was booked for it."""
        return self.booked if self.holds is None else self.holds


@dataclass(frozen=True, slots=True)
class Room:
    """What a pool had at one moment; None is not known."""

    used: int | None
    free: int | None
    booked: int | None
    budget: int | None


@dataclass(frozen=True, slots=True)
class Moment:
    """One sample of the timeline."""

    unix_s: float
    granted: int
    refused: int
    pools: Mapping[str, Room]
    workers: Mapping[str, Held]

    @property
    def held(self) -> int:
        """By all workers together."""
        return sum(one.shown for one in self.workers.values())


def timeline(client: Client, since_s: float) -> Iterator[Moment]:
    """The daemon's samples after a moment; they come in parts."""
    next_s: float | None = max(0.0, since_s)
    while next_s is not None:
        part = client.call("timeline", {"since": next_s})
        for row in part["samples"]:
            yield _moment(part, [None if value < 0 else value for value in row])
        next_s = part["next"]


def _moment(part: Mapping[str, Any], row: Sequence[Any]) -> Moment:
    """One row of an answer; PROTOCOL.md tells what stands where."""
    pools, workers = part["pools"], part["workers"]
    rooms = {name: Room(*row[3 + 4 * at : 7 + 4 * at]) for at, name in enumerate(pools)}
    held: dict[str, Held] = {}
    for at, worker in enumerate(workers):
        holds, booked = row[3 + 4 * len(pools) + 2 * at :][:2]
        before = held.get(worker["name"])  # one that is leaving, and its successor
        if before is not None:
            booked += before.booked
            holds = None if holds is None or before.holds is None else holds + before.holds
        held[worker["name"]] = Held(worker["pool"], worker["quota"], holds, booked)
    return Moment(row[0] / 1000, row[1], row[2], rooms, held)
