import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.guard import guarded
from umad.errors import ConfigError
from umad.guard import account, preload

STATE = (
    "from umad.guard.account import guard_state\n"
    "s = guard_state(); print(s.active, s.attached, s.why)"
)


def state_of(env: dict[str, str], *before: str) -> str:
    command = [*before, sys.executable, "-c", STATE]
    done = subprocess.run(
        command, cwd=guarded.ROOT, env=env, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_library_is_ours_and_first_and_the_users_stays() -> None:
    added, why = preload.launch_environment({"LD_PRELOAD": "/usr/lib/libfoo.so libbar.so"})
    assert why == ""
    assert added["LD_PRELOAD"].split(":") == [
        str(preload.library_path()),
        "/usr/lib/libfoo.so",
        "libbar.so",
    ]
    assert added["MALLOC_TRIM_THRESHOLD_"] == "131072"
    again, _ = preload.launch_environment(added)
    assert again == added
    own, _ = preload.launch_environment({"MALLOC_TRIM_THRESHOLD_": "5"})
    assert own["MALLOC_TRIM_THRESHOLD_"] == "5"


@pytest.mark.parametrize("other", ["/usr/lib/libjemalloc.so.2", "libtcmalloc_minimal.so.4"])
def test_not_beside_another_allocator(other: str) -> None:
    added, why = preload.launch_environment({"LD_PRELOAD": other})
    assert added == {}
    assert Path(other).name.split(".")[0].removeprefix("lib") in why


def test_not_under_strict_overcommit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = tmp_path / "overcommit_memory"
    monkeypatch.setattr(preload, "OVERCOMMIT", setting)
    assert "cannot be read" in preload.obstacle("")
    setting.write_text("2\n")
    assert "overcommit_memory is 2" in preload.launch_environment({})[1]
    setting.write_text("1\n")
    assert preload.obstacle("") == ""


def test_not_on_another_libc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    assert preload.launch_environment({}) == ({}, "the guard needs Linux and glibc")


def test_not_when_it_was_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preload, "LIBRARY", tmp_path / "libumadguard.so")
    assert preload.library_path() is None
    assert "not built" in preload.launch_environment({})[1]
    with pytest.raises(ConfigError, match="no C compiler 'no-such-cc'"):
        preload.build("no-such-cc")
    with pytest.raises(ConfigError, match="cannot be built"):
        preload.build("false")
    assert preload.library_path() is None


def test_a_path_with_blanks_cannot_be_preloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "a b.so"
    there.touch()
    monkeypatch.setattr(preload, "LIBRARY", there)
    assert "blanks" in preload.launch_environment({})[1]


def test_it_is_built_once(library: Path) -> None:
    before = library.stat().st_mtime_ns
    assert preload.build("no-such-cc") == library
    assert library.stat().st_mtime_ns == before


def test_here_it_is_off_and_everything_is_a_no_op() -> None:
    state = account.guard_state()
    assert (state.active, state.attached) == (False, False)
    assert "not preloaded" in state.why
    with account.account(3):
        assert account.current() == account.SHARED
    assert list(account.within(3, [1, 2])) == [1, 2]
    assert account.bind(3, max)(1, 2) == 2
    account.trim(3)
    assert account.account_range(3) is None
    with pytest.raises(ConfigError, match="not preloaded"):
        account.attach(0)


@pytest.mark.slow
def test_the_state_of_a_child_says_why() -> None:
    env = guarded.environment()
    assert state_of(env) == "True False"
    for flag in ("-v", "-d"):
        limited = state_of(env, "bash", "-c", f'ulimit {flag} 4000000; exec "$@"', "-")
        assert limited.startswith(f"False False ulimit {flag} is set")


@pytest.mark.slow
def test_attaching_under_a_limit_is_an_error_and_no_crash() -> None:
    code = (
        "import resource\n"
        "from umad.errors import ConfigError\n"
        "from umad.guard.account import account, attach, current, guard_state\n"
        "from umad.guard.page import AccountPage\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        "page = AccountPage.create(1)\n"
        "try:\n"
        "    attach(page.fd)\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
        "page.open(0, 1 << 20)\n"
        "with account(0):\n"
        "    assert current() == -1 and len(bytes(50 << 20))\n"
        "print(guard_state().active)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=guarded.ROOT,
        env=guarded.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "could not be reserved" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["cc", "no-such-cc"])
def test_the_wheel_carries_the_library_where_there_is_a_compiler(
    tmp_path: Path, compiler: str
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    parts = ["umad", "packaging", "pyproject.toml", "README.md", "LICENSE"]
    subprocess.run(["cp", "-r", *parts, str(tree)], cwd=guarded.ROOT, check=True)
    (tree / "umad/guard/libumadguard.so").unlink(missing_ok=True)
    (tree / ".gitignore").write_text("*.so\n")
    settings = tree / "pyproject.toml"
    if "hooks.custom" not in settings.read_text():
        hook = '\n[tool.hatch.build.hooks.custom]\npath = "packaging/build_guard.py"\n'
        settings.write_text(settings.read_text() + hook)
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=tree,
        env={**os.environ, "CC": compiler},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    inside = zipfile.ZipFile(wheel).namelist()
    built = compiler == "cc"
    assert inside.count("umad/guard/libumadguard.so") == int(built)
    assert wheel.name.endswith("-py3-none-any.whl") is not built
    assert ("without the guard" in done.stdout + done.stderr) is not built
