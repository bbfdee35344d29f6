"""The words of the simulator: what tasks wait for, what is simulated, what was found."""

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tests.simulation.program import Program


class Lost(Exception):
    """The connection ended before the answer came."""


class Found(Exception):
    """A rule was broken: ``rule`` names it."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(rule, text)  # both, so that it can cross from one process to another
        self.rule, self.text = rule, text

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


@dataclass(frozen=True, slots=True)
class Ask:
    """A request; ``refused``: the engine must refuse it, whatever the moment."""

    method: str
    params: Mapping[str, Any]
    refused: bool = False


PARK: Final = None
Op = Ask | float | None
Steps = Generator[Op, Any, None]


class Task:
    """A generator on its way; ``token`` makes wake-ups of an earlier wait void.

    It ends with ``body``, the process it runs in, though its program may start again.
    """

    __slots__ = ("body", "parked", "program", "steps", "token")

    def __init__(self, program: "Program", steps: Steps) -> None:
        self.program, self.body, self.steps = program, program.body, steps
        self.token = 0
        self.parked = False


@dataclass(slots=True)
class Pending:
    """An open request."""

    task: Task
    token: int
    ask: Ask
    asked_s: float
    bound_s: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated; equal scenarios give equal runs."""

    seed: int
    hours: float
    programs: tuple[int, ...] = tuple(range(7))
    faults: frozenset[str] = frozenset(
        {"crash", "lie", "fork", "stop", "restart", "machine", "broken", "cut", "quota"}
    )
    load: float = 1.0  # sessions, times the usual
    trouble: float = 1.0  # faults, times the usual
    dense: bool = False  # every look is taken
