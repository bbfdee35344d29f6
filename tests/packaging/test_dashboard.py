"""The dashboard: Grafana's schema knows all of it, and each panel shows real figures."""

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as schema

from tests.packaging.exported import families, front_texts
from tests.promtool import judge

FILE = Path(__file__).parents[2] / "etc/grafana/umad.json"
BOARD: dict[str, Any] = json.loads(FILE.read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
TARGETS = [
    pytest.param(target["expr"], id=f"{panel['title']}-{target['refId']}")
    for panel in PANELS
    for target in panel["targets"]
]
SAMPLES_EACH = 20  # a minute apart, of each of the two texts


def lost(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """What is in the one and not, or otherwise, in the other."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            yield from lost(value, after.get(key), f"{place}/{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, value in enumerate(before):
            yield from lost(value, after[index], f"{place}/{index}")
    elif before != after:
        yield place


def test_grafanas_schema_knows_every_key_of_it() -> None:
    """One that it does not know is lost on the way through Grafana's own types."""
    plugins.register_default_plugins()
    board = schema.Dashboard.from_json(BOARD)
    assert list(lost(BOARD, json.loads(JSONEncoder().encode(board)))) == []
    odd = {**BOARD, "panels": [{**BOARD["panels"][1], "tragets": []}]}
    through = json.loads(JSONEncoder().encode(schema.Dashboard.from_json(odd)))
    assert list(lost(odd, through)) == ["/panels/0/tragets"]


def test_its_panels_have_their_place() -> None:
    idents = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(idents)) == len(idents)
    places = [panel["gridPos"] for panel in BOARD["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)


def test_every_panel_asks_the_source_that_was_chosen_and_says_what_it_shows() -> None:
    variables = {one["name"]: one for one in BOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    for panel in PANELS:
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"] == chosen
        for target in panel["targets"]:
            assert target["datasource"] == chosen
            used = set(re.findall(r"\$(\w+)", target["expr"]))
            assert used <= {"job", "instance", "__rate_interval"}, used
            assert target["expr"].count('job=~"$job",instance=~"$instance"') >= 1
    for name in ("job", "instance"):
        assert variables[name]["datasource"] == chosen


def recorded() -> str:
    """What Prometheus would have stored of the two programs: first at rest, then at work."""
    texts = [
        {
            f"{sample.name}{json.dumps(sample.labels)}": sample
            for family in families(text)
            for sample in family.samples
        }
        for text in front_texts()
    ]
    lines = []
    for key, sample in texts[1].items():
        labels = {"job": "umad-serve", "instance": "strix:8600", **sample.labels}
        named = ",".join(f"{name}={json.dumps(value)}" for name, value in labels.items())
        before = texts[0].get(key)
        # A counter without a sample has counted nothing yet.
        counts = re.search(r"_(total|bucket|count|sum)$", sample.name)
        first = f"{before.value:g}" if before is not None else "0" if counts else "_"
        values = f"{first}x{SAMPLES_EACH} {sample.value:g}x{SAMPLES_EACH}"
        lines.append(f"      - series: {json.dumps(f'{sample.name}{{{named}}}')}")
        lines.append(f"        values: {json.dumps(values)}")
    return "\n".join(lines)


@pytest.mark.slow
def test_every_panel_shows_something_of_the_programs_own_figures(tmp_path: Path) -> None:
    """One figure at least, and a number; just after the work began, as far as it is a rate."""
    cases = []
    for parameter in TARGETS:
        expr = str(parameter.values[0]).replace("$__rate_interval", "5m")
        expr = re.sub(r"\$(job|instance)", ".+", expr)
        cases.append(
            f"      - expr: {json.dumps(f'count(({expr}) > -Inf) > bool 0')}\n"
            f"        eval_time: {SAMPLES_EACH + 3}m\n"
            "        exp_samples: [{labels: '{}', value: 1}]\n"
        )
    file = tmp_path / "panels.yml"
    file.write_text(
        f"evaluation_interval: 1m\ntests:\n  - interval: 1m\n    input_series:\n{recorded()}\n"
        f"    promql_expr_test:\n{''.join(cases)}"
    )
    assert judge("test", "rules", file) == ""
