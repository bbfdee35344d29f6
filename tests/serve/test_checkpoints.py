"""The builder of the small checkpoints: once, whole or not at all, the same each time."""

import hashlib
from pathlib import Path

import pytest

from tests.demo import checkpoints as builder
from tests.demo.fixtures import checkpoints

MIB = 1 << 20


def write(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two builders that only write a file; what was built."""
    monkeypatch.setattr(builder, "BUILDERS", {"one": write, "two": write})
    return []


@pytest.mark.slow
@pytest.mark.models
def test_each_is_built_once_and_again_for_another_version(
    builds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = builder.build_all(tmp_path, builds.append)
    assert places == {"one": tmp_path / "one", "two": tmp_path / "two"}
    builder.build_all(tmp_path, builds.append)
    assert builds == ["one", "two"]
    monkeypatch.setattr(builder, "VERSION", "next")
    builder.build_all(tmp_path, builds.append)
    assert builds == ["one", "two"] * 2


@pytest.mark.slow
@pytest.mark.models
def test_a_build_that_fails_leaves_the_old_one(
    builds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder.build_all(tmp_path, builds.append)

    def fail(folder: Path) -> None:
        write(folder)
        raise OSError("disk full")

    monkeypatch.setattr(builder, "BUILDERS", {"one": fail})
    monkeypatch.setattr(builder, "VERSION", "next")
    with pytest.raises(OSError, match="disk full"):
        builder.build_all(tmp_path, builds.append)
    assert sorted(place.name for place in tmp_path.iterdir()) == [".lock", "one", "two"]
    assert (tmp_path / "one" / "config.json").is_file()


@pytest.mark.slow
@pytest.mark.models
@pytest.mark.parametrize("name", ["llama", "sdxl", "whisper"])
def test_a_build_gives_the_same_bytes_each_time(name: str, tmp_path: Path) -> None:
    builder.BUILDERS[name](tmp_path)

    def digests(folder: Path) -> dict[str, str]:
        return {
            str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in folder.rglob("*")
            if file.is_file() and file.name != builder.MARKER
        }

    assert digests(tmp_path) == digests(checkpoints() / name)


@pytest.mark.slow
@pytest.mark.models
@pytest.mark.parametrize("name", builder.BUILDERS)
def test_a_checkpoint_is_large_enough_to_be_seen(name: str) -> None:
    files = (checkpoints() / name).rglob("*.safetensors")
    assert 8 * MIB < sum(file.stat().st_size for file in files) < 25 * MIB
