"""Who goes, so that somebody else fits: pure choice among idle models.

The cheapest first: idle for long, quick to load again, of little weight.  No more than are
needed, and nobody at all unless what is short is then really there.  One that is too young, or
was asked for the same rival a moment ago, can go later, and when that will be is said.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

# Before a load was measured, by its bytes: a slow disk's pace, so that none looks cheap.
GUESSED_BYTES_PER_S: Final = 1 << 30
LOAD_S_MIN: Final = 0.1  # a load that took no time is not free, and its cost divides
# Ten steps of priority double the weight.
PRIORITY_DOUBLES: Final = 10
_EXPONENT_MAX: Final = 60.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that may be asked to go.

    Args:
        worker: whose it is.
        idle_s: since its last work ended, or since it was ready.
        load_s: how long its last load took.
        priority: its worker's.
        gives: bytes by pool that are there once it has gone; parents of a pool count too.
        from_s: the moment (monotonic) from which it may be asked.
    """

    worker: int
    idle_s: float
    load_s: float
    priority: int
    gives: Mapping[str, int]
    from_s: float

    @property
    def score(self) -> float:
        """The higher, the less is lost with it: idle time over load cost times weight."""
        steps = self.priority / PRIORITY_DOUBLES
        weight = math.exp2(max(-_EXPONENT_MAX, min(_EXPONENT_MAX, steps)))
        return self.idle_s / (max(self.load_s, LOAD_S_MIN) * weight)


@dataclass(frozen=True, slots=True)
class Plan:
    """These have to go, in this order; ``at_s`` is when they may be asked (monotonic)."""

    victims: tuple[int, ...]
    at_s: float


def plan(candidates: Iterable[Candidate], short: Mapping[str, int], now_s: float) -> Plan | None:
    """Choose who goes.

    1. who may be asked now, if that is enough;
    2. else whoever may be asked at the earliest moment at which it is;
    3. None: all of them together would not be enough, so nobody goes.

    Args:
        candidates: idle models.
        short: bytes that each pool lacks.
        now_s: the moment.
    """
    able = list(candidates)
    moments = sorted({now_s, *(one.from_s for one in able if one.from_s > now_s)})
    for moment_s in moments:
        chosen = _choose([one for one in able if one.from_s <= moment_s], short)
        if chosen is not None:
            return Plan(tuple(one.worker for one in chosen), moment_s)
    return None


def _choose(able: list[Candidate], short: Mapping[str, int]) -> list[Candidate] | None:
    """The cheapest that suffice; then those are let off without whom it suffices too."""
    chosen: list[Candidate] = []
    for one in sorted(able, key=lambda one: (-one.score, one.worker)):
        if _suffice(chosen, short):
            break
        if any(one.gives.get(pool, 0) for pool in short):
            chosen.append(one)
    if not _suffice(chosen, short):
        return None
    for one in reversed(list(chosen)):
        others = [other for other in chosen if other is not one]
        if _suffice(others, short):
            chosen = others
    return chosen


def _suffice(chosen: list[Candidate], short: Mapping[str, int]) -> bool:
    return all(
        sum(one.gives.get(pool, 0) for one in chosen) >= lacks for pool, lacks in short.items()
    )
