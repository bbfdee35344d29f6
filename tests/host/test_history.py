"""The history on the disk: real SQLite files, damaged, older, newer, full, killed in mid-write."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from umad.host import history as module
from umad.host.history import ASIDE, NAME, History
from umad.values import HISTORY_MODELS_MAX, HISTORY_SAMPLES_MAX, HISTORY_STOPS_MAX, ModelHistory

ROOT = Path(__file__).parents[2]
ROW = (100, 2, 5 << 20, 6 << 20, True)
WRITER = """
import sys
from pathlib import Path
from umad.host.history import History
history = History.open(Path(sys.argv[1]))
for at in range(1 << 30):
    history.observe("llama", (at, 1, at, 0, True))
    history.flush()
    print(at, flush=True)
"""


def written(folder: Path, *rows: tuple[int, int, int, int, bool], model: str = "llama") -> None:
    history = History.open(folder)
    for row in rows:
        history.observe(model, row)
    closed(history)


def closed(history: History) -> list[str]:
    """Write it all, in the thread, and close; what the thread told."""
    told: list[str] = []
    history.start(told.append)
    history.close()
    return told


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    history = History.open(tmp_path / "made")
    assert (history.problem, history.models, history.stops) == ("", {}, [])
    history.reshape("llama", "bf16")
    history.observe("llama", ROW)
    history.observe("qwen", ROW)
    history.stopped({"unix_s": 1.5, "worker": "llama"})
    assert closed(history) == []
    again = History.open(tmp_path / "made")
    assert again.models == {"llama": ModelHistory("bf16", (ROW,)), "qwen": ModelHistory("", (ROW,))}
    assert again.stops == [{"unix_s": 1.5, "worker": "llama"}]
    again.reshape("llama", "bf16")  # the same: nothing is forgotten
    again.observe("llama", ROW)
    again.reshape("qwen", "f32")
    closed(again)
    last = History.open(tmp_path / "made")
    assert last.models == {
        "llama": ModelHistory("bf16", (ROW, ROW)),
        "qwen": ModelHistory("f32", ()),
    }
    closed(last)


def test_everything_is_bounded(tmp_path: Path) -> None:
    history = History.open(tmp_path)
    for at in range(HISTORY_SAMPLES_MAX + 5):
        history.observe("llama", (at, 1, 1, 0, True))
        history.stopped({"unix_s": at})
        if at % 100 == 0:
            history.flush()
    history.flush()
    for at in range(2 * HISTORY_MODELS_MAX):
        history.observe(f"other{at}", ROW)
    closed(history)
    again = History.open(tmp_path)
    assert len(again.models) == HISTORY_MODELS_MAX
    assert "other0" not in again.models
    assert f"other{2 * HISTORY_MODELS_MAX - 1}" in again.models
    assert [stop["unix_s"] for stop in again.stops][-1] == HISTORY_SAMPLES_MAX + 4
    assert len(again.stops) == HISTORY_STOPS_MAX
    closed(again)
    with closing(sqlite3.connect(tmp_path / NAME)) as database:
        (samples,) = database.execute("SELECT count(*) FROM sample").fetchone()
    assert samples == HISTORY_MODELS_MAX


def test_shapes_of_models_that_are_gone_are_not_kept(tmp_path: Path) -> None:
    history = History.open(tmp_path)
    for at in range(HISTORY_MODELS_MAX + 1):
        history.reshape("model0", f"bf{at}")  # in use: not among the oldest
        history.reshape(f"model{at}", f"bf{at}")
        history.flush()  # from now on these are no news, by which they would be bounded
    assert len(history._shapes) == HISTORY_MODELS_MAX
    assert "model1" not in history._shapes
    assert history._shapes["model0"] == f"bf{at}"
    closed(history)


def test_the_oldest_samples_go(tmp_path: Path) -> None:
    written(tmp_path, *((at, 1, 1, 0, True) for at in range(HISTORY_SAMPLES_MAX)))
    written(tmp_path, ROW)
    again = History.open(tmp_path)
    rows = again.models["llama"].rows
    assert (len(rows), rows[0][0], rows[-1]) == (HISTORY_SAMPLES_MAX, 1, ROW)
    closed(again)


def test_an_older_file_is_brought_up(tmp_path: Path) -> None:
    """Version 1 knew no shapes."""
    with closing(sqlite3.connect(tmp_path / NAME)) as database:
        database.executescript(module._MIGRATIONS[0] + "PRAGMA user_version = 1;")
        database.execute("INSERT INTO sample VALUES ('llama', 1, 100, 2, 5242880, 6291456, 1)")
        database.execute("INSERT INTO stop (fields) VALUES (?)", (json.dumps({"unix_s": 3}),))
        database.commit()
    history = History.open(tmp_path)
    assert history.problem == ""
    assert history.models == {"llama": ModelHistory("", (ROW,))}
    assert history.stops == [{"unix_s": 3}]
    closed(history)
    assert not (tmp_path / ASIDE).exists()


def newer(database: sqlite3.Connection) -> None:
    database.execute("PRAGMA user_version = 99")


def half_made(database: sqlite3.Connection) -> None:
    database.execute("DROP TABLE stop")


def no_json(database: sqlite3.Connection) -> None:
    database.execute("INSERT INTO stop (fields) VALUES ('{')")


def no_map(database: sqlite3.Connection) -> None:
    database.execute("INSERT INTO stop (fields) VALUES ('[1]')")


def below_zero(database: sqlite3.Connection) -> None:
    database.execute("PRAGMA ignore_check_constraints = 1")
    database.execute("UPDATE sample SET bytes = -1")


@pytest.mark.parametrize("harm", [newer, half_made, no_json, no_map, below_zero])
def test_a_file_that_is_not_to_be_used_is_set_aside(tmp_path: Path, harm) -> None:
    written(tmp_path, ROW)
    with closing(sqlite3.connect(tmp_path / NAME)) as database:
        harm(database)
        database.commit()
    history = History.open(tmp_path)
    assert "set aside" in history.problem
    assert (history.models, history.stops) == ({}, [])
    assert (tmp_path / ASIDE).is_file()
    closed(history)
    again = History.open(tmp_path)
    assert again.problem == ""
    closed(again)


def test_what_is_set_aside_takes_its_log_along(tmp_path: Path) -> None:
    """Or the new file would meet it, and be what the old one was."""
    for folder in ("old", "copied"):
        (tmp_path / folder).mkdir()
    written(tmp_path / "old", ROW)
    with closing(sqlite3.connect(tmp_path / "old" / NAME, isolation_level=None)) as database:
        database.execute("PRAGMA user_version = 99")  # in the log alone, as after a crash
        for suffix in ("", "-wal"):
            content = (tmp_path / "old" / (NAME + suffix)).read_bytes()
            (tmp_path / "copied" / (NAME + suffix)).write_bytes(content)
    history = History.open(tmp_path / "copied")
    assert "a newer umad made it" in history.problem
    assert "set aside" in history.problem
    closed(history)
    again = History.open(tmp_path / "copied")
    assert again.problem == ""
    closed(again)


@pytest.mark.parametrize("where", [0, 100, 4096 + 8])
def test_a_damaged_file_is_set_aside_with_its_log(tmp_path: Path, where: int) -> None:
    written(tmp_path, ROW)
    with (tmp_path / NAME).open("r+b") as file:
        file.seek(where)
        file.write(os.urandom(3000))
    (tmp_path / f"{NAME}-wal").write_bytes(b"rubbish")
    history = History.open(tmp_path)
    assert "set aside" in history.problem
    history.observe("llama", ROW)
    closed(history)
    again = History.open(tmp_path)
    assert (again.problem, again.models) == ("", {"llama": ModelHistory("", (ROW,))})
    closed(again)


def test_without_a_place_it_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", Path("/proc/nowhere")):
        history = History.open(folder)
        assert "nothing is kept on disk" in history.problem
        history.observe("llama", ROW)
        history.stopped({"unix_s": 1})
        assert closed(history) == []
    (tmp_path / NAME).mkdir()
    assert "cannot" in History.open(tmp_path).problem


def test_what_could_not_be_written_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WRITE_EVERY_S", 0.02)
    monkeypatch.setattr(module, "_BUSY_S", 0.01)
    written(tmp_path, (1, 1, 1, 0, True))
    history = History.open(tmp_path)
    changed = threading.Condition()
    told: list[str] = []

    def tell(why: str) -> None:
        with changed:
            told.append(why)
            changed.notify()

    with closing(sqlite3.connect(tmp_path / NAME, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        history.reshape("qwen", "f32")
        history.observe("llama", (2, 1, 1, 0, True))
        history.stopped({"unix_s": 1})
        history.start(tell)
        with changed:
            assert changed.wait_for(lambda: told, 10)
        assert "locked" in told[0]
        history.observe("llama", (3, 1, 1, 0, True))
        history.reshape("qwen", "bf16")
        history.observe("qwen", ROW)
        history.stopped({"unix_s": 2})
        other.execute("ROLLBACK")
        with changed:
            assert changed.wait_for(lambda: told[1:], 10)
    history.close()
    assert told[1:] == [""]
    again = History.open(tmp_path)
    assert [row[0] for row in again.models["llama"].rows] == [1, 2, 3]
    assert again.models["qwen"] == ModelHistory("bf16", (ROW,))
    assert [stop["unix_s"] for stop in again.stops] == [1, 2]
    closed(again)


def test_a_full_disk_loses_nothing_that_fits_later(tmp_path: Path) -> None:
    history = History.open(tmp_path)
    assert history._database is not None
    history._database.execute("PRAGMA max_page_count = 1")  # as SQLite sees a full disk
    history.observe("llama", ROW)
    for at in range(HISTORY_STOPS_MAX):
        history.stopped({"unix_s": at, "reason": "r" * 200})
    history.reshape("qwen", "f32")
    meanwhile = iter(["llama", "qwen", "new"])

    def while_it_is_written(_statement: str) -> None:
        if (model := next(meanwhile, None)) is not None:
            history.reshape("qwen", "bf16")
            history.observe(model, ROW)

    history._database.set_trace_callback(while_it_is_written)
    with pytest.raises(sqlite3.OperationalError, match="full"):
        history.flush()
    history._database.set_trace_callback(None)
    history._database.execute("PRAGMA max_page_count = 10000")
    assert closed(history) == []
    again = History.open(tmp_path)
    assert {name: (kept.shape, len(kept.rows)) for name, kept in again.models.items()} == {
        "llama": ("", 2),
        "qwen": ("bf16", 1),
        "new": ("", 1),
    }
    assert [stop["unix_s"] for stop in again.stops] == list(range(HISTORY_STOPS_MAX))
    closed(again)


@pytest.mark.slow
def test_a_kill_in_mid_write_costs_the_last_moment_and_not_the_file(tmp_path: Path) -> None:
    """The writer says a number when it is written; killed ten times at any moment."""
    for times in range(10):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            said = [int(writer.stdout.readline()) for _ in range(20 + 7 * times)]
            writer.send_signal(signal.SIGKILL)
            said += map(int, writer.stdout.read().splitlines())
        history = History.open(tmp_path)
        assert history.problem == ""
        assert history.models["llama"].rows[-1][0] in (said[-1], said[-1] + 1)
        closed(history)
