"""``umadctl report``: the page as a browser reads it, of a real daemon and of made-up hours."""

import re
import subprocess
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.cli.test_umadctl import run
from tests.daemon.running import ROOT, running
from umad.cli import chart, report
from umad.cli.chart import Lane, Layer, Line, Mark
from umad.cli.report import Told
from umad.cli.timeline import Held, Moment, Room
from umad.client.memory import give_back
from umad.units import GIB, MIB

GREEDY = [sys.executable, "-m", "tests.demo.greedy"]
VOID = {"meta", "br", "hr", "img", "link"}
NOW = 1_800_000_000.0


class Page(HTMLParser):
    """Notes a page's elements, and that each is closed where it belongs."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def has(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]

    def svg(self) -> ElementTree.Element:
        """The first picture; it is XML, too."""
        return ElementTree.fromstring(
            self.text[self.text.index("<svg") :].split("</svg>")[0] + "</svg>"
        )


def check(page: Page) -> None:
    """It is one file that everybody can read."""
    assert {"script", "link", "img", "iframe"}.isdisjoint(name for name, _ in page.tags)
    assert not re.search(r"https?://|url\(|@import|src=", page.text)
    assert page.has("html") == [{"lang": "en"}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.has(
        "meta"
    )
    assert "prefers-color-scheme: dark" in page.text
    assert len(page.has("table")) == len(page.has("caption"))
    assert all(attrs["scope"] in ("col", "row") for attrs in page.has("th"))
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for picture in page.has("svg"):
        if picture.get("role") == "img":
            assert {*str(picture["aria-labelledby"]).split()} <= {*map(str, ids)}
        else:
            assert picture["aria-hidden"] == "true"


@pytest.mark.slow
def test_a_greedy_workers_end_is_in_the_picture_and_in_the_table(tmp_path: Path) -> None:
    with running(tmp_path) as daemon, daemon.client() as client:
        give_back()  # what earlier tests left in this process would go meanwhile
        model = client.worker("quiet", quota="64MiB").load(lambda: bytearray(b"x") * (48 * MIB))
        greedy = subprocess.Popen([*GREEDY, str(daemon.socket), "128MiB", "4GiB"], cwd=ROOT)
        daemon.wait_for("stopped", pid=greedy.pid)
        greedy.wait(10)
        file = tmp_path / "report.html"
        done = run("--socket", daemon.socket, "report", "--since", "10min", "-o", file)
        assert (done.returncode, done.stderr) == (0, "")
        page = Page(file.read_text())
        check(page)
        assert "1 worker stopped" in page.words
        names = [one.text for one in page.svg().iter("title")]
        assert {"quiet", "greedy"} <= {*names}
        assert any("greedy was stopped (sigkill)" in str(name) for name in names)
        assert any(word.startswith("greedy was stopped (sigkill)") for word in page.words)
        printed = run("--socket", daemon.socket, "report", "-o", "-")
        assert printed.stdout.startswith("<!doctype html>")
        assert run("--socket", daemon.socket, "report", "-o", tmp_path / "no/x").returncode == 2
        del model


def moment(at: int, *sizes: int | None, refused: int = 0) -> Moment:
    workers = {
        f"worker-{key}": Held("system", GIB, size, 700 * MIB) for key, size in enumerate(sizes)
    }
    return Moment(
        NOW - 3600 + at * 10, 1, refused, {"system": Room(3 * GIB, GIB, GIB, 4 * GIB)}, workers
    )


def told(moments: Sequence[Moment], events: Sequence[dict[str, Any]] = ()) -> Told:
    pool = {"name": "system", "parent": None, "capacity": 8 * GIB, "used": GIB, "free": None}
    pool |= {"reserve": GIB, "budget": 4 * GIB, "booked": 0, "binding": "", "problem": "garbage"}
    daemon = {"version": "1", "pid": 1, "uptime_s": 5.0, "warnings": ["<b>swap</b>"]}
    state = {"daemon": daemon, "generation": 3, "pools": [pool], "workers": []}
    return Told(NOW, NOW - 3600, state, moments, events, events_lost=False)


def test_names_and_texts_are_no_markup() -> None:
    evil = '<script>alert("1")</script>'
    hour = told(
        [Moment(NOW - 60, 0, 0, {}, {evil: Held("system", MIB, MIB, MIB)})],
        [{"seq": 1, "name": evil, "unix_s": NOW - 50, "level": evil, "worker": evil, "why": evil}],
    )
    page = Page(report.page(hour))
    check(page)
    assert any(evil in word for word in page.words)


def test_a_daemon_that_has_seen_nothing_makes_a_page() -> None:
    page = Page(report.page(told([])))
    check(page)
    assert any("Nothing has been seen yet" in word for word in page.words)


@pytest.mark.slow
def test_an_hour_of_many_workers_is_one_picture_of_bounded_size() -> None:
    hour = told([moment(at, *range(1000, 30_000_000, 1_000_000)) for at in range(360)])
    page = Page(report.page(hour))
    check(page)
    bands = page.svg().findall("path[@class='layer']")
    assert len(bands) == chart.LAYERS_MAX
    assert "all others (22)" in page.text
    day = told([moment(at - 8280, 1, at % 7, at) for at in range(8640)])
    assert len(report.page(Told(NOW, NOW - 86400, day.state, day.moments, [], True))) < 300_000


def test_the_short_excess_stays_where_a_day_is_thinned() -> None:
    moments = [moment(at - 8280, 3 * GIB if at == 4321 else MIB) for at in range(8640)]
    day = Told(NOW, NOW - 86400, told([]).state, moments, [], False)
    assert max(one.held for one in report._thinned(day)) == 3 * GIB
    assert len(report._thinned(day)) <= report.COLUMNS_MAX + 1
    assert "held 3.0 GiB at most, of a budget of 4.0 GiB" in report.page(day)


def test_what_is_not_known_is_drawn_as_booked_and_said() -> None:
    text = report.page(told([moment(at, None, 5 * MIB) for at in range(4)]))
    assert "worker-0 (partly as booked: what it held is not known)" in text
    assert "worker-1 (partly" not in text
    assert "booked 700.0 MiB" in text, "in the table, too"


def picture(times: list[float], values: list[int], lines: Sequence[Line] = (), **more: Any) -> Any:
    text = chart.draw(
        "p", "t", "d", times, [Layer("a", values)], lines, more.get("lanes", ()), (0.0, 1000.0)
    )
    return ElementTree.fromstring(text)


def places(path: str) -> list[tuple[str, list[float]]]:
    found = re.findall(r"([MHV])([^MHVz]*)", path)
    return [(letter, [float(one) for one in numbers.split()]) for letter, numbers in found]


def test_a_band_stands_on_its_axis_and_a_gap_is_a_gap() -> None:
    drawn = picture([100.0, 110.0, 120.0, 800.0, 810.0], [MIB, 2 * MIB, 2 * MIB, MIB, 0])
    [band] = drawn.findall("path[@class='layer']")
    steps = places(band.attrib["d"])
    starts = [at for letter, at in steps if letter == "M"]
    assert len(starts) == 2, "nothing is drawn while nothing is known"
    base, top = starts[0][1], min(at[0] for letter, at in steps if letter == "V")
    assert base == 316
    heights = {round((base - at[0]) / (base - top), 2) for letter, at in steps if letter == "V"}
    assert heights == {0.0, 0.5, 1.0}
    marks = [Mark(500.0, "half way"), Mark(1000.0, "the end")]
    drawn = picture([1.0], [1], lanes=[Lane("stopped", "stop", marks)])
    crosses = drawn.findall("path[@class='mark alarm']")
    assert [one.attrib["d"].split()[0] for one in crosses] == ["M479.0", "M879.0"]


def test_a_line_is_broken_where_its_figure_is_not_known() -> None:
    times = [10.0, 20.0, 30.0, 40.0]
    drawn = picture(times, [0] * 4, [Line("free", [MIB, MIB, None, MIB], limit=True)])
    [line] = drawn.findall("path[@class='line limit']")
    assert [letter for letter, _ in places(line.attrib["d"])].count("M") == 2
