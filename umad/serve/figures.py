"""What the turns of one instance have done, counted where they are done and shown by the front.

Owns ``Figures``.  It reaches the front as the notification ``work``, now and then.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

ROWS: Final = (1, 2, 4, 8, 16, 32, 64)
"""Upper bounds of the histogram of rows; beyond them lies one bucket more."""
EVERY_S: Final = 0.5


class Figures:
    """Counts, since the instance began; one thread counts and tells.

    Args:
        tell: takes the figures as plain values.

    Attributes:
        batches: forwards that were closed, by why.
        rows: forwards by their rows, in the buckets of ``ROWS``.
        rows_sum: of all forwards.
        growing: answers that grow now.
        prompt_tokens: of the prompts of answers that grew together.
        cached_tokens: of these, those that had been read for others before.
        kept_bytes: what is kept of prompts now.
        set_aside: times that an answer gave way to those beside it, and read its tokens again.
        restarts: faults of our own that the thread has survived.
    """

    def __init__(self, tell: Callable[[dict[str, Any]], None]) -> None:
        self._tell = tell
        self._told_s = float("-inf")
        self.batches: Counter[str] = Counter()
        self.rows = [0] * (len(ROWS) + 1)
        self.rows_sum = 0
        self.growing = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.kept_bytes = 0
        self.set_aside = 0
        self.restarts = 0
        self._told = self.shown()

    def forward(self, rows: int) -> None:
        """A forward of so many rows is done."""
        self.rows[bisect_left(ROWS, rows)] += 1
        self.rows_sum += rows

    def prompt(self, answer: Mapping[str, Any]) -> None:
        """An answer that grew beside others has ended."""
        self.prompt_tokens += answer.get("prompt_tokens", 0)
        self.cached_tokens += answer.get("cached_tokens", 0)

    def tell(self, *, idle: bool = False) -> None:
        """Tell them, if they have changed: a few times a second, and before a rest."""
        now_s = time.monotonic()
        if not idle and now_s - self._told_s < EVERY_S:
            return
        shown = self.shown()
        if shown != self._told:
            self._tell(shown)
            self._told_s, self._told = now_s, shown

    def shown(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "batches": dict(self.batches),
            "rows": list(self.rows),
            "rows_sum": self.rows_sum,
            "growing": self.growing,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "kept_bytes": self.kept_bytes,
            "set_aside": self.set_aside,
            "restarts": self.restarts,
        }


def sum_of(all_shown: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The figures of several instances as those of one."""
    whole = Figures(lambda _: None)
    for shown in all_shown:
        whole.batches.update(shown["batches"])
        whole.rows = [a + b for a, b in zip(whole.rows, shown["rows"], strict=True)]
        whole.rows_sum += shown["rows_sum"]
        whole.growing += shown["growing"]
        whole.prompt_tokens += shown["prompt_tokens"]
        whole.cached_tokens += shown["cached_tokens"]
        whole.kept_bytes += shown["kept_bytes"]
        whole.set_aside += shown["set_aside"]
        whole.restarts += shown["restarts"]
    return whole.shown()
