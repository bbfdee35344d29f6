"""Which of the jobs that wait go together in one forward, and when: sliding windows by length.

A forward costs a part of its own, whatever it holds, and a part for each padded token of its rows.
The first is what a batch saves, and what it may waste: that figure, in tokens (the *overhead*), is
measured, and all bounds follow from it.  Where it is small, a model computes what it is given and
batching does not pay: then batches stay small by themselves.  Rules:

1. next comes whose turn it is: arrival plus ``STRETCH`` times what it takes alone.  So a short one
   passes long ones that came a little earlier, and nobody who came later than that passes anybody;
2. those of its kind and of like length join it, in the same order, while the batch stays within
   its rows, its padded area and its bytes, and while padding costs no more than the forwards that
   are saved.  Who is too large for those bounds alone runs alone;
3. a batch that could take no more begins at once.  So does one when as many wait as have lately
   been there together: nobody else can come.  A lone request on an idle worker therefore never
   waits;
4. else it waits for the others: until its oldest has waited for the window with the worker idle,
   and no longer than a forward's own part, which is all that they save by coming together.  Who
   came during a forward waits so, too: its neighbours of that forward are just being answered, and
   ask again;
5. where that did not pay, since not all came or the worker rested for longer than that part, the
   next ones begin without waiting: one, then three, then seven.  Those that are there and those of
   the forward before then take turns, by halves where a half is worth a forward: some are computed
   while the others are answered and ask again, and the worker never rests;
6. one whose deadline has passed is not begun.

Stays out: the jobs themselves, who cancels them, clocks and threads.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

ROWS_MAX: Final = 64
AREA_MAX: Final = 8192
STRETCH: Final = 8.0
PADDED_MAX: Final = 1.5
"""Padded tokens of a batch, over the real ones, at most."""
LONGEST_MAX: Final = 3.0
"""The longest row of a batch that is not padded, over their mean, at most: nothing is wasted then,
but short ones would wait for the end of a long one."""
AMORTISED: Final = 16.0
"""A batch of so many times the overhead gains too little from one row more: 6 %."""
AREA_MIN: Final = 512
QUIET_WINDOWS: Final = 4.0
"""After so many windows without anybody, nobody is expected."""
OVERHEAD_TOKENS: Final = (8.0, 64.0, 4096.0)
"""The least, the first guess, and the most that is believed.
Source: MiniLM, 2 cores, one torch thread: 57 tokens, from 8 and 32 rows of 8."""
SECONDS_PER_TOKEN: Final = 1e-4  # a first guess, too
KEPT: Final = 0.97  # of the weight of what was measured before, at each forward
APART_MAX: Final = 31
"""So many begin without waiting where waiting has not paid for long: a try costs little then, and
those that have come to ask in step are still found."""
WORTH: Final = 2.0
"""A half of so many times the overhead is worth a forward."""
_OUTLIER: Final = 4.0  # a forward that took so many times what was expected was disturbed


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a kind of model says of its batches.

    Attributes:
        rows_max: of a batch.
        area_min: padded tokens that a batch may grow to, whatever was measured.
        area_max: padded tokens of a batch of several, whatever was measured.
        padded: its rows are padded to the longest; else each costs what it is.
    """

    rows_max: int = ROWS_MAX
    area_min: int = AREA_MIN
    area_max: int = AREA_MAX
    padded: bool = True


class Why(StrEnum):
    """Why a batch began when it did."""

    ROWS = "rows"
    AREA = "area"
    BYTES = "bytes"
    ALL = "all"
    APART = "apart"
    WINDOW = "window"


@dataclass(frozen=True, slots=True)
class Item:
    """A job that waits: its length in tokens and its rows, each at least 1; times are monotonic.

    ``alike``: only those that are equal in this go together; ``passes``: how often its forward is
    repeated (the steps of a diffusion), the same for all that are alike.
    """

    id: str
    tokens: int
    rows: int
    arrived_s: float
    deadline_s: float
    alike: Hashable = None
    passes: int = 1

    @property
    def area(self) -> int:
        """All of its tokens, padded to its longest row."""
        return self.tokens * self.rows


@dataclass(frozen=True, slots=True)
class Batch:
    """What is to begin now, in order of turn."""

    items: tuple[Item, ...]
    why: Why

    @property
    def tokens(self) -> int:
        """The length that its rows are padded to."""
        return max(item.tokens for item in self.items)

    @property
    def rows(self) -> int:
        """Of all its items."""
        return sum(item.rows for item in self.items)


class Pace:
    """Seconds of one pass: a part of its own and one for each padded token, as measured.

    Least squares over what was measured, forgotten little by little.
    """

    def __init__(self) -> None:
        _, self.overhead_tokens, _ = OVERHEAD_TOKENS
        self.per_token_s = SECONDS_PER_TOKEN
        self._weight = self._area = self._seconds = self._areas = self._products = 0.0

    @property
    def overhead_s(self) -> float:
        """What one forward less saves."""
        return self.overhead_tokens * self.per_token_s

    def seconds(self, area: int) -> float:
        """Of a forward of so many padded tokens."""
        return (self.overhead_tokens + area) * self.per_token_s

    def observe(self, area: int, seconds: float) -> None:
        """A forward of so many padded tokens has taken so long."""
        if self._weight:
            seconds = min(seconds, _OUTLIER * self.seconds(area))
        self._weight = KEPT * self._weight + 1
        self._area = KEPT * self._area + area
        self._seconds = KEPT * self._seconds + seconds
        self._areas = KEPT * self._areas + area * area
        self._products = KEPT * self._products + area * seconds
        mean, took = self._area / self._weight, self._seconds / self._weight
        spread = self._areas / self._weight - mean * mean
        if spread > (mean / 8) ** 2:  # else all were alike, and nothing tells the two parts apart
            slope = (self._products / self._weight - mean * took) / spread
            least, _, most = OVERHEAD_TOKENS
            overhead = took / slope - mean if slope > 0 else most
            self.overhead_tokens = max(least, min(overhead, most))
        self.per_token_s = max(took, 1e-9) / (mean + self.overhead_tokens)


class Batcher:
    """Chooses for one worker of one model; it is asked whenever that worker is idle.

    Args:
        window_s: how long anybody waits for company, at most.
        bounds: of its model's kind.
    """

    def __init__(self, window_s: float, bounds: Bounds = Bounds()) -> None:
        self.pace = Pace()
        self._window_s = window_s
        self._bounds = bounds
        self._crowd = 1  # how many have lately been there together
        self._before = 0  # items of the batch before
        self._waits = False  # what begins next has been waited for
        self._apart = self._apart_left = 0  # so many begin without, since the last wait; and now
        self._idle_since_s = float("-inf")

    @property
    def area_max(self) -> int:
        """Padded tokens that a batch of several may have now."""
        wanted = int(AMORTISED * self.pace.overhead_tokens)
        return min(self._bounds.area_max, max(self._bounds.area_min, wanted))

    def choose(
        self,
        waiting: Sequence[Item],
        now_s: float,
        *,
        bytes_max: int,
        price: Callable[[int, int], int],
    ) -> Batch | float | None:
        """What to begin now.

        Args:
            waiting: all that wait, in order of arrival.
            now_s: the time.
            bytes_max: what a batch of several may take.
            price: the bytes of a forward, from its (tokens of a row, rows): the padded length, or
                the mean of rows that are not padded.

        Returns:
            A batch; or when to ask again, unless somebody comes before; None: nobody waits.
        """
        live = [item for item in waiting if now_s < item.deadline_s]  # 6
        if not live:
            return None
        oldest_s = min(item.arrived_s for item in live)
        if oldest_s - self._idle_since_s > QUIET_WINDOWS * self._window_s:
            self._crowd, self._before, self._apart, self._apart_left = 1, 0, 0, 0
        self._crowd = max(self._crowd, len(live))
        live.sort(key=self._turn_s)  # 1; equals stay in order of arrival
        batch, full = self._together(live, bytes_max, price)
        if full is None and self._apart_left:
            self._apart_left -= 1
            return self._begin(self._half(batch, len(live)), Why.APART)  # 5
        if full is None and len(live) == self._crowd:
            full = Why.ALL  # 3
        saved_s = batch[0].passes * self.pace.overhead_s
        if full is not None:
            self._waited(paid=now_s - self._idle_since_s <= saved_s)
            return self._begin(batch, full)
        until_s = max(oldest_s, self._idle_since_s) + min(self._window_s, saved_s)  # 4
        if now_s < until_s:
            self._waits = True
            return until_s
        self._waits = True  # who came during a forward of that length has waited, too
        self._waited(paid=False)
        self._crowd = (self._crowd + len(live)) // 2
        return self._begin(batch, Why.WINDOW)

    def _begin(self, batch: tuple[Item, ...], why: Why) -> Batch:
        self._before = len(batch)
        return Batch(batch, why)

    def _waited(self, *, paid: bool) -> None:
        """A wait is over, if there was one: learn of it."""
        if self._waits:
            self._waits = False
            self._apart = 0 if paid else min(2 * self._apart + 1, APART_MAX)
            self._apart_left = self._apart

    def _half(self, batch: tuple[Item, ...], live: int) -> tuple[Item, ...]:
        """Of those that are there and those of the batch before."""
        half = batch[: -(-(live + self._before) // 2)]
        worth = WORTH * self.pace.overhead_tokens
        return half if sum(item.area for item in half) >= worth else batch

    def done(self, now_s: float, area: int, seconds: float | None) -> None:
        """What was chosen has ended: a pass of so many padded tokens took so long, if known."""
        if seconds is not None:
            self.pace.observe(area, seconds)
        self._idle_since_s = now_s

    def _turn_s(self, item: Item) -> float:
        return item.arrived_s + STRETCH * item.passes * self.pace.seconds(item.area)

    def _together(
        self, ready: Sequence[Item], bytes_max: int, price: Callable[[int, int], int]
    ) -> tuple[tuple[Item, ...], Why | None]:
        """Who joins the first (2), and which bound kept others out, or would keep out any other."""
        first, *others = ready
        chosen = [first]
        tokens, rows, real = first.tokens, first.rows, first.area
        padded = self._bounds.padded
        full: Why | None = None
        refused: set[tuple[int, int]] = set()  # so that equals stay in their order
        for item in others:
            size = (item.tokens, item.rows)
            longest, more, whole = max(tokens, item.tokens), rows + item.rows, real + item.area
            wasted = longest * more - whole
            if size in refused or item.alike != first.alike:
                continue
            if longest * more > (PADDED_MAX if padded else LONGEST_MAX) * whole or (
                padded and wasted > len(chosen) * self.pace.overhead_tokens
            ):
                refused.add(size)
                continue
            passed = self._passed(more, longest * more if padded else whole, bytes_max, price)
            if passed is not None:
                full = full or passed
                refused.add(size)
                continue
            chosen.append(item)
            tokens, rows, real = longest, more, whole
        if full is None:  # could it take one row more?
            area = tokens * (rows + 1) if padded else real + tokens
            full = self._passed(rows + 1, area, bytes_max, price)
        return tuple(chosen), full

    def _passed(
        self, rows: int, area: int, bytes_max: int, price: Callable[[int, int], int]
    ) -> Why | None:
        """The bound that a batch of this size would pass."""
        if rows > self._bounds.rows_max:
            return Why.ROWS
        if area > self.area_max:
            return Why.AREA
        return Why.BYTES if price(-(-area // rows), rows) > bytes_max else None
