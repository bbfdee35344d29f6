"""Which jobs go together, and when: bounds, turns, windows; on a manual clock."""

import math
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from umad.core.batching import (
    APART_MAX,
    AREA_MIN,
    OVERHEAD_TOKENS,
    PADDED_MAX,
    QUIET_WINDOWS,
    STRETCH,
    WORTH,
    Batch,
    Batcher,
    Bounds,
    Item,
    Pace,
    Why,
)

WINDOW_S = 0.0125
SHORT_S = 0.005
"""A window that is over before a forward's own part, of which the first guess is 6.4 ms."""
LONG_S = 1e9
PLENTY = 1 << 40


def item(name: str, tokens: int = 10, arrived_s: float = 0.0, rows: int = 1, **more) -> Item:
    return Item(name, tokens, rows, arrived_s, more.get("deadline_s", LONG_S))


def choose(batcher: Batcher, *waiting: Item, now_s: float = 0.0, bytes_max: int = PLENTY):
    return batcher.choose(
        waiting, now_s, bytes_max=bytes_max, price=lambda tokens, rows: 100 * tokens * rows
    )


def names(choice: Batch | float | None) -> str:
    assert isinstance(choice, Batch)
    return "".join(one.id for one in choice.items)


def crowded(batcher: Batcher, count: int, now_s: float = 0.0) -> None:
    """Let it see that many wait together, and end their forward."""
    assert choose(batcher, *(item(str(one)) for one in range(count)), now_s=now_s) is not None
    batcher.done(now_s, 10 * count, None)


def test_nobody_waits_and_a_lone_one_begins_at_once():
    batcher = Batcher(WINDOW_S)
    assert choose(batcher) is None
    choice = choose(batcher, item("a"))
    assert choice == Batch((item("a"),), Why.ALL)
    assert (choice.tokens, choice.rows) == (10, 1)


def test_one_whose_deadline_has_passed_is_not_begun():
    batcher = Batcher(WINDOW_S)
    late = item("late", deadline_s=5.0)
    assert choose(batcher, late, now_s=5.0) is None
    assert names(choose(batcher, late, item("b", arrived_s=4.9), now_s=5.0)) == "b"


def test_all_that_wait_go_together_at_once_when_nobody_else_is_about():
    choice = choose(Batcher(WINDOW_S), item("a"), item("b", 12), item("c", 11))
    assert names(choice) == "acb"  # whose turn it is: the shorter of two that came together
    assert choice.why is Why.ALL


def test_it_waits_for_those_that_were_there_and_no_longer_than_the_window():
    batcher = Batcher(SHORT_S)
    crowded(batcher, 10)
    assert choose(batcher, item("a", arrived_s=0.01), now_s=0.01) == 0.01 + SHORT_S
    assert choose(batcher, item("a", arrived_s=0.01), now_s=0.012) == 0.01 + SHORT_S
    choice = choose(batcher, item("a", arrived_s=0.01), now_s=0.01 + SHORT_S)
    assert (names(choice), choice.why) == ("a", Why.WINDOW)


def test_after_a_wait_in_vain_the_next_ones_begin_without_and_then_more_of_them():
    batcher = Batcher(SHORT_S)
    crowded(batcher, 500)
    begun, now_s = [], 0.0
    for _ in range(2 + 1 + 3 + 2 * APART_MAX):
        now_s += 0.001
        one = item("a", arrived_s=now_s)
        choice = choose(batcher, one, now_s=now_s)
        if isinstance(choice, float):
            now_s = choice
            choice = choose(batcher, one, now_s=now_s)
        begun.append(choice.why)
        batcher.done(now_s, 10, None)
    tries = [at for at, why in enumerate(begun) if why is Why.WINDOW]
    assert tries == [0, 2, 6, 14, 30, 30 + 1 + APART_MAX]
    assert {why for why in begun if why is not Why.WINDOW} == {Why.APART}


def test_a_wait_pays_where_all_come_before_the_worker_has_rested_for_long():
    for rested_s, paid in ((0.9, True), (1.1, False)):
        batcher = Batcher(1.0)
        crowded(batcher, 2)
        rest_s = rested_s * batcher.pace.overhead_s
        a = item("a", arrived_s=rest_s / 2)
        assert isinstance(choose(batcher, a, now_s=a.arrived_s), float)
        choice = choose(batcher, a, item("b", arrived_s=rest_s), now_s=rest_s)
        assert (names(choice), choice.why) == ("ab", Why.ALL)
        batcher.done(1.0, 20, None)
        waits = choose(batcher, item("c", arrived_s=1.0), now_s=1.0)
        assert isinstance(waits, float) is paid
        if not paid:
            assert (names(waits), waits.why) == ("c", Why.APART)


def test_those_that_come_apart_take_turns_by_halves_that_are_worth_it():
    worth = int(WORTH * Pace().overhead_tokens)
    for tokens, halves in ((worth, True), (worth // 4, False)):
        batcher = Batcher(SHORT_S)
        crowded(batcher, 9)
        choose(batcher, item("x"), now_s=0.0)
        assert choose(batcher, item("x"), now_s=SHORT_S).why is Why.WINDOW  # in vain
        batcher.done(SHORT_S, 10, None)
        three = [item(name, tokens, SHORT_S) for name in "abc"]  # and x is answered
        choice = choose(batcher, *three, now_s=SHORT_S)
        assert (names(choice), choice.why) == ("ab" if halves else "abc", Why.APART)


def test_the_wait_begins_when_the_worker_is_free():
    """Half of a crowd waits while the other half is done: in the end all go together."""
    batcher = Batcher(SHORT_S)
    crowded(batcher, 10)
    batcher.done(0.05, 10, None)
    assert choose(batcher, item("a", arrived_s=0.02), now_s=0.05) == 0.05 + SHORT_S
    assert names(choose(batcher, item("a", arrived_s=0.02), now_s=0.05 + SHORT_S)) == "a"


def test_it_waits_no_longer_than_what_the_missing_save_which_is_one_forward():
    batcher = Batcher(1.0)
    crowded(batcher, 3)
    for missing in (1, 2):
        there = [item(str(one)) for one in range(3 - missing)]
        assert choose(batcher, *there) == pytest.approx(batcher.pace.overhead_s)


def test_where_nothing_is_padded_each_costs_what_it_is_and_long_ones_still_go_apart():
    many = [*(item(f"{one:x}") for one in range(12)), item("L", 30)]
    assert len(choose(Batcher(WINDOW_S), *many).items) == 12
    assert len(choose(Batcher(WINDOW_S, Bounds(padded=False)), *many).items) == 13
    few = [item("a"), item("b", 20)]
    for padded, together in ((True, "a"), (False, "ab")):
        batcher = Batcher(WINDOW_S, Bounds(padded=padded))
        for area in (10, 100, 1000):
            batcher.done(0.0, area, area * 1e-3)  # a forward's own part is next to nothing
        assert names(choose(batcher, *few)) == together
    unpadded = Batcher(WINDOW_S, Bounds(area_max=100, padded=False))
    assert names(choose(unpadded, item("a", 40), item("b", 30), item("c", 30))) == "bca"
    assert (
        names(choose(Batcher(WINDOW_S, Bounds(padded=False)), *many[:4], item("L", 100))) == "0123"
    )


@pytest.mark.parametrize(("padded", "together"), [(True, "cba"), (False, "cbaL")])
def test_bytes_are_those_of_what_a_forward_holds(padded, together):
    """Padded to the longest, or in the mean of those that are not."""
    ready = [*(item(name) for name in "cba"), item("L", 14)]
    batcher = Batcher(WINDOW_S, Bounds(padded=padded))
    batch = choose(batcher, *ready, bytes_max=5000)
    assert "".join(one.id for one in batch.items) == together


def test_after_some_rest_nobody_is_expected():
    batcher = Batcher(WINDOW_S)
    crowded(batcher, 10)
    soon_s, later_s = QUIET_WINDOWS * WINDOW_S, 1.01 * QUIET_WINDOWS * WINDOW_S
    assert isinstance(choose(batcher, item("a", arrived_s=soon_s), now_s=soon_s), float)
    assert names(choose(batcher, item("a", arrived_s=later_s), now_s=later_s)) == "a"


@pytest.mark.parametrize(
    ("waiting", "bytes_max", "together", "why"),
    [
        ([item(name, rows=30) for name in "abc"], PLENTY, "ab", Why.ROWS),
        ([item("a", rows=64)], PLENTY, "a", Why.ROWS),
        ([item(name, 400) for name in "abcd"], PLENTY, "ab", Why.AREA),
        ([item("a", 9000)], PLENTY, "a", Why.AREA),
        ([item(name) for name in "abcde"], 3500, "abc", Why.BYTES),
        ([item("a", 100), item("b", 100, 1)], 3500, "a", Why.BYTES),
    ],
)
def test_a_full_batch_begins_at_once_and_who_is_too_large_runs_alone(
    waiting, bytes_max, together, why
):
    batcher = Batcher(WINDOW_S)
    crowded(batcher, 20)
    choice = choose(batcher, *waiting, bytes_max=bytes_max)
    assert (names(choice), choice.why) == (together, why)


def test_c32_rows_are_counted_and_not_requests():
    """Ten requests of 15 rows under a cap of 24 are ten forwards."""
    batcher = Batcher(WINDOW_S, Bounds(rows_max=24))
    waiting = [item(name, rows=15) for name in "abcdefghij"]
    begun, now_s = [], 0.0
    while waiting:
        choice = choose(batcher, *waiting, now_s=now_s)
        if not isinstance(choice, Batch):
            now_s = choice  # the last one waits for company
            continue
        assert choice.rows == 15
        begun.append(names(choice))
        waiting = [one for one in waiting if one not in choice.items]
        batcher.done(now_s, 150, None)
    assert begun == list("abcdefghij")


def test_c32_padding_is_judged_and_those_that_came_meanwhile_go_together():
    batcher = Batcher(WINDOW_S)
    waiting = [*(item(name, 8) for name in "abc"), item("L", 4096)]
    assert names(choose(batcher, *waiting)) == "abc"
    batcher.done(0.3, 24, 0.3)  # six came while it ran
    assert names(choose(batcher, *(item(name, 8, 0.1) for name in "defghi"), now_s=0.3)) == "defghi"


def test_long_ones_do_not_pad_short_ones():
    batcher = Batcher(WINDOW_S)
    waiting = [item("L", 130), *(item(name) for name in "abcd"), item("M", 120)]
    assert names(choose(batcher, *waiting)) == "abcd"
    assert names(choose(batcher, waiting[0], waiting[-1])) == "ML"


def test_equals_keep_their_order_though_one_was_refused():
    # b would pad a too much; c, as long, could join the five, but comes after b.
    b, more = item("b", 31, -0.01), [item(name, 22) for name in "defg"]
    assert names(choose(Batcher(WINDOW_S), item("a"), b, *more, item("c", 31))) == "adefg"
    assert names(choose(Batcher(WINDOW_S), item("a"), *more, item("c", 31))) == "adefgc"


def test_only_those_that_are_alike_go_together():
    batcher = Batcher(WINDOW_S)
    waiting = [replace(item(name), alike=name in "ac") for name in "abcd"]
    assert names(choose(batcher, *waiting)) == "ac"
    assert names(choose(batcher, *waiting[1::2])) == "bd"


def test_many_passes_are_so_much_work():
    batcher = Batcher(WINDOW_S)
    pace = batcher.pace
    slow, quick = replace(item("S"), alike=50, passes=50), replace(item("q"), alike=2, passes=2)
    ahead_s = STRETCH * 48 * pace.seconds(10)
    for arrived_s, first in ((0.9 * ahead_s, "q"), (1.1 * ahead_s, "S")):
        late = replace(quick, arrived_s=arrived_s)
        assert names(choose(batcher, slow, late, now_s=arrived_s)) == first
    # And company saves as many forwards: the window is worth waiting for.
    batcher = Batcher(1.0)
    crowded(batcher, 2)
    one = replace(item("a"), passes=100)
    assert choose(batcher, one) == pytest.approx(min(1.0, 100 * pace.overhead_s))


def test_a_kind_that_gains_by_what_was_measured_alone_has_no_least():
    batcher = Batcher(WINDOW_S, Bounds(rows_max=4, area_min=0))
    images = [item(str(one), 64) for one in range(6)]
    assert len(choose(batcher, *images).items) == 4
    for rows in (1, 4, 1, 2):
        batcher.done(0.0, 64 * rows, 64 * rows * 1e-3)
    assert len(choose(batcher, *images).items) == 2
    assert len(choose(batcher, *(replace(one, tokens=256) for one in images)).items) == 1


def test_a_short_one_passes_a_long_one_and_no_long_one_waits_for_ever():
    batcher = Batcher(WINDOW_S)
    pace = batcher.pace
    long = item("L", 400)
    ahead_s = STRETCH * (pace.seconds(400) - pace.seconds(10))
    short, later = item("s", arrived_s=0.9 * ahead_s), item("t", arrived_s=1.1 * ahead_s)
    assert names(choose(batcher, long, short, now_s=later.arrived_s)) == "s"
    assert names(choose(batcher, long, later, now_s=later.arrived_s)) == "L"


def test_the_overhead_is_measured_and_bounds_follow():
    batcher = Batcher(WINDOW_S)
    for area in range(1, 41):
        batcher.done(0.0, 8 * area, 0.002 + 8 * area * 1e-5)
    assert batcher.pace.overhead_tokens == pytest.approx(200, rel=0.01)
    assert batcher.pace.overhead_s == pytest.approx(0.002, rel=0.01)
    assert batcher.pace.seconds(1000) == pytest.approx(0.012, rel=0.01)
    assert batcher.area_max == pytest.approx(3200, rel=0.01)


def test_where_all_is_computing_batches_stay_small():
    batcher = Batcher(WINDOW_S)
    for area in (10, 100, 1000, 50, 500):
        batcher.done(0.0, area, area * 1e-3)
    assert batcher.pace.overhead_tokens == OVERHEAD_TOKENS[0]
    assert batcher.area_max == AREA_MIN
    long = [item(str(one), 256) for one in range(4)]
    assert len(choose(batcher, *long).items) == 2
    # And padding may cost less: the ninth token more is one too many.
    a, b, c = item("a", 20, 1.0), item("b", 28, 1.0), item("c", 29, 1.0)
    assert names(choose(batcher, a, b, now_s=1.0)) == "ab"
    assert names(choose(batcher, a, c, now_s=1.0)) == "a"


def test_a_pace_that_cannot_be_told_keeps_its_guess():
    pace = Pace()
    for _ in range(20):
        pace.observe(100, 0.05)
    assert pace.overhead_tokens == OVERHEAD_TOKENS[1]
    assert pace.seconds(100) == pytest.approx(0.05)
    pace.observe(1000, 0.05)  # ten times the work in no more time
    pace.observe(2000, 0.04)
    assert pace.overhead_tokens == OVERHEAD_TOKENS[2]


def test_a_forward_that_was_disturbed_counts_no_more_than_one():
    pace = Pace()
    for area in (100, 200, 300, 400):
        pace.observe(area, area * 1e-4)
    before = pace.seconds(100)
    pace.observe(100, 60.0)
    assert pace.seconds(100) < 4 * before


class Queue(RuleBasedStateMachine):
    """One worker, many askers, a manual clock: what a queue around the batcher would see."""

    @initialize(rows_max=st.integers(1, 8), area_max=st.integers(20, 600))
    def begin(self, rows_max: int, area_max: int) -> None:
        self.rows_max, self.area_max = rows_max, area_max
        self.bytes_max = 30_000
        self.batcher = Batcher(WINDOW_S, Bounds(rows_max, area_max=area_max))
        self.now_s = 100.0
        self.waiting: dict[str, Item] = {}
        self.left: list[str] = []
        self.made = 0
        self.idle_since: dict[str, float] = {}
        self.asked_again_s = math.inf

    @rule(
        arrivals=st.lists(
            st.tuples(
                st.sampled_from([1, 8, 9, 12, 40, 130, 700]),
                st.sampled_from([1, 1, 1, 2, 10]),
                st.sampled_from([0.001, 0.05, 60.0]),
                st.sampled_from([1, 1, 1, 3]),
            ),
            min_size=1,
            max_size=6,
        )
    )
    def arrive(self, arrivals: list[tuple[int, int, float, int]]) -> None:
        for tokens, rows, patience_s, passes in arrivals:
            name = str(self.made)
            self.made += 1
            times = (self.now_s, self.now_s + patience_s)
            self.waiting[name] = Item(name, tokens, rows, *times, ("passes", passes), passes)
            self.idle_since[name] = self.now_s
        self.work()

    @rule(data=st.data())
    def hang_up(self, data: st.DataObject) -> None:
        if self.waiting:
            name = data.draw(st.sampled_from(sorted(self.waiting)))
            del self.waiting[name]
            self.left.append(name)
            self.work()

    @rule(seconds=st.sampled_from([0.0005, 0.004, 0.02, 1.0]))
    def pass_time(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.asked_again_s <= end_s:
            self.now_s, self.asked_again_s = max(self.now_s, self.asked_again_s), math.inf
            self.work()
        self.now_s = max(self.now_s, end_s)  # a forward may have gone on beyond it

    def work(self) -> None:
        """What the worker does when it is idle: all that may begin now, one after the other."""
        self.asked_again_s = math.inf
        while True:
            choice = choose(
                self.batcher, *self.waiting.values(), now_s=self.now_s, bytes_max=self.bytes_max
            )
            if not isinstance(choice, Batch):
                if choice is not None:
                    self.asked_again_s = choice
                return
            self.judge(choice)
            for one in choice.items:
                del self.waiting[one.id]
                self.left.append(one.id)
            seconds = self.batcher.pace.seconds(choice.tokens * choice.rows)
            self.now_s += seconds * choice.items[0].passes
            self.idle_since = dict.fromkeys(self.waiting, self.now_s)
            self.batcher.done(self.now_s, choice.tokens * choice.rows, seconds)

    def judge(self, batch: Batch) -> None:
        assert all(self.now_s < one.deadline_s for one in batch.items)
        assert len({one.id for one in batch.items}) == len(batch.items)
        assert len({one.alike for one in batch.items}) == 1
        area = batch.tokens * batch.rows
        if len(batch.items) > 1:
            assert batch.rows <= self.rows_max
            assert area <= self.area_max
            assert 100 * area <= self.bytes_max
            real = sum(one.area for one in batch.items)
            assert area <= PADDED_MAX * real
            spared = (len(batch.items) - 1) * self.batcher.pace.overhead_tokens
            assert area - real <= spared + 1e-6
        # Nobody is passed by one whose turn comes later, and equals never pass each other.
        pace = self.batcher.pace
        chosen = {one.id for one in batch.items}
        first = batch.items[0]
        for name, other in self.waiting.items():
            if name in chosen or self.now_s >= other.deadline_s:
                continue
            turn_s, first_s = (
                one.arrived_s + STRETCH * one.passes * pace.seconds(one.area)
                for one in (other, first)
            )
            assert turn_s >= first_s - 1e-9
            for one in batch.items:
                if replace(one, id="", arrived_s=0, deadline_s=0) == replace(
                    other, id="", arrived_s=0, deadline_s=0
                ):
                    assert int(one.id) < int(name)

    @invariant()
    def each_left_once_or_waits(self) -> None:
        assert len(set(self.left)) == len(self.left)
        assert len(self.left) + len(self.waiting) == self.made

    @invariant()
    def nobody_waits_for_company_beyond_the_window(self) -> None:
        for name, one in self.waiting.items():
            if self.now_s < one.deadline_s:
                assert self.now_s <= self.idle_since[name] + WINDOW_S + 1e-9


Queue.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_a_queue = Queue.TestCase
