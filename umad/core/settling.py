"""When a program that says nothing has loaded: from then on its steady quota counts, not its peak.

Too early costs a program its life (it is over its quota and still loading), too late costs room
that nobody uses.  So it is late rather than early:

1. it has held half its quota at least: less than that, it downloads or imports still;
2. it is within its quota, and for ``for_s`` has neither been above nor grown beyond what it held
   before (more than noise): an engine that profiles or captures graphs has done so;
3. or ``until_s`` has come, the bound for every load.
"""

from dataclasses import dataclass
from typing import Final

from umad.core.audit import NOISE_BYTES, NOISE_RATIO

SETTLE_S: Final = 60.0


@dataclass(slots=True)
class Settling:
    """One load under way.  Only ``seen`` writes here."""

    for_s: float
    until_s: float
    since_s: float
    most: int = 0

    def seen(self, held: int | None, quota: int, now_s: float) -> bool:
        """Take a look into account; whether it has loaded.

        Args:
            held: bytes of the program; None where they cannot be read, which proves nothing.
            quota: its steady quota in bytes.
            now_s: of the look.
        """
        if held is not None:
            grown = held > self.most + max(NOISE_BYTES, int(self.most * NOISE_RATIO))
            if grown:
                self.most = held
            if grown or held > quota:
                self.since_s = now_s
            if self.most * 2 >= quota and now_s - self.since_s >= self.for_s:
                return True
        return now_s >= self.until_s
