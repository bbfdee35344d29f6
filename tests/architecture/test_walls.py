"""Who may load what, seen from a fresh interpreter."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "diffusers", "numpy")
LINES_MAX = 600


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.split()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    ["umad.daemon.main", "umad.client", "umad.cli.main", "umad.serve.main", "umad.serve.app"],
)
def test_no_torch_in_a_program_that_does_not_compute(module: str) -> None:
    assert not loaded_by(f"import {module}") & set(HEAVY)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["umad.daemon.main", "umad.cli.main", "umad.serve.main"])
def test_help_is_quick_and_says_something(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", program, "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--config" in done.stdout or "check-config" in done.stdout
    assert not [line for line in done.stderr.splitlines() if line.endswith(" torch")]


def test_files_stay_short() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in (ROOT / "umad").rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > LINES_MAX
    }
    assert not long


def test_only_the_given_folders_stand_at_the_top() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    tops = {name.split("/")[0] for name in listed if "/" in name}
    assert tops <= {"umad", "systemd", "etc", "tests", "packaging", ".ci"}
