"""What a check says: one ``Finding`` each, with the commands that mend it; and the facts it reads.

Pure values and their text; a ``Fact`` has the three states of every reading.
"""

import re
import textwrap
from dataclasses import dataclass
from typing import Final, Literal

from umad.host.files import Unreadable, inside, read_text

_NUMBER: Final = re.compile(r"-?[0-9]{1,19}")
Severity = Literal["hard", "advice", "ok"]


@dataclass(frozen=True, slots=True)
class Fact:
    """The text of a small file; None and no problem: there is no such file; else why not."""

    place: str
    text: str | None = None
    problem: str = ""

    @property
    def number(self) -> int | None:
        """The whole number it is, with its sign, within 64 bits; None when it is none."""
        text = (self.text or "").strip()
        return int(text) if _NUMBER.fullmatch(text) else None

    @property
    def shown(self) -> str:
        """For people: the text, or why there is none."""
        if self.text is not None:
            return self.text[:60] or "empty"
        return "unreadable" if self.problem else "not there"


def read_fact(root: str, place: str) -> Fact:
    """Read one file below ``root``; never raises."""
    try:
        return Fact(f"/{place}", read_text(inside(root, place)))
    except Unreadable as error:
        return Fact(f"/{place}", None, "" if error.absent else str(error))


@dataclass(frozen=True, slots=True)
class Keep:
    """What makes a mend last: a line for a file, below the header ``section`` where it has one."""

    path: str
    line: str
    section: str = ""

    @property
    def command(self) -> str:
        """A shell command that adds it."""
        if not self.section:
            command = f"echo '{self.line}' >> {self.path}"
            return command if len(command) <= 65 else command.replace(" >> ", " \\\n  >> ")
        folder = self.path.rpartition("/")[0]
        return (
            f"mkdir -p {folder}\n"
            f"printf '%s\\n' '[{self.section}]' '{self.line}' \\\n  >> {self.path}"
        )


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's outcome.

    Attributes:
        name: stable; what ``--permissive`` and scripts call it.
        severity: "hard" keeps a strict daemon from starting, "ok" is as it should be.
        found: what is.
        should: what should be.
        why: what goes wrong otherwise.
        fix_now: a shell command that mends it, where one can; run after ``keep`` where that is
            what it brings into force.
        keep: what mends it for good, where a line in a file does.
        permissible: ``--permissive`` lets umad start in spite of it.
    """

    name: str
    severity: Severity
    found: str
    should: str = ""
    why: str = ""
    fix_now: str = ""
    keep: Keep | None = None
    permissible: bool = True

    @property
    def summary(self) -> str:
        """One line: what is and what should be."""
        return f"{self.name}: {self.found}" + (f"; should be {self.should}" if self.should else "")


def remedy(finding: Finding, indent: str = "    ") -> list[str]:
    """The lines below a finding that is not ok: why, and the commands.

    Prose is broken at 80 columns, commands are not: they are to be copied.
    """
    lines = textwrap.wrap(finding.why, 78, initial_indent=indent, subsequent_indent=indent)
    # For good before now: what is read at a boot only must be written before that boot.
    for label, command in (
        ("for good", finding.keep.command if finding.keep else ""),
        ("now", finding.fix_now),
    ):
        for number, line in enumerate(command.splitlines()):
            lines.append(f"{indent}{label if number == 0 else '':9} {line}")
    return lines


def describe(finding: Finding) -> str:
    """The whole finding as plain text."""
    first = f"[{finding.severity}] {finding.summary}"
    wrapped = textwrap.wrap(first, 80, subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join([*wrapped, *remedy(finding)])
