"""How many bytes a forward takes beyond the weights: a formula fitted to what forwards took.

    bytes = base + a*tokens + b*rows + c*tokens*rows + d*tokens^2*rows

``tokens`` are those of one row (the padded length; where rows are not padded their mean), ``rows``
those of the batch.  The last term is for attention that holds a matrix of tokens by tokens; where
there is none the fit finds 0.  Rules:

1. before ``SAMPLES_MIN`` forwards, and for one far larger than any seen, the worst case that the
   model's configuration gives counts, never a guess; after them it gives way little by little;
2. no coefficient is negative: more work never costs less.  So a forward smaller than any seen is
   taken for the smallest, and one somewhat larger is stretched by what its work grew;
3. on top comes a margin, a high quantile of what the formula missed; a forward that takes more than
   was predicted widens it at once, so that the same one would fit, and one of another size by no
   more bytes and by no larger a share: what a giant lacked is nothing that a small one needs.
   Each that does not exceed lets that shrink slowly, as does each that was refused: else a model
   that has no room for it would never run again, and nothing could show that it was too much;
4. a forward that was cut short is no measurement: it is evidence that more was needed, and counts
   for the margin alone.

Stays out: where samples are kept, and who may use the bytes.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import ceil
from typing import Final, NamedTuple, Self

from umad.values import HISTORY_SAMPLES_MAX

SAMPLES_MIN: Final = 8
MARGIN_QUANTILE: Final = 0.98
WIDENING_KEPT: Final = 0.98
BEYOND_MAX: Final = 2.0
"""How far beyond the largest forward seen the formula is believed, in tokens, rows and work."""
CUT_SHORT_STEP: Final = 0.5
"""What a forward that was cut short asks for beyond its prediction, as a share of that."""
_REFIT_EVERY: Final = 8  # a fit for each eighth of the window that is new: it takes 1 ms
_TERMS: Final = 5


class Sample(NamedTuple):
    """One forward: ``rows`` of ``tokens`` each, and the bytes that it was seen to need.

    ``predicted`` is what it had been given, 0 where nothing was predicted; ``exact`` whether
    ``bytes`` is the most it held, or else it held (or was refused) that much at least.
    """

    tokens: int
    rows: int
    bytes: int
    predicted: int = 0
    exact: bool = True

    @property
    def exceeded(self) -> bool:
        """It took more than was predicted."""
        return 0 < self.predicted < self.bytes

    @property
    def work(self) -> int:
        """Its size in one figure: all tokens of all rows."""
        return max(1, self.tokens) * max(1, self.rows)


class Formula(NamedTuple):
    """A fitted formula in bytes; ``margin`` is what goes on top."""

    base: float
    per_token: float
    per_row: float
    per_token_row: float
    per_square_row: float
    margin: float

    def expected(self, tokens: float, rows: float) -> float:
        """Without the margin."""
        return _dot(self[:_TERMS], _terms(tokens, rows))


@dataclass(frozen=True, slots=True)
class _Seen:
    """The smallest and the largest of the forwards that a formula rests on."""

    tokens: tuple[int, int]
    rows: tuple[int, int]
    work: int

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Self:
        tokens = [sample.tokens for sample in samples]
        rows = [sample.rows for sample in samples]
        work = max(sample.work for sample in samples)
        return cls((min(tokens), max(tokens)), (min(rows), max(rows)), work)

    def beyond(self, tokens: int, rows: int) -> float:
        """How many times larger than the largest this one is, 1 where it is not."""
        work = max(1, tokens) * max(1, rows)
        most = (tokens / max(1, self.tokens[1]), rows / max(1, self.rows[1]), work / self.work)
        return max(1.0, *most)


class CostModel:
    """The forwards of one model, and the formula that follows from them.

    Args:
        samples: those kept from before, oldest first; what is predicted follows from them alone.
    """

    def __init__(self, samples: Iterable[Sample] = ()) -> None:
        self._samples: deque[Sample] = deque(maxlen=HISTORY_SAMPLES_MAX)
        self._fitted: tuple[Formula, _Seen] | None = None
        self._since_fit = 0
        self.widening = 0.0  # bytes, at most
        self._stretch = 0.0  # the same as a share of what else is predicted
        self.exceeded = 0
        for sample in samples:
            self.observe(sample)

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The measured forwards that the formula rests on, oldest first."""
        return tuple(self._samples)

    @property
    def formula(self) -> Formula | None:
        """The fit; None before there are enough forwards."""
        return None if self._fitted is None else self._fitted[0]

    def observe(self, sample: Sample) -> None:
        """Take a forward in; one that took more than predicted is a finding (3)."""
        if sample.exact:
            self._samples.append(sample)
            self._since_fit += 1
            every = max(1, len(self._samples) // _REFIT_EVERY)
            if len(self._samples) >= SAMPLES_MIN and (
                self._fitted is None or sample.exceeded or self._since_fit >= every
            ):
                self._fit()
        if sample.exceeded:
            self.exceeded += 1
            wanted = float(sample.bytes)
            if not sample.exact:  # 4
                wanted = max(wanted, sample.predicted * (1 + CUT_SHORT_STEP))
            # It may have been the worst case that was too low, which knows nothing of the fit.
            short = wanted - sample.predicted
            bare = sample.predicted - self.on_top(sample.predicted)
            fitted = self._fitted_bytes(sample.tokens, sample.rows)
            if fitted is not None:
                short = max(short, wanted - fitted - self.on_top(fitted))
                bare = min(bare, fitted)
            self._stretch = max(self._stretch, (wanted - bare) / max(1.0, bare))
            self.widening += short
        elif sample.exact and sample.predicted:
            self._calm()

    def refused(self) -> None:
        """There was no room for what was predicted (3)."""
        self._calm()

    def on_top(self, predicted: float) -> float:
        """What goes on top of so many bytes, since some took more than was predicted (3)."""
        return min(self.widening, self._stretch * predicted)

    def _calm(self) -> None:
        self.widening *= WIDENING_KEPT
        self._stretch *= WIDENING_KEPT

    def predict(self, tokens: int, rows: int, worst_case: int, *, known: bool = True) -> int:
        """Bytes to book for a forward.

        Args:
            tokens: of one row, at most.
            rows: at most.
            worst_case: what the model's configuration allows it to take, in bytes; no prediction
                is above it, but for what forwards have shown beyond it.
            known: the formula may be believed; else the worst case counts.
        """
        ceiling = worst_case + ceil(self.on_top(worst_case))
        fitted = self._fitted_bytes(tokens, rows) if known else None
        if fitted is None:
            return ceiling
        believed = fitted + self.on_top(fitted)
        # Of n forwards the largest miss is passed by the next one with a chance of 1 in n + 1.
        doubt = (SAMPLES_MIN / len(self._samples)) ** 2  # 1
        return min(ceiling, ceil(believed + doubt * (ceiling - believed)))

    def _fitted_bytes(self, tokens: int, rows: int) -> float | None:
        """The formula's word and its margin; None where it has none (1)."""
        if self._fitted is None:
            return None
        formula, seen = self._fitted
        beyond = seen.beyond(tokens, rows)
        if beyond > BEYOND_MAX:
            return None
        tokens = max(seen.tokens[0], min(tokens, seen.tokens[1]))  # 2
        rows = max(seen.rows[0], min(rows, seen.rows[1]))
        # Squared: tokens^2 may hide in a term from which the forwards seen cannot tell it.
        return formula.expected(tokens, rows) * beyond**2 + formula.margin

    def _fit(self) -> None:
        self._since_fit = 0
        samples = self.samples
        terms = [_terms(sample.tokens, sample.rows) for sample in samples]
        took = [float(sample.bytes) for sample in samples]
        found = least_squares(terms, took)
        missed = sorted(held - _dot(found, row) for row, held in zip(terms, took, strict=True))
        margin = max(0.0, missed[int(MARGIN_QUANTILE * len(missed))])
        self._fitted = Formula._make((*found, margin)), _Seen.of(samples)


def least_squares(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> tuple[float, ...]:
    """The coefficients, none below 0, with the least sum of squared misses.

    With five terms every subset can be tried: the best is the plain fit of the terms that it
    uses, and of two equal ones the one with fewer terms.
    Source: the Karush-Kuhn-Tucker conditions of non-negative least squares.
    The columns are scaled to their largest value first, or squares would drown the base.
    """
    columns = range(_TERMS)
    scale = [max(row[column] for row in rows) or 1.0 for column in columns]
    scaled = [[value / most for value, most in zip(row, scale, strict=True)] for row in rows]
    turned = list(zip(*scaled, strict=True))
    products = [[_dot(left, right) for right in turned] for left in turned]
    against = [_dot(column, wanted) for column in turned]
    best = [0.0] * _TERMS
    least = 0.0  # the sum of squares, less that of ``wanted`` itself, which is the same for all
    for size in range(1, _TERMS + 1):
        for chosen in combinations(columns, size):
            right = [against[column] for column in chosen]
            solved = _solve([[products[a][b] for b in chosen] for a in chosen], right)
            if solved is None or min(solved) < 0:
                continue
            misses = -_dot(solved, right)
            if misses < least * (1 + 1e-12):
                least, best = misses, [0.0] * _TERMS
                for column, value in zip(chosen, solved, strict=True):
                    best[column] = value
    return tuple(value / most for value, most in zip(best, scale, strict=True))


def _terms(tokens: float, rows: float) -> tuple[float, ...]:
    return 1.0, tokens, rows, tokens * rows, tokens * tokens * rows


def _dot(left: Iterable[float], right: Iterable[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Gaussian elimination with pivoting; None where the terms cannot be told apart.

    The matrix is one of products, so it is symmetric and no pivot is far from its diagonal.
    """
    size = len(right)
    work = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(work[row][column]))
        if abs(work[pivot][column]) <= 1e-10 * matrix[column][column]:
            return None
        work[column], work[pivot] = work[pivot], work[column]
        for row in range(column + 1, size):
            factor = work[row][column] / work[column][column]
            for at in range(column, size + 1):
                work[row][at] -= factor * work[column][at]
    solved = [0.0] * size
    for row in reversed(range(size)):
        rest = _dot(work[row][row + 1 : size], solved[row + 1 :])
        solved[row] = (work[row][size] - rest) / work[row][row]
    return solved
