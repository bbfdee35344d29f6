"""Which repeats are told, and the fields of a journal entry; by a clock that only we move."""

import math

import pytest

from umad.journal import BURST, WINDOW_S, WINDOWS_MAX, Repeats, Told, entry, named, words


class Log:
    """What a program does with ``Repeats``; its clock is ``now_s``."""

    def __init__(self) -> None:
        self.repeats = Repeats(frozenset({"stopped"}))
        self.now_s = 100.0
        self.lines: list[tuple[str, dict[str, object]]] = []

    def tell(self, event: str, **fields: object) -> None:
        self.end_windows()
        if self.repeats.offer(event, "warning", fields, self.now_s):
            self.lines.append((event, fields))

    def end_windows(self, now_s: float | None = None) -> None:
        for told in self.repeats.due(self.now_s if now_s is None else now_s):
            self.lines.append((told.event, dict(told.fields)))

    def after(self, seconds: float) -> "Log":
        self.now_s += seconds
        return self


@pytest.fixture
def log() -> Log:
    return Log()


def test_the_first_few_are_told_as_they_come(log: Log) -> None:
    for number in range(BURST):
        log.tell("left", worker="llama", number=number)
    assert [fields["number"] for _, fields in log.lines] == list(range(BURST))
    assert not log.repeats.holding


def test_those_beyond_become_one_line_with_their_number_and_the_last_ones_fields(log: Log) -> None:
    for number in range(BURST + 40):
        log.after(0.01).tell("left", worker="llama", number=number)
    assert len(log.lines) == BURST
    assert log.repeats.holding
    log.after(WINDOW_S).end_windows()
    assert log.lines[BURST:] == [
        ("left", {"worker": "llama", "number": BURST + 39, "repeated": 40})
    ]
    assert not log.repeats.holding


def test_a_flood_costs_a_line_for_each_window_and_no_repeat_is_lost(log: Log) -> None:
    for _ in range(1000):
        log.after(0.01).tell("left", worker="llama")
    log.end_windows(math.inf)
    assert len(log.lines) <= BURST + 10 / WINDOW_S + 1
    assert sum(fields.get("repeated", 1) for _, fields in log.lines) == 1000  # type: ignore[misc]


def test_after_a_quiet_window_all_are_told_again(log: Log) -> None:
    for _ in range(BURST + 1):
        log.tell("left", worker="llama")
    log.after(WINDOW_S).end_windows()
    log.after(WINDOW_S).end_windows()
    log.lines.clear()
    log.tell("left", worker="llama")
    assert log.lines == [("left", {"worker": "llama"})]


def test_workers_and_events_do_not_share_a_window(log: Log) -> None:
    for event in ("left", "loaded"):
        for worker in ("llama", "whisper"):
            for _ in range(BURST):
                log.tell(event, worker=worker)
    assert len(log.lines) == 4 * BURST


def test_a_decision_is_told_each_time(log: Log) -> None:
    for _ in range(100):
        log.tell("stopped", worker="llama")
    assert len(log.lines) == 100
    assert not log.repeats.holding


def test_names_without_end_are_all_told_and_cost_no_memory(log: Log) -> None:
    for number in range(1000):
        log.tell("registered", worker=f"w{number}")
    assert len(log.lines) == 1000
    assert len(log.repeats._windows) == WINDOWS_MAX
    log.after(WINDOW_S).end_windows()
    assert not log.repeats._windows


def test_an_entry_names_each_worker_in_a_field_of_its_own() -> None:
    fields = {"worker": "llama,whisper/1", "pid": 7, "limit_bytes": 1 << 30, "after_s": 0.25}
    assert entry("umad", "kill_failed", "error", fields, "ab" * 16) == [
        ("MESSAGE", "kill failed: worker=llama,whisper/1  pid=7  limit=1.0 GiB  after=250.0 ms"),
        ("PRIORITY", 3),
        ("SYSLOG_IDENTIFIER", "umad"),
        ("UMAD_EVENT", "kill_failed"),
        ("UMAD_WORKER", "llama"),
        ("UMAD_WORKER", "whisper/1"),
        ("UMAD_PID", 7),
        ("UMAD_LIMIT_BYTES", 1 << 30),
        ("UMAD_AFTER_S", 0.25),
        ("MESSAGE_ID", "ab" * 16),
    ]


def test_a_mapping_is_one_field_and_no_hundred() -> None:
    pairs = dict(entry("umad", "failed", "critical", {"state": {"pools": [{"name": "x"}]}}, None))
    assert pairs["UMAD_STATE"] == '{"pools": [{"name": "x"}]}'
    assert "MESSAGE_ID" not in pairs


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"worker": "a"}, ["a"]),
        ({"workers": "a,b"}, ["a", "b"]),
        ({"model": "a/0", "worker": "a"}, ["a"]),
        ({"model": "a/1"}, ["a/1"]),
        ({"models": ["a", "b"]}, ["a", "b"]),
        ({"worker": "", "pid": 1}, []),
    ],
)
def test_who_an_event_is_about(fields: dict[str, object], names: list[str]) -> None:
    assert named(fields) == names


def test_words_carry_units() -> None:
    assert words({"free_bytes": 3 << 20, "wait_s": 2.0, "n": 1}) == "free=3.0 MiB  wait=2.0 s  n=1"
    assert words({}) == ""
    assert entry("umad", "memory_known", "info", {}, None)[0] == ("MESSAGE", "memory known")


def test_what_is_told_is_a_value() -> None:
    assert Told("a", "info", {}) == Told("a", "info", {})
