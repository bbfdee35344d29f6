"""What models' forwards took and who was stopped, on the disk: one small SQLite database.

Owns the file, its schema and the thread that writes it.  Rules: nothing here ends the daemon or
holds its loop up; what came in is written in one transaction every ``WRITE_EVERY_S``, so that a
crash costs the last few seconds and never the file; a file that is damaged or of a newer umad is
set aside, and one that cannot be written is done without.  Every table is bounded.
"""

import json
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from umad.values import HISTORY_MODELS_MAX, HISTORY_SAMPLES_MAX, HISTORY_STOPS_MAX, ModelHistory

NAME: Final = "history.db"
ASIDE: Final = "history.db.aside"
WRITE_EVERY_S: Final = 10.0
_CLOSE_WITHIN_S: Final = 2.0
_BUSY_S: Final = 1.0
_MIGRATIONS: Final = (
    """
    CREATE TABLE sample (
        model TEXT NOT NULL,
        seq INTEGER NOT NULL,
        tokens INTEGER NOT NULL CHECK (tokens >= 0),
        rows INTEGER NOT NULL CHECK (rows >= 0),
        bytes INTEGER NOT NULL CHECK (bytes >= 0),
        predicted INTEGER NOT NULL CHECK (predicted >= 0),
        exact INTEGER NOT NULL CHECK (exact IN (0, 1)),
        PRIMARY KEY (model, seq)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE stop (seq INTEGER PRIMARY KEY, fields TEXT NOT NULL) STRICT;
    """,
    """
    CREATE TABLE model (
        name TEXT PRIMARY KEY, shape TEXT NOT NULL, used_unix_s REAL NOT NULL
    ) STRICT, WITHOUT ROWID;
    INSERT INTO model SELECT DISTINCT model, '', 0 FROM sample;
    """,
)
"""From each version of the schema to the next; ``user_version`` counts those that were done."""

Row = tuple[int, int, int, int, bool]


@dataclass(slots=True)
class _News:
    """What is not written yet of one model; with a new shape, what is written is to go."""

    shape: str | None = None
    rows: deque[Row] = field(default_factory=lambda: deque(maxlen=HISTORY_SAMPLES_MAX))


class History:
    """The file, and what was in it when it was opened; made by ``open``.

    ``models`` and ``stops`` are what was kept, oldest first.  ``problem`` says what went wrong on
    opening, "" for nothing.  All methods but ``flush`` may be called from the loop: they do not
    wait for the disk.
    """

    def __init__(
        self,
        database: sqlite3.Connection | None,
        problem: str,
        models: Mapping[str, ModelHistory] | None = None,
        stops: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.problem = problem
        self.models = dict(models or {})
        self.stops = stops
        self._database = database
        self._lock = threading.Lock()
        self._news: dict[str, _News] = {}
        self._new_stops: deque[str] = deque(maxlen=HISTORY_STOPS_MAX)
        self._shapes = {name: kept.shape for name, kept in self.models.items()}
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open or make the file in ``folder``, and read it; never raises for what is wrong."""
        path = folder / NAME
        aside = ""
        for _ in range(2):
            try:
                folder.mkdir(0o750, parents=True, exist_ok=True)
                database, models, stops = _opened(path)
            except (OSError, sqlite3.Error, ValueError, TypeError) as error:
                if not _is_damage(error):
                    return cls(None, f"{path} cannot be used, nothing is kept on disk: {error}")
                aside = f"{path} is not usable ({error}); it was set aside as {ASIDE}"
                with suppress(OSError):  # the second try says what is wrong
                    _set_aside(path)
            else:
                return cls(database, aside, models, stops)
        return cls(None, f"{path} cannot be replaced, nothing is kept on disk")

    def start(self, told: Callable[[str], object]) -> None:
        """Have a thread write from now on.

        Args:
            told: called in that thread with what went wrong, and with "" when it goes again.
        """
        if self._database is not None:
            self._thread = threading.Thread(target=self._run, args=(told,), name="history")
            self._thread.daemon = True  # a disk that hangs must not keep the daemon from ending
            self._thread.start()

    def observe(self, model: str, row: Row) -> None:
        """A forward of the model has ended."""
        with self._lock:
            self._of(model).rows.append(row)

    def reshape(self, model: str, shape: str) -> None:
        """The model is of this shape; what is kept of another is forgotten."""
        with self._lock:
            if self._shapes.get(model) != shape:
                self._shapes.pop(model, None)
                self._shapes[model] = shape
                if len(self._shapes) > HISTORY_MODELS_MAX:
                    del self._shapes[next(iter(self._shapes))]
                self._news.pop(model, None)
                self._of(model).shape = shape

    def stopped(self, stop: Mapping[str, Any]) -> None:
        """Somebody was stopped."""
        with self._lock:
            self._new_stops.append(json.dumps(dict(stop)))

    def close(self) -> None:
        """Write what is left and close the file, if the disk answers."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_WITHIN_S)

    def flush(self) -> None:
        """Write what has come in since; what could not be written is kept for the next time.

        Raises:
            sqlite3.Error: it could not be written.
        """
        assert self._database is not None, "without a file no thread writes"
        with self._lock:
            news, self._news = self._news, {}
            stops = list(self._new_stops)
            self._new_stops.clear()
        try:
            with _transaction(self._database) as database:
                for model, one in news.items():
                    _write(database, model, one)
                database.executemany(
                    "INSERT INTO stop (fields) VALUES (?)", ((stop,) for stop in stops)
                )
                _trim(database)
        except sqlite3.Error:
            with self._lock:
                self._keep(news)
                self._new_stops.extendleft(reversed(stops))
            raise

    def _run(self, told: Callable[[str], object]) -> None:
        assert self._database is not None
        problem = ""
        with closing(self._database):
            while True:
                ending = self._ending.wait(WRITE_EVERY_S)
                was, problem = problem, self._try_flush()
                if problem != was:
                    told(problem)
                if ending:
                    return

    def _try_flush(self) -> str:
        try:
            if self._news or self._new_stops:
                self.flush()
        except sqlite3.Error as error:
            return f"what models took is not written: {error}"
        return ""

    def _of(self, model: str) -> _News:
        """Under the lock: a model's news."""
        news = self._news.get(model)
        if news is None:
            news = self._news[model] = _News()
            if len(self._news) > HISTORY_MODELS_MAX:
                self._shapes.pop(oldest := next(iter(self._news)), None)
                del self._news[oldest]
        return news

    def _keep(self, old: dict[str, _News]) -> None:
        """Under the lock: put back what could not be written, before what came meanwhile."""
        for model, new in self._news.items():
            before = old.get(model)
            if before is None or new.shape is not None:
                old[model] = new
            else:
                before.rows.extend(new.rows)
        self._news = old


def _opened(
    path: Path,
) -> tuple[sqlite3.Connection, dict[str, ModelHistory], list[dict[str, Any]]]:
    """The database, brought to this version, and what is in it."""
    database = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        _prepare(database)
        models = {}
        for name, shape in database.execute("SELECT name, shape FROM model ORDER BY used_unix_s"):
            rows = database.execute(
                "SELECT tokens, rows, bytes, predicted, exact FROM sample"
                " WHERE model = ? ORDER BY seq",
                (name,),
            )
            kept = tuple((*row[:4], bool(row[4])) for row in rows)
            models[name] = ModelHistory(shape, kept)
        stops = [
            dict(json.loads(text))
            for (text,) in database.execute("SELECT fields FROM stop ORDER BY seq")
        ]
    except BaseException:
        database.close()
        raise
    return database, models, stops


def _prepare(database: sqlite3.Connection) -> None:
    for setting in (
        "journal_mode = WAL",
        "synchronous = NORMAL",
        "wal_autocheckpoint = 100",
        "journal_size_limit = 1048576",
        "cache_size = -256",
    ):
        database.execute(f"PRAGMA {setting}")
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version > len(_MIGRATIONS):
        raise ValueError(f"a newer umad made it, its schema is {version}, not {len(_MIGRATIONS)}")
    for done, script in enumerate(_MIGRATIONS[version:], version + 1):
        with _transaction(database):
            for statement in filter(str.strip, script.split(";")):
                database.execute(statement)
            database.execute(f"PRAGMA user_version = {done}")
    (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise ValueError(found)


def _is_damage(error: Exception) -> bool:
    """Whether the file's content is to blame, and not the disk or its rights."""
    # An error without a more special code is a table that is missing, or not as it should be.
    damage = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", 0) & 0xFF in damage
    return not isinstance(error, OSError)


def _set_aside(path: Path) -> None:
    """Out of the way with what belongs to it: a new file must not meet an old log."""
    for suffix in ("", "-wal", "-shm"):
        old = path.with_name(NAME + suffix)
        if old.exists():
            old.replace(path.with_name(ASIDE + suffix))


def _write(database: sqlite3.Connection, model: str, news: _News) -> None:
    if news.shape is not None:
        database.execute("DELETE FROM sample WHERE model = ?", (model,))
    database.execute(
        "INSERT INTO model VALUES (?1, coalesce(?2, ''), ?3) ON CONFLICT (name)"
        " DO UPDATE SET shape = coalesce(?2, shape), used_unix_s = ?3",
        (model, news.shape, time.time()),
    )
    (last,) = database.execute(
        "SELECT coalesce(max(seq), 0) FROM sample WHERE model = ?", (model,)
    ).fetchone()
    rows = ((model, seq, *row) for seq, row in enumerate(news.rows, last + 1))
    database.executemany("INSERT INTO sample VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
    database.execute(
        "DELETE FROM sample WHERE model = ? AND seq <= ?",
        (model, last + len(news.rows) - HISTORY_SAMPLES_MAX),
    )


def _trim(database: sqlite3.Connection) -> None:
    database.execute(
        "DELETE FROM model WHERE name NOT IN"
        " (SELECT name FROM model ORDER BY used_unix_s DESC LIMIT ?)",
        (HISTORY_MODELS_MAX,),
    )
    database.execute("DELETE FROM sample WHERE model NOT IN (SELECT name FROM model)")
    database.execute(
        "DELETE FROM stop WHERE seq <= (SELECT max(seq) FROM stop) - ?", (HISTORY_STOPS_MAX,)
    )


@contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield database
        database.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):  # SQLite may have done so itself
            database.execute("ROLLBACK")
        raise
