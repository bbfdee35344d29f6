"""The documents for people are true: their commands exist, their files parse, their code runs."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.daemon.running import ROOT, running
from tests.packaging.commands import problem_of
from umad import config
from umad.units import GIB

FOLDER = ROOT / "packaging/doc"
OURS = sorted(
    [*FOLDER.glob("install-*.md"), *(FOLDER / f"{name}.md" for name in
    ("worker-guide", "faq", "containers"))]
)  # fmt: skip
EVERY = sorted(FOLDER.glob("*.md"))


def blocks(document: Path, language: str) -> list[str]:
    fenced = re.compile(rf"^```{language}\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return fenced.findall(document.read_text())


def lines_of(shell: str) -> list[str]:
    """Its commands, each in one line."""
    joined = shell.replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("document", EVERY, ids=lambda path: path.name)
def test_its_commands_exist(document: Path) -> None:
    text = document.read_text()
    commands = [line for block in blocks(document, "sh") for line in lines_of(block)]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    commands += re.findall(r"`((?:umadctl|umad-serve|umad (?=-|up\b)) ?[^`\n]+)`", prose)
    assert [problem for line in commands if (problem := problem_of(line))] == []


@pytest.mark.parametrize("document", EVERY, ids=lambda path: path.name)
def test_its_links_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    assert not re.search(r"https?://(?!127\.0\.0\.1)", text), "names a host"
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (FOLDER / target).exists(), target


@pytest.mark.parametrize("document", OURS, ids=lambda path: path.name)
def test_its_files_are_good(document: Path) -> None:
    for text in blocks(document, "toml"):
        settings = config.parse(
            text, source=document.name, path_exists=lambda _: True, physical_bytes=128 * GIB
        )
        assert tomllib.loads(text).keys() <= {"daemon", "memory", "serve", "model"}
        assert settings.models
    for text in blocks(document, "yaml"):
        assert yaml.safe_load(text)


def test_strix_halos_five_have_the_missions_quotas_and_fit() -> None:
    (text,) = blocks(FOLDER / "install-strix-halo.md", "toml")
    settings = config.parse(text, source="", path_exists=lambda _: True, physical_bytes=128 * GIB)
    assert [model.quota // GIB for model in settings.models] == [16, 24, 8, 8, 4]
    assert 104 * GIB == 27262976 * 4096


def test_the_faq_has_ten() -> None:
    headings = re.findall(r"^## (\d+)\. ", (FOLDER / "faq.md").read_text(), re.MULTILINE)
    assert headings == [str(number) for number in range(1, 11)]


@pytest.mark.slow
def test_the_worker_guide_runs_as_it_stands(tmp_path: Path) -> None:
    code = "\n".join(blocks(FOLDER / "worker-guide.md", "python"))
    # A slow machine needs longer than 50 ms to give back.
    with running(tmp_path, '[enforcement]\ngrace = "10s"') as daemon:
        with subprocess.Popen(
            [sys.executable, "-W", "error", "-c", code],
            cwd=ROOT,
            env={**os.environ, "UMAD_SOCKET": str(daemon.socket)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as guide:
            with daemon.client() as operator:  # what the text says to run beside it
                daemon.wait_for("loaded", worker="guest")
                operator.call("evict", {"name": "guest"})
                daemon.wait_for("loaded", worker="greedy")
                operator.call("set_quota", {"name": "greedy", "quota": 8 << 20})
            printed, complaints = guide.communicate(timeout=60)
        assert guide.returncode == 0, complaints
        daemon.wait_for("complied", worker="greedy")
        assert "hello, too" in printed
        assert "larger than its quota" in printed
        assert "may use 16777216 more" in printed
        assert "stopped: {'quota': 8388608" in printed
        assert "loaded without a daemon: True" in printed
        assert not [line for line in daemon.log if line["event"] in ("stopped", "leaked")]
