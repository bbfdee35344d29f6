"""The text of an answer as its tokens come: whole characters, and never a part of a stop string.

Owns ``Teller``.  Rule: what was told, piece by piece, is the text, whoever listens or not.
"""

from typing import Any, Final

from umad.serve.kinds.base import Emit

# A character is four byte tokens at most.  Those that still make none are told as they are.
HELD_TOKENS_MAX: Final = 8
_BROKEN: Final = "\ufffd"  # what a decoder shows for bytes that are no character, or not yet


class Teller:
    """One answer's text.

    Args:
        tokenizer: of the model.
        stops: texts that end the answer; neither they nor what follows is told.
        emit: told each piece.

    Attributes:
        text: all that was told.
        stopped: a stop string has come.
    """

    def __init__(self, tokenizer: Any, stops: list[str], emit: Emit | None = None) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._emit = emit
        self._pieces: list[str] = []
        self._held = ""  # it may be the beginning of a stop string
        self._tokens: list[int] = []  # those whose text is known, as context, and the newest
        self._known = 0  # how many of them
        self.stopped = False

    @property
    def text(self) -> str:
        """What was told so far."""
        return "".join(self._pieces)

    def add(self, token: int) -> bool:
        """Take the next token; whether a stop string has ended the answer."""
        self._tokens.append(token)
        new = self._new()
        whole = new and not new.endswith(_BROKEN)
        if whole or len(self._tokens) - self._known >= HELD_TOKENS_MAX:
            self._settle(new)
        return self.stopped

    def finish(self) -> str:
        """There are no more tokens: tell what was held back; returns the whole text."""
        if not self.stopped:
            self._settle(self._new())
            self._tell(self._held)
            self._held = ""
        return self.text

    def _new(self) -> str:
        """What the newest tokens say.

        Tokens are decoded beside those before them: some say a space there, and none alone.
        """
        before = self._decode(self._tokens[: self._known])
        return self._decode(self._tokens)[len(before) :]

    def _settle(self, new: str) -> None:
        """Take in what the newest tokens say; they become the context of the next ones."""
        self._tokens = self._tokens[self._known :]
        self._known = len(self._tokens)
        self._held += new
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        self.stopped = bool(found)
        cut = min(found) if found else self._free()
        self._tell(self._held[:cut])
        self._held = "" if self.stopped else self._held[cut:]

    def _free(self) -> int:
        """Where what could be the beginning of a stop string begins."""
        longest = max(map(len, self._stops), default=1) - 1
        for at in range(max(0, len(self._held) - longest), len(self._held)):
            rest = self._held[at:]
            if any(stop.startswith(rest) for stop in self._stops):
                return at
        return len(self._held)

    def _tell(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            if self._emit is not None:
                self._emit(piece)

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text
