"""What the daemon keeps of forwards and stops, and how it tells of them."""

import pytest

from tests.core.drive import Drive
from tests.core.fakes import engine
from umad.core.actions import Event, Remember, Reply, Reshape
from umad.core.cost import Sample
from umad.core.history import STOPS_ANSWERED_MAX, History
from umad.core.requests import EXCESS_TOLD_EVERY_S
from umad.errors import AccessDenied
from umad.units import MIB
from umad.values import HISTORY_MODELS_MAX, HISTORY_SAMPLES_MAX, ModelHistory
from umad.wire.frames import Limits, encode

DONE = {"predicted": 10, "peak": 8, "tokens": 100, "batch": 2, "seconds": 0.1}


@pytest.fixture
def drive() -> Drive:
    made = Drive(engine())
    made.connect(7)
    return made


def worker(drive: Drive, model: str = "llama", connection: int = 7) -> int:
    answer = drive.call(connection, "register", model=model, quota=10 * MIB)
    return int(answer["worker"])


def test_a_measured_forward_is_kept_and_answered(drive: Drive) -> None:
    key = worker(drive)
    drive.tell(7, "forward_done", worker=key, **DONE, exact=True)
    assert drive.last == [Remember("llama", Sample(100, 2, 8, 10))]
    drive.tell(7, "forward_done", worker=key, **DONE)  # seen in part: it shows nothing
    assert drive.last == []
    answer = drive.call(7, "cost", model="llama")
    assert answer["samples"] == [[100, 2, 8, 10, True]]
    assert (answer["shape"], answer["stops"], answer["models"]) == ("", [], ["llama"])
    assert drive.call(7, "cost", model="other")["samples"] == []


def test_a_prediction_exceeded_is_counted_and_told_once_a_second(drive: Drive) -> None:
    key = worker(drive)
    over = DONE | {"peak": 11}

    def told() -> list[Event]:
        drive.tell(7, "forward_done", worker=key, **over)
        assert Remember("llama", Sample(100, 2, 11, 10, exact=False)) in drive.last
        return [action for action in drive.last if isinstance(action, Event)]

    (event,) = told()
    assert (event.name, event.level) == ("prediction_exceeded", "warning")
    assert (event.fields["predicted_bytes"], event.fields["took_bytes"]) == (10, 11)
    assert told() == []
    drive.now_s += EXCESS_TOLD_EVERY_S
    assert len(told()) == 1
    assert drive.engine.state.counters["prediction_exceeded"] == 3
    # Nothing was predicted: nothing is exceeded.
    drive.tell(7, "forward_done", worker=key, **(over | {"predicted": 0}))
    assert drive.last == []


def test_another_shape_begins_anew_and_only_its_worker_says_so(drive: Drive) -> None:
    key = worker(drive)
    drive.tell(7, "forward_done", worker=key, **DONE, exact=True)
    drive.call(7, "cost", model="llama", shape="bf16")
    assert Reshape("llama", "bf16") in drive.last
    drive.tell(7, "forward_done", worker=key, **DONE, exact=True)
    assert len(drive.call(7, "cost", model="llama", shape="bf16")["samples"]) == 1
    assert drive.call(7, "cost", model="llama", shape="f32")["samples"] == []
    drive.connect(8)
    assert isinstance(drive.refused(8, "cost", model="llama", shape="f16"), AccessDenied)
    assert drive.call(8, "cost", model="llama")["shape"] == "f32"


def test_windows_are_bounded_and_the_one_unused_longest_goes() -> None:
    history = History({"old": ModelHistory("a", ((1, 1, 1, 0, True),))})
    assert history.answer("old")["samples"] == [[1, 1, 1, 0, True]]
    for at in range(HISTORY_MODELS_MAX):
        for _ in range(HISTORY_SAMPLES_MAX + 1):
            history.observe(f"{'m' * 60}{at}", Sample(*[(1 << 63) - 1] * 4))
    answer = history.answer(f"{'m' * 60}0")
    assert len(answer["models"]) == HISTORY_MODELS_MAX
    assert "old" not in answer["models"]
    for at in range(STOPS_ANSWERED_MAX + 1):
        names = ",".join(f"{'m' * 60}{one}/1" for one in range(64))
        history.stopped({"worker": names, "reason": "r" * 200, "fence": "sigkill"}, at)
    answer = history.answer(f"{'m' * 60}0")
    assert [stop["unix_s"] for stop in answer["stops"]] == list(range(1, STOPS_ANSWERED_MAX + 1))
    assert history.answer("m")["stops"] == []
    assert len(encode([1, 1, None, answer])) < Limits().message_bytes


def test_a_stop_is_kept_with_its_reason(drive: Drive) -> None:
    key = worker(drive)
    lease = drive.call(7, "reserve", worker=key)
    drive.call(7, "commit", lease=lease["lease"], token=lease["token"], measured=MIB)
    drive.look({7: 500 * MIB})
    drive.now_s += 1
    drive.look({7: 500 * MIB})
    drive.engine.exited(drive.engine.state.clients[7].peer.identity, drive.now_s)
    (stop,) = drive.call(7, "cost", model="llama")["stops"]
    assert stop["measured_bytes"] == 500 * MIB
    assert isinstance(drive.last[-1], Reply)
