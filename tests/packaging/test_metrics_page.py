"""The page of the metrics is what the two programs export, both ways."""

import re
from pathlib import Path

import pytest

from tests.packaging.exported import daemon_texts, families, front_alone
from tests.promtool import judge

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "packaging/doc/metrics.md").read_text()
Row = tuple[str, str, tuple[str, ...], str]


def written(program: str) -> list[Row]:
    """The rows of one program's tables: name, type, labels, meaning."""
    part = PAGE.split(f"\n## {program}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) ?\| (.*) \|$", part, re.MULTILINE)
    return [
        (name, kind, tuple(re.findall(r"\w+", labels)), says) for name, kind, labels, says in rows
    ]


def exported(text: str) -> list[Row]:
    found = []
    for family in families(text):
        assert family.samples, f"{family.name}: what happened here gave it no sample"
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        ending = "_total" if family.type == "counter" else ""
        found.append(
            (family.name + ending, family.type, tuple(sorted(labels)), family.documentation)
        )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("program", ["umad", "umad-serve"])
def test_the_page_is_what_the_program_exports(program: str) -> None:
    real = exported(daemon_texts()[1] if program == "umad" else front_alone())
    assert sorted(written(program)) == sorted(real)


def test_it_names_no_metric_that_there_is_not() -> None:
    names = {row[0] for program in ("umad", "umad-serve") for row in written(program)}
    said = set(re.findall(r"\bumad_\w*[a-z]\b", PAGE)) - {"umad_serve_"}
    assert {name for name in said if name not in names} == set()


@pytest.mark.slow
def test_prometheus_takes_its_scrape_configuration(tmp_path: Path) -> None:
    first, daemon, relabel = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    rules = ROOT / "etc/prometheus/umad.rules.yml"
    first = re.sub(r"/usr/share/umad/prometheus/umad.rules.yml", str(rules), first)
    assert str(rules) in first
    file = tmp_path / "prometheus.yml"
    file.write_text(first + relabel + daemon)
    assert judge("check", "config", file) == ""
