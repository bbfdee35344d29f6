"""The seam between the engine and a model: ``Runner``, ``Result``, and what all kinds share.

A job is a map of plain values whose shape the front has checked; its meaning is checked here.
A refusal is ``InvalidParams``.  A job that was cancelled gives a Result that holds what was done
until then: its caller has no use for it.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from umad.core.batching import Bounds
from umad.errors import InvalidParams, ModelFailed

if TYPE_CHECKING:
    import torch

Job = Mapping[str, Any]
Cancelled = Callable[[], bool]
Emit = Callable[[str], None]
"""Takes what the text of an answer has grown by."""

# What a run takes whatever its size: kernel scratch, tokens, Python objects.
# Source: our measurement, x86-64, torch 2.13, growth of RssAnon over a one-token run.
RUN_BYTES: Final = 4 << 20
SEED_MAX: Final = (1 << 63) - 1
FUSED_ATTENTION: Final = frozenset({"sdpa", "flash_attention_2", "flash_attention_3"})


@dataclass(frozen=True, slots=True)
class Result:
    """An answer in plain values (str, int, float, bytes, list, dict): it crosses MessagePack.

    ``size`` is what ``Runner.size`` could only bound, where the run has shown it.
    """

    data: dict[str, Any]
    size: tuple[int, int] | None = None


class Runner(Protocol):
    """One loaded model.

    ``kind`` is one of settings.MODEL_KINDS; ``resident_bytes`` is what its parameters and buffers
    take, each storage once.
    """

    kind: str
    resident_bytes: int

    def bytes_needed(self, job: Job) -> int:
        """The most a run of this job holds beyond the weights, in bytes.

        Pure and quick: figures of config.json and sizes of the job, no tokenizer, no device.

        Raises:
            InvalidParams: the job means nothing to this model.
        """
        ...

    def size(self, job: Job) -> tuple[int, int]:
        """What the job's bytes are counted by: (tokens of one row, rows), at most.

        A kind without tokens has units of its own; what counts is that the bytes follow them.

        Raises:
            InvalidParams: the job means nothing to this model.
        """
        ...

    def run(self, job: Job, cancelled: Cancelled) -> Result:
        """Answer the job, in the calling thread.

        Args:
            job: see the module of the kind.
            cancelled: asked between steps; once it says yes, the run ends.

        Raises:
            InvalidParams: the job means nothing to this model.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A job as its model reads it, tokenised and checked.

    Attributes:
        tokens: of its longest row, with what it may generate.
        rows: how many.
        bytes_needed: the most that it holds when it runs alone, beyond the weights.
        inputs: for its runner.
        alike: only those that are equal in this go together.
        passes: how often its forward is repeated, the same for all that are alike.
    """

    tokens: int
    rows: int
    bytes_needed: int
    inputs: Any
    alike: Hashable = None
    passes: int = 1


@runtime_checkable
class Tells(Protocol):
    """A runner that tells its answer as it grows."""

    def run_telling(self, job: Job, cancelled: Cancelled, emit: Emit | None) -> Result:
        """As ``Runner.run``; what was told is the answer's ``text``, piece by piece."""
        ...


@runtime_checkable
class Together(Protocol):
    """A runner that answers several jobs in one forward.

    ``unit``: so many of its tokens are work like one of a text's; ``bounds`` count in those.
    """

    bounds: Bounds
    unit: int

    def prepare(self, job: Job) -> Prepared:
        """Read a job, once.

        Raises:
            InvalidParams: the job means nothing to this model.
        """
        ...

    def bytes_together(self, tokens: int, rows: int) -> int:
        """The most that one forward of so many rows of so many tokens holds, in bytes."""
        ...

    def run_together(self, jobs: Sequence[Prepared], cancelled: Cancelled) -> list[Result]:
        """Answer them, in their order; a single one may be of any size."""
        ...


class Generation(Protocol):
    """Several answers that grow together; one thread steps it.

    It keeps what was read of prompts, for those that begin alike, as far as it is told to:
    ``kept_bytes``.  Of the steps since the last ``keep``: ``fresh`` is how many tokens of prompts
    they have read, ``spared_bytes`` the most that one would have held beside, had nothing been
    kept before.
    """

    @property
    def fresh(self) -> int: ...  # noqa: D102
    @property
    def spared_bytes(self) -> int: ...  # noqa: D102
    @property
    def kept_bytes(self) -> int: ...  # noqa: D102

    def keep(self, most: int) -> None:
        """Keep what is fresh, and of all no more than ``most`` bytes.

        One that fails has kept less.
        """
        ...

    def shrink(self, most: int) -> None:
        """Keep no more than ``most`` bytes: what was used last."""
        ...

    def join(self, job: Prepared, cancelled: Cancelled, emit: Emit | None) -> Any:
        """Begin one more at the next step; returns what names it."""
        ...

    def size(self, names: Collection[Any] | None = None) -> tuple[int, int]:
        """Of these, or of all: (tokens of one in the mean, rounded up; how many).

        What they hold follows from all their tokens together, not from those of the longest.
        """
        ...

    def step(self, names: Collection[Any] | None = None) -> list[tuple[Any, Result]]:
        """Let each grow by a token, or read on in its prompt; those that are done now.

        After a step that failed each is where it was before.

        Args:
            names: those alone; all where None.
        """
        ...

    def set_aside(self, name: Any) -> None:
        """Let go of what one holds; it reads its tokens again in the next step that names it."""
        ...

    def leave(self, name: Any) -> None:
        """Let go of one that is not done."""
        ...


@runtime_checkable
class Joins(Protocol):
    """A runner whose answers can grow together; ``joins`` is False where this model's cannot."""

    joins: bool

    def prepare(self, job: Job) -> Prepared:
        """As ``Together.prepare``."""
        ...

    def generation(self) -> Generation:
        """A new one, empty."""
        ...


def mean_up(numbers: Sequence[int]) -> int:
    """The mean, rounded up; 0 of none."""
    return -(-sum(numbers) // max(1, len(numbers)))


class Stop(Exception):  # never leaves this folder
    """Ends a library's loop from inside its callback, because the job was cancelled."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model comes from and where it goes."""

    path: str
    device: str
    dtype: str

    @property
    def arguments(self) -> dict[str, Any]:
        """What every ``from_pretrained`` of transformers is given."""
        placed = {} if self.device == "cpu" else {"device_map": {"": self.device}}
        return {"local_files_only": True, "dtype": self.dtype, "use_safetensors": True, **placed}


def read(model_class: Any, source: Source, **known: Any) -> Any:
    """A model of transformers with all of its weights.

    Args:
        model_class: of transformers.
        source: its folder, and how to read it.
        known: what was read of it already (``config``).

    Raises:
        ModelFailed: the files lack some; transformers would make those up by chance.
    """
    model, found = model_class.from_pretrained(
        source.path, output_loading_info=True, **source.arguments, **known
    )
    missing = sorted(found["missing_keys"])
    if missing:
        raise ModelFailed(f"{source.path} lacks {len(missing)} weights, {missing[0]} first")
    return model.eval()


def text(job: Job, key: str) -> str:
    """A text that must be there."""
    value = job.get(key)
    if not isinstance(value, str):
        raise InvalidParams(f"{key} must be text, not {type(value).__name__}")
    return value


def whole(job: Job, key: str, low: int, high: int) -> int:
    """A whole number that must be there, between two bounds, both included."""
    value = job.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidParams(f"{key} must be a whole number from {low} to {high}, not {value!r}")
    return value


def number(job: Job, key: str, low: float, high: float, default: float) -> float:
    """A number between two bounds, both included; ``default`` where it is missing or None."""
    value = job.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidParams(f"{key} must be a number from {low:g} to {high:g}, not {value!r}")
    return float(value)


def generator(job: Job, device: "torch.device | str") -> "torch.Generator":
    """The job's own source of chance: torch's global one is shared by all threads."""
    import torch

    source = torch.Generator(device)
    if job.get("seed") is None:
        source.seed()
    else:
        source.manual_seed(whole(job, "seed", 0, SEED_MAX))
    return source


def fused(config: Any) -> bool:
    """Whether attention runs without a matrix of tokens by tokens."""
    return getattr(config, "_attn_implementation", None) in FUSED_ATTENTION
