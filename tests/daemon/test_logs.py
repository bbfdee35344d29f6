"""What people read in a terminal: `umad up`."""

from umad.daemon import logs

MEAN = "x\x1b[2J\x1b]0;owned\x07\n03:00:00 umad   all is well"
FIELDS = {"timestamp": "03:11:00", "level": "warning"}


def test_a_programs_name_is_no_command_to_a_terminal_and_no_line_of_its_own() -> None:
    told = logs._in_words(None, "", {**FIELDS, "event": "stopped", "worker": "a", "comm": MEAN})
    shown = "comm=x?[2J?]0;owned??03:00:00 umad   all is well"
    assert told == f"03:11:00 umad ! stopped a  {shown}"


def test_a_traceback_keeps_its_lines() -> None:
    where = f"Traceback:\n  File\n{MEAN[:2]}"
    told = logs._in_words(None, "", {**FIELDS, "event": "failed", "why": "w", "where": where})
    assert told.splitlines() == ["03:11:00 umad ! failed   why=w", "Traceback:", "  File", "x?"]
