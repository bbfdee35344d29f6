"""The tape handed out in parts, as lines of JSON: what ``umadctl snapshot`` keeps.

A part is small, so that making it never holds up a look at memory; all parts together tell of the
moment at which part 0 was asked for.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

from umad import __version__
from umad.core.tape import Tape
from umad.errors import InvalidParams, Overloaded

FORMAT: Final = 1
PART_BYTES: Final = 16 << 10
# Whoever began and does not go on holds nobody up for longer.
_IDLE_S: Final = 5.0
_NOBODY: Final = -1


class Recording:
    """One reading of the tape at a time."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._reader = _NOBODY
        self._next = 0
        self._until_s = 0.0
        self._lines: Iterator[bytes] = iter(())
        self._left = b""

    def forget(self, connection: int) -> None:
        """This connection has ended, or has everything."""
        if connection == self._reader:
            self._reader, self._until_s = _NOBODY, 0.0
            self._lines, self._left = iter(()), b""

    def part(self, connection: int, part: int, now_s: float) -> dict[str, bytes | bool]:
        """The answer to ``snapshot``.

        Args:
            connection: who asks.
            part: 0 begins a new reading.
            now_s: monotonic seconds.

        Raises:
            Overloaded: somebody else reads at the moment.
            InvalidParams: it is not this part's turn.
        """
        if part == 0:
            if connection != self._reader and now_s < self._until_s:
                raise Overloaded("somebody else takes a snapshot just now", retry_after_s=1.0)
            self._reader, self._left = connection, b""
            # The tape is read up to here now, not when the first line is made of it.
            self._lines = _encoded({"format": FORMAT, "umad": __version__}, self._tape.records())
        elif (connection, part) != (self._reader, self._next):
            raise InvalidParams("parts follow each other from 0 on; begin again")
        self._next, self._until_s = part + 1, now_s + _IDLE_S
        data = bytearray(self._left)
        while len(data) <= PART_BYTES and (line := next(self._lines, None)) is not None:
            data += line
        self._left = bytes(data[PART_BYTES:])
        if last := not self._left:
            self.forget(connection)
        return {"data": bytes(data[:PART_BYTES]), "last": last}


def _encoded(head: dict[str, Any], records: Iterator[dict[str, Any]]) -> Iterator[bytes]:
    yield json.dumps(head).encode() + b"\n"
    for record in records:
        yield json.dumps(record, separators=(",", ":")).encode() + b"\n"
