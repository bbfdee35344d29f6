"""Whether a command in a text for people is one that this version has."""

import contextlib
import io
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Final

from umad.cli import main as cli
from umad.daemon import main as daemon
from umad.serve import main as serve

_PROGRAMS: Final = {"umad": daemon.main, "umadctl": cli.cli, "umad-serve": serve.main}
_OPERATORS: Final = frozenset("|&;")


def problem_of(line: str) -> str | None:
    """What is wrong with umad's own programs in a line of shell; None when nothing is."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= _OPERATORS:
            commands.append([])
        else:
            commands[-1].append(word)
    for words in map(_bare, commands):
        program = Path(words[0]).name if words else ""
        if program in _PROGRAMS and (problem := _judge(program, words[1:])):
            return f"{line.strip()}: {problem}"
    return None


def _bare(words: list[str]) -> list[str]:
    """A command without whose name, what environment and which container it runs in."""
    while words:
        if words[0] == "sudo":
            words = words[3 if words[1:2] == ["-u"] else 1 :]
        elif re.match("[A-Z_]+=", words[0]):
            words = words[1:]
        elif words[:2] == ["docker", "compose"] and "exec" in words:
            words = words[words.index("exec") + 2 :]  # and the service's name
        else:
            break
    return words


def _judge(program: str, words: list[str]) -> str | None:
    words = words[: words.index("--")] if "--" in words else words
    sub: list[str] = []
    if program == "umadctl":
        while words and words[0].startswith("-"):
            if not _knows(program, (), words[0]):
                return f"umadctl has no {words[0]}"
            words = words[2 if words[0] == "--socket" else 1 :]
        sub, words = words[:1], words[1:]
    if not _help(program, tuple(sub)):
        return f"there is no {program} {sub[0]}"
    unknown = [word for word in words if word.startswith("-") and not _knows(program, sub, word)]
    if program == "umad" and words[:1] not in ([], ["up"]) and not words[0].startswith("-"):
        unknown.append(words[0])
    return f"{' '.join((program, *sub))} has no {', '.join(unknown)}" if unknown else None


def _knows(program: str, sub: list[str] | tuple[str, ...], word: str) -> bool:
    option = re.escape(word.partition("=")[0])
    return re.search(rf"(?<![\w-]){option}(?![\w-])", _help(program, tuple(sub))) is not None


@cache
def _help(program: str, sub: tuple[str, ...]) -> str:
    """What ``--help`` prints; nothing where there is no such command."""
    said = io.StringIO()
    with (
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(SystemExit),
    ):
        _PROGRAMS[program]([*sub, "--help"])
    return said.getvalue()
