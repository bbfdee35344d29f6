"""The alerts: Prometheus takes them, each fires when it should, and each has its runbook."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from tests.packaging.exported import daemon_texts, families, front_alone
from tests.promtool import judge
from umad.cli.main import cli
from umad.daemon.logs import MESSAGE_IDS

ROOT = Path(__file__).parents[2]
RULES = ROOT / "etc/prometheus/umad.rules.yml"
CASES = ROOT / "etc/prometheus/umad.rules.test.yml"
BOOK = (ROOT / "packaging/doc/runbooks.md").read_text()
PLACE = "file:///usr/share/doc/umad/runbooks.md#"


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}


def commands() -> Iterator[str]:
    """Every command of the book, without its comment."""
    blocks = re.findall(r"```sh\n(.*?)```", BOOK, re.DOTALL)
    inline = re.findall(r"`((?:umadctl|systemctl|journalctl) [^`]+)`", BOOK)
    for line in [*"".join(blocks).splitlines(), *inline]:
        yield from re.split(r"\s*[|;]\s*", line.split("  #")[0].strip())


@pytest.mark.slow
def test_prometheus_takes_the_rules() -> None:
    assert judge("check", "rules", RULES) == ""


@pytest.mark.slow
def test_each_alert_fires_when_it_should_and_says_what_it_should() -> None:
    assert judge("test", "rules", CASES) == ""


def test_each_alert_has_a_case_where_it_fires_and_a_near_miss() -> None:
    fired, missed = set(), set()
    for case in yaml.safe_load(CASES.read_text())["tests"]:
        machines = set(re.findall(r'instance="([^"]+)"', str(case["input_series"])))
        for test in case["alert_rule_test"]:
            alerts = test.get("exp_alerts", [])
            told = {alert["exp_labels"]["instance"] for alert in alerts}
            if told:
                fired.add(test["alertname"])
            if told and machines - told:
                missed.add(test["alertname"])
    assert fired == missed == set(ALERTS)


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_tells_a_person_enough(name: str) -> None:
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    notes = alert["annotations"]
    assert notes.keys() == {"summary", "description", "runbook_url"}
    assert "{{ $labels.instance }}" in notes["summary"]
    assert notes["runbook_url"] == PLACE + name.lower()
    # 5.046586573e+09 is no figure for a person.
    for shown in re.findall(r"\{\{ \$value[^}]*\}\}", notes["description"]):
        counted = alert["expr"].startswith(("changes(", "umad_broken", "umad_serve_requests"))
        assert "|" in shown or counted, shown


def test_each_alert_has_its_section_and_each_section_its_alert() -> None:
    sections = BOOK.split("\n## ")[1:]
    assert [section.splitlines()[0] for section in sections] == list(ALERTS)
    for section in sections:
        for part in ("**It means**", "**Look**", "**Do.**", "**Harmless when**"):
            assert section.count(part) == 1, (section.splitlines()[0], part)
    for anchor in re.findall(r"\]\(#(\w+)\)", BOOK):
        assert anchor in {name.lower() for name in ALERTS}


def test_the_book_names_commands_options_and_events_that_there_are() -> None:
    context = click.Context(cli)
    known = set(cli.list_commands(context))
    said = [shlex.split(one) for one in commands() if one.startswith("umadctl ")]
    assert said
    for _, command, *rest in said:
        assert command in known, command
        options = {name for one in cli.commands[command].params for name in one.opts}
        assert {word for word in rest if word.startswith("--")} <= options, (command, rest)
    assert set(re.findall(r"UMAD_EVENT=(\w+)", BOOK)) <= MESSAGE_IDS.keys() | {
        "failed",
        "prediction_exceeded",
    }


@pytest.mark.slow
def test_the_rules_speak_of_metrics_that_there_are() -> None:
    names = {
        sample.name
        for text in (daemon_texts()[1], front_alone())
        for family in families(text)
        for sample in family.samples
    }
    said = {
        name
        for rule in rules()
        for name in re.findall(r"\bumad_\w+", str(rule))
        if not re.search(rf"by \([^)]*\b{name}", str(rule))
    }
    assert said
    assert said <= names, said - names
