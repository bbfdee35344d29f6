"""The cost model: non-negative least squares, margins that widen, and never a silent guess."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from umad.core.cost import (
    BEYOND_MAX,
    MARGIN_QUANTILE,
    SAMPLES_MIN,
    WIDENING_KEPT,
    CostModel,
    Formula,
    Sample,
    least_squares,
)
from umad.units import MIB
from umad.values import HISTORY_SAMPLES_MAX

WORST = 1 << 40
SIZES = st.tuples(st.integers(1, 4096), st.integers(1, 32))


def terms(tokens: int, rows: int) -> tuple[float, ...]:
    return 1.0, tokens, rows, tokens * rows, tokens**2 * rows


def truth(tokens: int, rows: int) -> int:
    return 5 * MIB + 3000 * tokens + 200 * tokens * rows


def model_of(*sizes: tuple[int, int], each: int = 1) -> CostModel:
    return CostModel(
        Sample(tokens, rows, truth(tokens, rows)) for tokens, rows in sizes for _ in range(each)
    )


def believed(cost: CostModel, tokens: int, rows: int) -> float:
    """The formula's word alone, as after many forwards."""
    word = cost._fitted_bytes(tokens, rows)
    assert word is not None
    return word + cost.on_top(word)


SPREAD = [(tokens, rows) for tokens in (8, 100, 1000) for rows in (1, 2, 8)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(SIZES, st.integers(0, 1 << 36)),
        min_size=1,
        max_size=60,
    )
)
def test_the_fit_is_the_best_that_has_no_negative_coefficient(
    data: list[tuple[tuple[int, int], int]],
) -> None:
    rows = [terms(*size) for size, _ in data]
    wanted = [float(took) for _, took in data]
    scale = [max(column) for column in zip(*rows, strict=True)]
    scaled = [[value / most for value, most in zip(row, scale, strict=True)] for row in rows]
    _, least = nnls(scaled, wanted)
    found = least_squares(rows, wanted)
    assert min(found) >= 0
    missed = [
        took - sum(a * b for a, b in zip(found, row, strict=True))
        for row, took in zip(rows, wanted, strict=True)
    ]
    assert math.hypot(*missed) <= least + 1e-6 * math.hypot(*wanted) + 1e-6


@pytest.mark.parametrize(
    "bytes_of",
    [
        truth,
        lambda _tokens, rows: 4096 * rows,
        lambda tokens, rows: 100 + 16 * tokens * tokens * rows,
        lambda _tokens, _rows: 7 * MIB,
        lambda _tokens, _rows: 0,
    ],
)
def test_a_law_without_noise_is_found(bytes_of: Callable[[int, int], int]) -> None:
    cost = CostModel(Sample(*size, bytes_of(*size)) for size in SPREAD * 2)
    assert cost.formula is not None
    assert cost.formula.margin == pytest.approx(0, abs=1)
    for tokens, rows in [(50, 1), (500, 4), (1000, 8)]:
        expected = cost.formula.expected(tokens, rows)
        assert expected == pytest.approx(bytes_of(tokens, rows), rel=1e-6, abs=1)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(SIZES, st.integers(0, 1 << 33)), min_size=SAMPLES_MIN, max_size=80))
def test_the_margin_covers_what_its_quantile_says(
    data: list[tuple[tuple[int, int], int]],
) -> None:
    cost = CostModel()
    for (tokens, rows), took in data:
        cost.observe(Sample(tokens, rows, took))
    # The last fit may be some samples old: those count too, but for what lies so far beyond it
    # that the worst case is booked.
    told = [
        (sample.bytes, cost._fitted_bytes(sample.tokens, sample.rows)) for sample in cost.samples
    ]
    over = sum(said is not None and took > said for took, said in told)
    unfitted = len(data) // 8
    assert over <= math.ceil((1 - MARGIN_QUANTILE) * len(data)) + unfitted


def test_the_worst_case_counts_before_there_is_a_formula_and_gives_way_slowly() -> None:
    cost = CostModel()
    told = []
    for _ in range(64):
        told.append(cost.predict(100, 1, 100 * MIB))
        cost.observe(Sample(100, 1, truth(100, 1), told[-1]))
    assert told[: SAMPLES_MIN + 1] == [100 * MIB] * (SAMPLES_MIN + 1)
    assert told == sorted(told, reverse=True)
    assert truth(100, 1) <= told[-1] < 2 * truth(100, 1)
    assert cost.predict(100, 1, 100 * MIB, known=False) == 100 * MIB
    assert cost.predict(100, 1, MIB) == MIB  # never above it


def test_a_forward_beyond_all_seen_is_stretched_and_then_the_worst_case() -> None:
    cost = model_of((10, 1), (100, 2), each=32)
    seen = cost.predict(100, 2, WORST)
    assert cost.predict(200, 1, WORST) > seen  # twice the tokens
    assert cost.predict(int(100 * BEYOND_MAX) + 1, 1, WORST) == WORST
    assert cost.predict(1, 5, WORST) == WORST  # rows
    assert cost.predict(150, 4, WORST) == WORST  # each is within, all tokens together are not
    assert cost.predict(0, 0, WORST) == cost.predict(10, 1, WORST)  # no smaller one was seen


def test_one_size_says_nothing_of_the_term_behind_it() -> None:
    """Twice the tokens may be four times the bytes, and the samples cannot tell."""
    cost = CostModel(Sample(100, 1, 100**2) for _ in range(HISTORY_SAMPLES_MAX))
    assert cost.predict(200, 1, 1 << 20) >= 200**2


def test_what_was_exceeded_would_fit_the_next_time_and_calms_down() -> None:
    cost = model_of(*SPREAD, each=8)
    calm = int(believed(cost, 100, 2))
    cost.observe(Sample(100, 2, 3 * calm, calm))
    assert (cost.exceeded, len(cost.samples)) == (1, 8 * len(SPREAD) + 1)
    wide = int(believed(cost, 100, 2))
    assert wide >= 3 * calm
    before = cost.widening
    cost.observe(Sample(100, 2, truth(100, 2)))  # nothing was predicted: no evidence
    assert cost.widening == before
    for _ in range(HISTORY_SAMPLES_MAX):
        cost.observe(Sample(100, 2, truth(100, 2), wide))
    assert cost.widening == pytest.approx(before * WIDENING_KEPT**HISTORY_SAMPLES_MAX)
    assert believed(cost, 100, 2) < 1.2 * calm


def test_a_finding_that_no_room_is_left_for_is_forgotten_by_and_by() -> None:
    cost = model_of(*SPREAD, each=8)
    calm = int(believed(cost, 100, 2))
    cost.observe(Sample(100, 2, 9 * calm, calm))
    asked = 0
    while believed(cost, 100, 2) > 2 * calm:  # so much there is, and it never runs
        cost.refused()
        asked += 1
    assert 50 < asked < 150


def test_what_a_giant_lacked_is_nothing_that_a_small_one_needs() -> None:
    """Or one request that nothing has room for would keep all others out for long."""
    cost = model_of(*SPREAD, each=8)
    calm = int(believed(cost, 10, 1))
    for _ in range(3):
        asked = cost.predict(5000, 10, 400 * MIB)
        cost.observe(Sample(5000, 10, asked + 1, asked, exact=False))
        assert cost.predict(5000, 10, 400 * MIB) >= 1.49 * asked
    assert calm <= believed(cost, 10, 1) <= 4 * calm
    # Nor is a giant stretched by what a small one lacked.
    cost = model_of(*SPREAD, each=8)
    cost.observe(Sample(10, 1, 4 * calm, calm))
    assert believed(cost, 10, 1) >= 4 * calm
    assert cost.predict(5000, 10, 400 * MIB) <= 400 * MIB + 4 * calm


def test_a_worst_case_that_is_too_low_is_passed() -> None:
    cost = CostModel()
    cost.observe(Sample(10, 1, 3 * MIB, 2 * MIB))
    assert cost.predict(10, 1, 2 * MIB) == 3 * MIB
    cost = model_of((10, 1), each=SAMPLES_MIN)
    cost.observe(Sample(10, 1, 9 * MIB, 2 * MIB))
    assert cost.predict(10, 1, 2 * MIB) >= 9 * MIB


def test_a_forward_that_was_cut_short_is_evidence_and_no_measurement() -> None:
    cost = model_of(*SPREAD, each=4)
    fit, count = cost.formula, len(cost.samples)
    given_ = int(believed(cost, 100, 2))
    cost.observe(Sample(100, 2, given_ + 1, given_, exact=False))
    assert (cost.formula, len(cost.samples), cost.exceeded) == (fit, count, 1)
    assert believed(cost, 100, 2) >= 1.5 * given_
    before = cost.widening
    cost.observe(Sample(100, 2, 5, given_, exact=False))
    assert cost.widening == before  # what was seen of it says nothing


def test_the_window_is_bounded_and_the_same_samples_give_the_same_model() -> None:
    samples = []
    cost = CostModel()
    for at in range(2 * HISTORY_SAMPLES_MAX):
        tokens = 1 + at * 37 % 500
        took = truth(tokens, 1) + at % 7 * MIB
        samples.append(Sample(tokens, 1, took, cost.predict(tokens, 1, 50 * MIB)))
        cost.observe(samples[-1])
    assert cost.samples == tuple(samples[-HISTORY_SAMPLES_MAX:])
    again = CostModel(samples)
    assert (again.formula, again.widening, again.exceeded) == (
        cost.formula,
        cost.widening,
        cost.exceeded,
    )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(SIZES, st.floats(0, 0.3)), min_size=30, max_size=120),
    st.lists(SIZES, min_size=1, max_size=5),
)
def test_within_what_was_seen_it_is_never_below_a_noisy_truth_by_more_than_the_noise(
    data: list[tuple[tuple[int, int], float]], asked: list[tuple[int, int]]
) -> None:
    cost = CostModel(Sample(*size, int(truth(*size) * (1 + noise))) for size, noise in data)
    most = max(data, key=lambda one: one[0][0] * one[0][1])[0]
    for tokens, rows in asked:
        if tokens <= most[0] and rows <= most[1]:
            assert believed(cost, tokens, rows) >= 0.7 * truth(tokens, rows)


def test_a_formula_says_its_terms() -> None:
    assert Formula(1, 10, 100, 1000, 10000, 7).expected(2, 3) == 1 + 20 + 300 + 6000 + 120000
