"""Writes the manual pages: prose from the templates beside this file, the rest from its one home.

What a program takes comes from its own parser, what the configuration knows from ``etc/umad.toml``,
so a page cannot say anything else.  ``generate.py FOLDER`` writes them there, for ``make deb``.

A template is mdoc(7) with these marks, each on a line of its own but the first two:
@VERSION@, @DATE@, @OPTIONS@ (of an argparse program), @COMMANDS@ (of umadctl), @SETTINGS@.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from umad import __version__
from umad.cli.main import cli
from umad.daemon.main import command_line as daemon_parser
from umad.serve.main import command_line as serve_parser

TEMPLATES: Final = Path(__file__).parent
SETTINGS: Final = Path(__file__).parents[2] / "etc/umad.toml"


def pages() -> dict[str, str]:
    """Every page by the name of its file, like "umad.8"."""
    parsers = {"umad.8": daemon_parser(), "umad-serve.8": serve_parser()}
    # What was built from one state of the sources is the same whenever it is built.
    built_unix_s = int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))
    made = {}
    for template in sorted(TEMPLATES.glob("*.[1-8]")):
        name = template.name
        text = template.read_text()
        marks = {
            "@VERSION@": __version__,
            "@DATE@": time.strftime("%B %-d, %Y", time.gmtime(built_unix_s)),
            "@OPTIONS@": "\n".join(_options(parsers[name])) if name in parsers else "",
            "@COMMANDS@": "\n".join(_commands(cli, "umadctl")),
            "@SETTINGS@": "\n".join(_settings(SETTINGS.read_text())),
        }
        for mark, filling in marks.items():
            text = text.replace(mark, filling)
        made[name] = text
    return made


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The arguments and flags of an argparse program as a list."""
    formatter = argparse.HelpFormatter(parser.prog)
    yield ".Bl -tag -width Ds"
    for action in parser._actions:  # argparse has no public way to list them
        invocation = formatter._format_action_invocation(action)
        yield from _entry(invocation, formatter._expand_help(action) if action.help else "")
    yield ".El"


def _commands(group: click.Group, path: str) -> Iterator[str]:
    """The options of a click program and a section for each of its commands."""
    context = click.Context(group, info_name=path)
    yield from _parameters(group, context)
    for name, command in sorted(group.commands.items()):
        if command.hidden:
            continue
        below = click.Context(command, info_name=name, parent=context)
        usage = " ".join([path, name, *command.collect_usage_pieces(below)])
        yield f".Ss {_words(usage)}"
        if isinstance(command, click.Group):
            yield from _prose(command.help or "")
            yield from _commands(command, f"{path} {name}")
        else:
            yield from _prose(command.help or "")
            yield from _parameters(command, below)


def _parameters(command: click.Command, context: click.Context) -> Iterator[str]:
    records = [param.get_help_record(context) for param in command.get_params(context)]
    # An argument that says nothing of itself is in the line above; --help is in every command.
    told = [record for record in records if record and record[1] and record[0] != "--help"]
    if told:
        yield ".Bl -tag -width Ds"
        for invocation, text in told:
            yield from _entry(invocation, text)
        yield ".El"


def _settings(text: str) -> Iterator[str]:
    """Each table of the configuration as a section, its settings as a list."""
    comment: list[str] = []
    listing = False
    for line in text.splitlines():
        if table := re.fullmatch(r"#?(\[.+\])", line):
            yield from [".El"] if listing else []
            yield f".Ss {_words(table[1])}"
            yield from _prose(" ".join(comment))
            yield ".Bl -tag -width Ds"
            listing, comment = True, []
        elif setting := re.fullmatch(r"#(\w+ = .+)", line):
            yield from _entry(setting[1], " ".join(comment))
            comment = []
        elif line.startswith("# "):
            comment.append(line[2:])
        else:  # an empty line ends the head of the file
            comment = []
    yield ".El"


def _entry(head: str, text: str) -> Iterator[str]:
    yield f".It Sy {_words(head)}"
    if text:
        yield from _prose(text)


def _words(text: str) -> str:
    """Arguments of a macro: the first letters of a word could be one's name, so all are quoted."""
    return '"' + _escaped(text).replace('"', r"\(dq") + '"'


def _prose(text: str) -> Iterator[str]:
    """Running text, each sentence on a line of its own, paragraphs kept."""
    for number, paragraph in enumerate(re.split(r"\n\s*\n", text.replace("\b", "").strip())):
        if number:
            yield ".Pp"
        for sentence in re.split(r"(?<=\.) +(?=[A-Z])", " ".join(paragraph.split())):
            escaped = _escaped(sentence)
            yield rf"\&{escaped}" if escaped[:1] in (".", "'") else escaped


def _escaped(text: str) -> str:
    # A plain hyphen may be printed as a typographic one, which no shell takes for an option's.
    return text.replace("\\", r"\e").replace("-", r"\-")


def main(folder: Path) -> None:
    """Write all pages into a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
