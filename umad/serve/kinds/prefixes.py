"""What was read of prompts and may be wanted again: blocks of tokens, found by what stands in them.

Owns ``Prefixes``.  A block hangs below the one that stood before it, under its own tokens; so what
two prompts begin with is there once, and found by comparing tokens, never by a number that stands
for them.  Rules:

1. only whole blocks are kept and found;
2. no block was used later than the one before it: the least recently used of all has none behind
   it, so it can always go;
3. one thread uses it.

Stays out: what is kept of a block (here it is opaque), and how many there may be.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Block(Generic[T]):
    """``beside``: it and its siblings, by their tokens; ``behind``: those that follow it."""

    tokens: tuple[int, ...]
    kept: T
    beside: "dict[tuple[int, ...], _Block[T]]"
    behind: "dict[tuple[int, ...], _Block[T]]" = field(default_factory=dict)


class Prefixes(Generic[T]):
    """Empty at first.

    Args:
        size: tokens of a block.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._first: dict[tuple[int, ...], _Block[T]] = {}
        self._by_age: OrderedDict[_Block[T], None] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        """How many blocks there are."""
        return len(self._by_age)

    def find(self, tokens: Sequence[int]) -> list[T]:
        """What is kept of the longest beginning of ``tokens``, block by block."""
        path = self._path(tokens)
        self._use(path)
        return [block.kept for block in path]

    def add(self, tokens: Sequence[int], most: int, make: Callable[[int], T]) -> None:
        """Keep what is missing of ``tokens``, from their beginning on.

        Others go for it, but none of these.

        Args:
            tokens: those behind the last whole block are left out.
            most: blocks in all, afterwards.
            make: gives what is to be kept of the block that begins with the token of this place.
        """
        self.shrink(most)
        path = self._path(tokens)
        self._use(path)
        try:
            for at in range(len(path) * self._size, len(tokens) - self._size + 1, self._size):
                if len(self) >= most and not self._make_room(path):
                    break
                own = tuple(tokens[at : at + self._size])
                beside = path[-1].behind if path else self._first
                block = beside[own] = _Block(own, make(at), beside)
                self._by_age[block] = None
                path.append(block)
        finally:
            self._use(path)

    def shrink(self, most: int) -> None:
        """Let go of the least recently used until there are no more than ``most``."""
        while len(self._by_age) > most:
            block, _ = self._by_age.popitem(last=False)
            del block.beside[block.tokens]

    def _path(self, tokens: Sequence[int]) -> list[_Block[T]]:
        path: list[_Block[T]] = []
        beside = self._first
        for at in range(0, len(tokens) - self._size + 1, self._size):
            block = beside.get(tuple(tokens[at : at + self._size]))
            if block is None:
                break
            path.append(block)
            beside = block.behind
        return path

    def _make_room(self, path: list[_Block[T]]) -> bool:
        """Let one go that is not of this path."""
        oldest = next(iter(self._by_age), None)
        if oldest is None or oldest in path:  # all are: the others are older than these
            return False
        self.shrink(len(self) - 1)
        return True

    def _use(self, path: list[_Block[T]]) -> None:
        for block in reversed(path):  # 2
            self._by_age.move_to_end(block)
