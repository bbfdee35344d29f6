"""Answers that grow together, token by token: what each asked for, its text, and its end."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from umad.serve.kinds import generation
from umad.serve.kinds.base import Cancelled, Emit, Prepared, Result, mean_up
from umad.serve.kinds.prefixes import Prefixes
from umad.serve.kinds.telling import Teller

if TYPE_CHECKING:
    import torch


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
        reading: bytes that a step holds, at most, to read so many tokens of a prompt of so many.
    """

    def __init__(
        self, model: Any, tokenizer: Any, ends: list[int], reading: Callable[[int, int], int]
    ) -> None:
        self._packed = generation.Packed(model)
        self._tokenizer = tokenizer
        self._ends = frozenset(ends)
        self._growing: dict[generation.Sequence, tuple[Asked, Teller, Cancelled]] = {}
        self._prefixes: Prefixes[torch.Tensor] = Prefixes(generation.BLOCK_TOKENS)
        self._block_bytes = 1  # known with the first
        self._fresh: list[tuple[list[int], generation.Sequence]] = []
        self._reading = reading
        self.fresh = 0
        self.spared_bytes = 0

    def size(self, names: Collection[generation.Sequence] | None = None) -> tuple[int, int]:
        """Tokens of one of these in the mean, rounded up, and how many there are."""
        chosen = self._growing if names is None else names
        return mean_up([len(one.tokens) for one in chosen]), len(chosen)

    @property
    def kept_bytes(self) -> int:
        """What is kept of prompts."""
        return len(self._prefixes) * self._block_bytes

    def keep(self, most: int) -> None:
        """Keep what was read of prompts, in so many bytes at most."""
        import torch

        fresh, self._fresh = self._fresh, []
        self.fresh = self.spared_bytes = 0
        self.shrink(most)
        for prompt, sequence in fresh:
            self._block_bytes = generation.block_bytes(sequence)
            make = partial(generation.block_of, sequence)
            with torch.inference_mode():
                self._prefixes.add(prompt[: sequence.read], most // self._block_bytes, make)

    def shrink(self, most: int) -> None:
        """Keep no more than so many bytes."""
        self._prefixes.shrink(most // self._block_bytes)

    def join(self, job: Prepared, cancelled: Cancelled, emit: Emit | None) -> generation.Sequence:
        """Begin one more at the next step; returns what names it."""
        asked: Asked = job.inputs
        sequence = generation.Sequence(
            list(asked.prompt), len(asked.prompt) + asked.new, asked.pick
        )
        teller = Teller(self._tokenizer, asked.stops, emit)
        self._growing[sequence] = (asked, teller, cancelled)
        return sequence

    def set_aside(self, name: generation.Sequence) -> None:
        """Let go of what one holds; it goes on with the next step that names it."""
        name.forget()

    def leave(self, name: generation.Sequence) -> None:
        """Let go of one that is not done."""
        self._growing.pop(name, None)

    def step(
        self, names: Collection[generation.Sequence] | None = None
    ) -> list[tuple[generation.Sequence, Result]]:
        """Let each grow by a token, or read on in its prompt; those that are done now."""
        import torch

        names = list(self._growing if names is None else names)
        before = {name: name.read for name in names}
        with torch.inference_mode():
            grown = self._packed.step(names, self._recall)
        self._note(before)
        done = []
        for sequence in grown:
            asked, teller, cancelled = self._growing[sequence]
            new, token = len(sequence.tokens) - len(asked.prompt), sequence.tokens[-1]
            stopped = cancelled() or token in self._ends
            if teller.add(token) or stopped or new == asked.new:
                del self._growing[sequence]
                data = answer_of(
                    teller, len(asked.prompt), new, stopped=stopped, cached=sequence.recalled
                )
                done.append((sequence, Result(data, (len(sequence.tokens), 1))))
        return done

    def _recall(self, sequence: generation.Sequence) -> "list[torch.Tensor]":
        # The last token is read by each: what follows it is what is asked for.
        return self._prefixes.find(sequence.tokens[:-1])

    def _note(self, before: dict[generation.Sequence, int]) -> None:
        """A step is done before which so many tokens of each were read."""
        read = longest = 0
        for sequence, had in before.items():
            prompt = self._growing[sequence][0].prompt
            if had < len(prompt) and had < sequence.read:
                self._fresh.append((prompt, sequence))
                read += sequence.read - max(had, sequence.recalled)
                longest = max(longest, len(prompt) if sequence.recalled and not had else 0)
        self.fresh += read
        spared = min(longest, generation.PREFILL_TOKENS) - read
        if spared > 0:
            self.spared_bytes = max(self.spared_bytes, self._reading(spared, longest))


def answer_of(
    teller: Teller, prompt: int, new: int, *, stopped: bool, cached: int = 0
) -> dict[str, Any]:
    """An answer of so many tokens that has ended; ``stopped``: not by its length.

    ``cached``: so many of the prompt others had read.
    """
    return {
        "text": teller.finish(),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "completion_tokens": new,
        "finish_reason": "stop" if stopped or teller.stopped else "length",
    }
