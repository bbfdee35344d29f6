"""What the daemon did, as a sentence."""

import re
from pathlib import Path

from umad import events
from umad.events import in_words
from umad.units import MIB

CORE = Path(events.__file__).parent / "core"


def test_an_event_speaks_to_no_terminal_and_knows_what_it_lacks():
    stopped = {
        "name": "stopped",
        "worker": "greedy\x1b[2J",
        "fence": "sigkill",
        "measured_bytes": 3 << 30,
        "limit_bytes": None,
        "seen_to_gone_s": 0.0815,
    }
    assert in_words(stopped) == (
        "bad",
        "greedy?[2J was stopped (sigkill): it held 3.0 GiB of ?; gone 81.5 ms after it was seen",
    )
    narrowly = in_words({**stopped, "limit_bytes": (3 << 30) - 3 * MIB})[1]
    assert "it held 3.0 GiB of 3.0 GiB (3.0 MiB too much); " in narrowly
    assert "it held 3.0 GiB of 3.0 GiB; " in in_words({**stopped, "limit_bytes": 3 << 30})[1]
    assert "(its memory was taken back)" in in_words({**stopped, "fence": "return"})[1]
    assert in_words({"name": "left", "worker": "{pid}", "why": ""}) == ("", "{pid} has left: ")
    assert in_words({"name": "loaded", "worker": "a"})[1] == "a has loaded: ? measured, ? booked"
    assert len(in_words({"name": "x", "why": "y" * 1000})[1]) == events.TEXT_MAX


def test_a_refusal_says_for_what_and_how_often():
    refused = {"name": "refused", "worker": "a", "asked_bytes": 1024, "what": "admit"}
    said = "a was refused 1.0 KiB to answer a request: ?"
    assert in_words(refused) == ("warn", said)
    assert in_words({**refused, "times": 7}) == ("warn", f"{said} (7 times)")


def test_a_victim_is_named_with_whom_it_goes_for():
    asked = {"name": "evicting", "worker": "a", "for_worker": "b", "reason": "{name}"}
    assert in_words(asked)[1].startswith("a is asked to go for b: {name}; ")


def test_one_without_a_sentence_is_told_by_its_name_and_fields():
    unknown = {"seq": 4, "unix_s": 1.0, "name": "new_thing", "held_bytes": MIB, "after_s": 0.5}
    assert in_words(unknown) == ("", "new thing: held 1.0 MiB, after 500.0 ms")
    assert in_words({"name": "new_thing", "level": "info"}) == ("", "new thing")
    assert in_words({}) == ("", "?")


def test_every_event_of_the_core_has_its_words():
    source = "".join(file.read_text() for file in CORE.glob("*.py"))
    names = set(re.findall(r'\b_?(?:case_)?[eE]vent\(\s*"([a-z_]+)"', source))
    assert {"stopped", "evicting", "refused", "loaded"} <= names
    told_generically = {name for name in names if name.startswith("fragmentation_step")}
    assert names - told_generically <= events._SENTENCES.keys()
