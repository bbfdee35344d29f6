"""The manual pages: sound mdoc, and in them all that the programs take and the file knows."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tests.packaging.needs import PROJECT, need
from umad import config
from umad.cli.main import cli
from umad.daemon.main import command_line as daemon_line
from umad.serve.main import command_line as serve_line

PAGES = ("umad-serve.8", "umad.8", "umad.toml.5", "umadctl.1")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with all pages, made as for the package."""
    folder = tmp_path_factory.mktemp("man")
    generate = [sys.executable, PROJECT / "packaging/man/generate.py", folder]
    subprocess.run(generate, env={"PYTHONPATH": str(PROJECT)}, check=True, timeout=60)
    return folder


@pytest.fixture(scope="module")
def read(pages: Path) -> dict[str, str]:
    """The pages as they are read, their lines made one."""
    need("mandoc", "mandoc")
    shown = {}
    for page in PAGES:
        mandoc = ["mandoc", "-T", "utf8", "-O", "width=1000", pages / page]
        text = subprocess.run(mandoc, check=True, capture_output=True, text=True).stdout
        shown[page] = " ".join(re.sub(".\b", "", text).split())
    return shown


@pytest.mark.usefixtures("read")
def test_mandoc_finds_no_fault(pages: Path) -> None:
    assert tuple(sorted(page.name for page in pages.iterdir())) == PAGES
    lint = ["mandoc", "-T", "lint", "-W", "warning", *sorted(pages.iterdir())]
    assert subprocess.run(lint, capture_output=True, text=True, check=False).stdout == ""


@pytest.mark.parametrize(("page", "line"), [("umad.8", daemon_line), ("umad-serve.8", serve_line)])
def test_every_option_is_told(read: dict[str, str], page: str, line: object) -> None:
    assert callable(line)
    options = re.findall(r"--[a-z][a-z-]+", line().format_usage())
    assert len(options) > 1
    assert not [option for option in options if option not in read[page]]


def _commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        yield f"{path} {name}", command
        if isinstance(command, click.Group):
            yield from _commands(command, f"{path} {name}")


def test_every_command_is_told_with_its_options(read: dict[str, str]) -> None:
    told = read["umadctl.1"]
    for path, command in _commands(cli, "umadctl"):
        [(_, section)] = re.findall(
            rf"({path} \[OPTIONS\])(.*?)(?=umadctl \S+ \[OPTIONS\]|$)", told
        )
        named = [name for param in command.params for name in param.opts if name.startswith("-")]
        assert not [name for name in named if name not in section], path


def test_every_setting_is_told_at_its_default(read: dict[str, str]) -> None:
    for table, key, default, _ in config.defaults():
        assert f"{key} = {default}" in read["umad.toml.5"], f"{table}.{key}"


def test_no_mark_of_a_template_is_left(read: dict[str, str]) -> None:
    assert not re.findall(r"@[A-Z]+@", " ".join(read.values()))
