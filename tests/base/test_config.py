from pathlib import Path
from typing import Any

import pytest

from umad import config
from umad.config import Settings
from umad.errors import ConfigError
from umad.units import GIB

ROOT = Path(__file__).parents[2]

MODEL = '[[model]]\nname = "llama"\nkind = "chat"\npath = "/m"\nquota = "4GiB"\n'


def problems(text: str, **more: Any) -> list[tuple[int, str]]:
    with pytest.raises(ConfigError) as caught:
        config.parse(text, **more)
    found = caught.value.details["problems"]
    assert all(problem["why"] and problem["remedy"] for problem in found)
    assert all(f"line {problem['line']}" in caught.value.message for problem in found)
    return [(problem["line"], problem["key"]) for problem in found]


def test_nothing_is_required() -> None:
    assert config.parse("") == Settings()


def test_text_with_units() -> None:
    settings = config.parse(
        '[memory]\nreserve = "8GiB"\ninterval = "100ms"\n[serve]\nlisten = "[::1]:80"\n' + MODEL
    )
    assert settings.memory.reserve == 8 * GIB
    assert settings.memory.interval == 0.1
    assert settings.serve.listen == ("::1", 80)
    for listen, expected in (("off", None), ("unix:/run/m", "/run/m"), ("[::]:9464", ("::", 9464))):
        shown = config.parse(f'[metrics]\nlisten = "{listen}"\n')
        assert shown.metrics.listen == expected
    assert settings.models[0].quota == settings.models[0].peak_bytes == 4 * GIB


@pytest.mark.parametrize(
    "line",
    [
        "[memory]\nreserve = 4",
        '[memory]\nreserve = "4"',
        '[memory]\nreserve = "4gib"',
        '[memory]\nreserve = "0GiB"',
        "[memory]\nreserve = nan",
        '[memory]\ninterval = "1ms"',
        '[memory]\ninterval = "200"',
        "[memory]\ninterval = 0.2",
        '[memory]\nroot = "relative"',
        "[enforcement]\ngrace = true",
        '[enforcement]\ngrace = "11s"',
        "[daemon]\nconnections_max = 0",
        "[daemon]\nconnections_max = true",
        '[daemon]\ngroup = ""',
        '[serve]\nlisten = "8600"',
        '[metrics]\nlisten = "9464"',
        '[metrics]\nlisten = "unix:here"',
        "[metrics]\nlisten = false",
        '[serve]\nlisten = "here:http"',
        "[serve]\nqueue_max = 1.5",
        "[serve]\nqueue = 3",
    ],
)
def test_a_wrong_value_is_named_with_its_line(line: str) -> None:
    [(number, key)] = problems("# first\n" + line)
    assert number == 3
    assert key.split(".")[1] == line.split("\n")[1].split(" ")[0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"llama"', '"no spaces"'),
        ('"llama"', '"runtime"'),
        ('"chat"', '"chess"'),
        ('"/m"', '"m"'),
        ('"4GiB"', '"-4GiB"'),
        ('"4GiB"', '"4GiB"\npin = "yes"'),
        ('"4GiB"', '"4GiB"\npriority = 9999'),
        ('name = "llama"\n', ""),
    ],
)
def test_a_wrong_model(old: str, new: str) -> None:
    assert len(problems(MODEL.replace(old, new))) == 1


def test_all_problems_are_listed_at_once_in_order() -> None:
    text = (
        "[memory]\n"  # 1
        "budget = 12\n"  # 2
        'reserv = "2GiB"\n'  # 3
        "[sevre]\n"  # 4
        'listen = ":80"\n'  # 5
        "[[model]]\n"  # 6
        'name = "a"\nkind = "chat"\npath = "/nope"\nquota = "900GiB"\n'  # 7-10
        "[[model]]\n"  # 11
        'name = "a"\nkind = "chat"\npath = "/m"\nquota = "1GiB"\npeak = "512MiB"\n'  # 12-16
    )
    assert problems(text, path_exists=lambda path: path == "/m", physical_bytes=64 * GIB) == [
        (2, "memory.budget"),
        (3, "memory.reserv"),
        (4, "sevre"),
        (9, "model.path"),
        (10, "model.quota"),
        (12, "model.name"),
        (16, "model.peak"),
    ]


def test_sizes_are_held_against_the_machine() -> None:
    text = '[memory]\nreserve = "8GiB"\n'
    assert problems(text, physical_bytes=8 * GIB) == [(2, "memory.reserve")]
    assert problems('[memory]\nbudget = "9GiB"\n', physical_bytes=8 * GIB) == [(2, "memory.budget")]
    assert problems('[memory]\nbudget = "5GiB"\n' + MODEL) == [(7, "model.quota")]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[memory\n", 1),
        ("a = 1\na = 2\n", 2),
        ('[memory]\nreserve = "4GiB\n', 2),
        ("memory = 3\n", 1),
        ("model = 3\n", 1),
        ("[model]\nname = 3\n", 1),
    ],
)
def test_broken_toml_and_wrong_shapes(text: str, line: int) -> None:
    assert problems(text)[0][0] == line


def test_a_long_value_is_shortened() -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse(f'[memory]\nreserve = "{"9" * 500}"\n')
    assert len(caught.value.details["problems"][0]["value"]) == 60


def test_the_shipped_file_shows_every_setting_at_its_default() -> None:
    text = (ROOT / "etc/umad.toml").read_text()
    assert config.parse(text) == Settings()
    shown = [line.lstrip("# ") for line in text.splitlines()]
    for table, key, default, doc in config.defaults():
        assert f"{key} = {default}" in shown, f"{table}.{key}"
        assert doc.split(";")[0].split(",")[0][:40] in text, f"{table}.{key}"
    # Uncommented it must say the same: nothing in it is out of date.
    lines = text.splitlines()
    live = [
        line[1:] if line.startswith("#") and "=" in line and line[1] != " " else line
        for line in lines
    ]
    before_models = "\n".join(live).split("#[[model]]")[0]
    assert config.parse(before_models) == Settings()


WORKER = '[[worker]]\nname = "llama-cpp"\nunit = "llama-cpp.service"\nquota = "4GiB"\n'


def test_units_that_are_put_under_quota() -> None:
    [worker] = config.parse(WORKER).workers
    assert (worker.unit, worker.peak_bytes, worker.settle) == ("llama-cpp.service", 4 * GIB, 60.0)
    [worker] = config.parse(WORKER + 'peak = "5GiB"\nsettle = "5min"\n').workers
    assert (worker.peak_bytes, worker.settle) == (5 * GIB, 300.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (WORKER.replace("llama-cpp.service", "llama cpp"), (3, "worker.unit")),
        (WORKER.replace("llama-cpp.service", "umad-serve.service"), (3, "worker.unit")),
        (WORKER.replace("llama-cpp.service", "session-3.scope"), (3, "worker.unit")),
        (WORKER.replace('"llama-cpp"', '"runtime"'), (2, "worker.name")),
        (WORKER + WORKER.replace('"llama-cpp"', '"other"'), (7, "worker.unit")),
        (WORKER + WORKER.replace("llama-cpp.service", "o.service"), (6, "worker.name")),
        (WORKER + 'peak = "3GiB"\n', (5, "worker.peak")),
        (WORKER.replace("4GiB", "9GiB"), (4, "worker.quota")),
        (WORKER.replace("[[worker]]", "[worker]"), (1, "worker")),
    ],
)
def test_a_wrong_unit_is_named_with_its_line(text: str, expected: tuple[int, str]) -> None:
    assert problems(text, physical_bytes=8 * GIB) == [expected]
