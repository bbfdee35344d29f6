"""Answers that grow together, token by token: what each asked for, its text, and its end."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from umad.serve.kinds import generation
from umad.serve.kinds.base import Cancelled, Emit, Prepared, Result
from umad.serve.kinds.telling import Teller


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """What a job asks for: its prompt in tokens, how many may follow, and how they are chosen."""

    prompt: list[int]
    new: int
    stops: list[str]
    pick: Callable[[list[int], Any], Any] | None


class Answers:
    """Answers that grow together; see ``base.Generation``.

    Args:
        model: one that ``generation.joins`` said yes of.
        tokenizer: its own.
        ends: tokens that end an answer.
    """

    def __init__(self, model: Any, tokenizer: Any, ends: list[int]) -> None:
        self._packed = generation.Packed(model)
        self._tokenizer = tokenizer
        self._ends = frozenset(ends)
        self._growing: dict[generation.Sequence, tuple[Asked, Teller, Cancelled]] = {}

    @property
    def size(self) -> tuple[int, int]:
        """Tokens of the longest, and how many there are."""
        return max((len(one.tokens) for one in self._growing), default=0), len(self._growing)

    def join(self, job: Prepared, cancelled: Cancelled, emit: Emit | None) -> generation.Sequence:
        """Begin one more at the next step; returns what names it."""
        asked: Asked = job.inputs
        sequence = generation.Sequence(list(asked.prompt), asked.pick)
        teller = Teller(self._tokenizer, asked.stops, emit)
        self._growing[sequence] = (asked, teller, cancelled)
        return sequence

    def leave(self, name: generation.Sequence) -> None:
        """Let go of one that is not done."""
        self._growing.pop(name, None)

    def step(
        self, names: Iterable[generation.Sequence] | None = None
    ) -> list[tuple[generation.Sequence, Result]]:
        """Let each grow by a token, or read on in its prompt; those that are done now."""
        import torch

        with torch.inference_mode():
            grown = self._packed.step(list(self._growing if names is None else names))
        done = []
        for sequence in grown:
            asked, teller, cancelled = self._growing[sequence]
            new, token = len(sequence.tokens) - len(asked.prompt), sequence.tokens[-1]
            stopped = cancelled() or token in self._ends
            if teller.add(token) or stopped or new == asked.new:
                del self._growing[sequence]
                data = answer_of(teller, len(asked.prompt), new, stopped=stopped)
                done.append((sequence, Result(data, (len(sequence.tokens), 1))))
        return done


def answer_of(teller: Teller, prompt: int, new: int, *, stopped: bool) -> dict[str, Any]:
    """An answer of so many tokens that has ended; ``stopped``: not by its length."""
    return {
        "text": teller.finish(),
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "finish_reason": "stop" if stopped or teller.stopped else "length",
    }
