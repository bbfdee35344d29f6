"""How much memory is put to use, and how much of it a packer could that knows everything.

In use are the quotas of models that somebody waits for or is served by, from the grant on, and
their bursts.  The *clairvoyant packer* has, at every moment, the best choice of these models in
memory that fits into what is there: it unloads whom it likes, loads in no time and knows who will
come.  It has not what nobody can take away: pinned models, and those of programs that are deaf to
``evict``.

It obeys what no program can change, however much it knows of the future:

1. a forward at work cannot be stopped and kept, only thrown away: a model that serves at that
   moment goes on;
2. bytes that are there are there: the peak of a load under way, what an unloaded model's process
   has not given back yet, what a greedy one holds beyond its quota.

It is still better than any that there could be, since it pays nothing for a change of mind: from
one moment to the next it has other models, which have waited for it because we did not serve them.
So the share reached of it is a lower bound.

The *packer without physics* obeys neither.  Nothing can reach it; it is told to compare with.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from umad.units import MIB

if TYPE_CHECKING:
    from tests.simulation.model import Model, Session
    from tests.simulation.world import World

UNIT: Final = 64 * MIB


def best(sizes: Iterable[int], room: int) -> int:
    """The most bytes of ``sizes`` that fit together, to the unit; exact, by dynamic programming."""
    reached = 1
    for size in sizes:
        reached |= reached << (size // UNIT)
    reached &= (1 << (max(0, room) // UNIT + 1)) - 1
    return (reached.bit_length() - 1) * UNIT


class Use:
    """Samples of one world."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.sessions: list[tuple[Model, Session]] = []
        self.used = self.possible = self.unbound = 0
        self.samples = self.tight = 0

    def sample(self, room: int) -> None:
        """One moment; ``room`` is what all may hold together, in bytes."""
        world = self.world
        now_s = world.now_s
        room -= world.machine.tenants.at(now_s)
        wanted: list[int] = []
        serving: list[int] = []
        used = beyond = 0
        for body in world.machine.bodies.values():
            room -= body.baseline + sum(block.at(now_s) for block in body.family.values())
        for program in world.programs:
            if not program.alive:
                continue
            for model in program.models:
                quota = world.judge.quota_of(model)
                loaded = bool(model.lease) and model.state in ("loading", "ready", "serving")
                room -= model.burst
                beyond += max(0, model.block.at(now_s) - loaded * (quota + model.burst))
                if not model.wanted and loaded and (model.pin or program.liar == "deaf"):
                    room -= quota
                if not model.wanted or (program.stopped_until_s > now_s and not loaded):
                    continue
                (serving if loaded and model.state == "serving" else wanted).append(quota)
                used += quota if loaded else 0
        unbound = best([*wanted, *serving], room)
        at_work = sum(serving)
        possible = min(unbound, at_work + best(wanted, room - beyond - at_work))
        self.samples += 1
        self.tight += at_work + sum(wanted) > room
        self.used += min(used, possible)
        self.possible += possible
        self.unbound += unbound
