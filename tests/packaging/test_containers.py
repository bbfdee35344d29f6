"""The container files: valid, in agreement with the units, and built of what they copy alone."""

import json
import os
import re
import signal
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.daemon.running import ROOT, Daemon, eventually, running
from tests.demo.run import free_port
from umad import config
from umad.client import UmadError
from umad.units import GIB, parse_bytes

FOLDER = ROOT / "packaging/container"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
FILES = ("compose.yaml", "compose.five.yaml")
CAPABILITIES = {"KILL", "SYS_PTRACE", "DAC_READ_SEARCH"}


def compose(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return loaded


def settings(name: str, service: str) -> config.Settings:
    """What the service reads as /etc/umad/umad.toml."""
    (mounted,) = compose(name)["services"][service]["configs"]
    assert mounted["target"] == "/etc/umad/umad.toml"
    text = compose(name)["configs"][mounted["source"]]["content"]
    return config.parse(text, source=service, path_exists=lambda _: True, physical_bytes=128 * GIB)


def limit(service: dict[str, Any]) -> int:
    assert service["memswap_limit"] == service["mem_limit"], "no swap behind the fence"
    return parse_bytes(re.sub("([mg])$", lambda unit: f"{unit[1].upper()}iB", service["mem_limit"]))


@pytest.mark.slow
def test_they_are_valid_by_the_compose_specification() -> None:
    command = [sys.executable, "-m", "check_jsonschema"]
    command += ["--builtin-schema", "vendor.compose-spec", *(str(FOLDER / name) for name in FILES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", FILES)
def test_what_they_name_is_there(name: str) -> None:
    stages = re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE)
    whole = compose(name)
    for service in whole["services"].values():
        built = service["build"]
        assert built["target"] in stages
        assert (FOLDER / built["context"] / built["dockerfile"]).resolve() == FOLDER / "Dockerfile"
        assert {one["source"] for one in service["configs"]} <= whole["configs"].keys()
        named = {volume.split(":")[0] for volume in service["volumes"] if volume[0].isalpha()}
        assert named <= whole["volumes"].keys()
        assert "run:/run/umad" in service["volumes"]
        assert all(re.match(r"127\.0\.0\.1:", port) for port in service.get("ports", ()))


@pytest.mark.parametrize("name", FILES)
def test_the_daemon_sees_all_and_may_do_what_its_unit_may(name: str) -> None:
    services = compose(name)["services"]
    daemon = services.pop("umad")
    assert daemon["pid"] == "host"
    assert daemon["cap_drop"] == ["ALL"]
    unit = (ROOT / "systemd/umad.service").read_text()
    (bounding,) = re.findall(r"^CapabilityBoundingSet=(.+)$", unit, re.MULTILINE)
    assert {f"CAP_{one}" for one in daemon["cap_add"]} == set(bounding.split())
    (given,) = re.findall(r"setcap (\S+)=ep", DOCKERFILE)
    assert set(given.upper().split(",")) == set(bounding.split())
    assert "no-new-privileges" not in str(daemon.get("security_opt"))
    assert f"OOMScoreAdjust={daemon['oom_score_adj']}" in unit
    for service in services.values():  # each by itself: it sees and signals nobody else
        assert not {"pid", "cap_add", "privileged"} & service.keys()
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["depends_on"] == {"umad": {"condition": "service_healthy"}}


def test_five_services_have_the_missions_quotas_and_a_last_fence() -> None:
    services = compose("compose.five.yaml")["services"]
    daemon = settings("compose.five.yaml", "umad")
    del services["umad"]
    booked, quotas, ports = 0, [], []
    for name, service in services.items():
        own = settings("compose.five.yaml", name)
        (model,) = own.models
        assert model.name == name
        assert own.daemon.socket == daemon.daemon.socket
        peak = model.peak_bytes + own.serve.runtime_quota
        assert peak < limit(service) <= peak + GIB, "the fence stands behind what umad allows"
        booked += peak
        quotas.append(model.quota // GIB)
        ports += service["ports"]
    assert quotas == [16, 24, 8, 8, 4]
    assert len(set(ports)) == 5
    assert booked < 100 * GIB  # all five may load at once on 128 GiB


def test_the_pair_has_its_last_fence_behind_what_umad_allows() -> None:
    service = compose("compose.yaml")["services"]["umad-serve"]
    own = settings("compose.yaml", "umad-serve")
    runtimes = 2 if any(model.isolation == "process" for model in own.models) else 1
    booked = sum(model.peak_bytes for model in own.models) + runtimes * own.serve.runtime_quota
    assert booked < limit(service)


def test_no_image_has_a_host_of_its_own_or_runs_as_root() -> None:
    assert "://" not in re.sub("http://127.0.0.1:8600/healthz", "", DOCKERFILE)
    for stage in re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]:
        if "ENTRYPOINT" in stage:
            (user,) = re.findall(r"^USER (\S+)$", stage, re.MULTILINE)
            assert user.startswith("umad")
    daemon = DOCKERFILE.split("AS umad\n")[1].split("\nFROM ")[0]
    assert "torch" not in daemon


class Image:
    """What the stages make: the wheel out of what is copied, in an environment of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "venv/bin"
        self.environment = {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(folder)}

    def build(self) -> None:
        context = self.folder / "src"
        for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines():
            if line.startswith("!"):
                target = context / line[1:]
                target.parent.mkdir(parents=True, exist_ok=True)
                copy = ["cp", "-r", str(ROOT / line[1:]), str(target)]
                subprocess.run(copy, check=True)
        for old in context.rglob("*.so"):
            old.unlink()
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        wheel = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w"]
        subprocess.run(
            [*pip, *wheel, str(self.folder), "."],
            cwd=context,
            env=self.environment | {"PATH": os.environ["PATH"]},
            check=True,
        )
        subprocess.run(["rm", "-r", str(context)], check=True)
        venv.create(self.folder / "venv", with_pip=False)
        (built,) = self.folder.glob("umad-*.whl")
        into = [f"--python={self.bin}/python", "install", "--no-index", "--no-deps"]
        subprocess.run([*pip, *into, str(built)], check=True)
        # The libraries of this environment; its own link to the sources is not followed.
        (site,) = (self.folder / "venv/lib").glob("python*/site-packages")
        (libraries,) = (path for path in sys.path if path.endswith("site-packages"))
        (site / "libraries.pth").write_text(f"{libraries}\n")

    def run(self, *command: str, code: int = 0) -> str:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    @contextmanager
    def started(self, *command: str) -> Iterator[subprocess.Popen[bytes]]:
        with subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stderr=subprocess.DEVNULL
        ) as process:
            yield process
            process.send_signal(signal.SIGTERM)
            try:
                assert process.wait(30) == 0
            finally:
                process.kill()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    image = Image(tmp_path_factory.mktemp("image"))
    image.build()
    return image


def words_of(instruction: str, stage: str) -> list[str]:
    """An instruction of a stage, in its exec form."""
    text = DOCKERFILE.split(f"AS {stage}\n")[1].split("\nFROM ")[0]
    (found,) = re.findall(rf"^{instruction}\b[^\[]*(\[.+\])$", text, re.MULTILINE)
    words: list[str] = json.loads(found)
    return words


def entry(stage: str, file: Path) -> list[str]:
    """What a container of this stage runs, with a configuration of the test's."""
    words = [*words_of("ENTRYPOINT", stage), *words_of("CMD", stage)]
    return [str(file) if word == "/etc/umad/umad.toml" else word for word in words]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The configuration that compose.yaml mounts, its places moved into the test's folder."""
    text = compose("compose.yaml")["configs"]["umad"]["content"]
    text = text.replace("/srv/models/llama", str(tmp_path)).replace("/var/lib/umad", str(tmp_path))
    text = text.replace("[daemon]\n", f'[daemon]\nsocket = "{tmp_path}/umad.sock"\n')
    # On any machine: no GPU, little memory.
    text = text.replace('"cuda"', '"cpu"').replace('"gtt"', '"system"').replace("GiB", "MiB")
    file = tmp_path / "umad.toml"
    file.write_text(text.replace("0.0.0.0:8600", f"127.0.0.1:{free_port()}"))
    return file


@pytest.mark.slow
def test_the_daemon_of_the_image_needs_no_sources(image: Image, file: Path) -> None:
    where = Path(image.run("python", "-c", "import umad.guard as g; print(g.__file__)").strip())
    assert where.is_relative_to(image.folder)
    assert len(list(where.parent.rglob("*.so"))) == 2, "the guard was compiled into the wheel"
    assert image.run("umad", "--version").startswith("umad ")
    told = image.run("umad", "--check-config", "--config", str(file))
    assert told == f"{file}: 1 models, no problem\n"
    image.environment["UMAD_SOCKET"] = f"{file.parent}/umad.sock"
    with image.started(*entry("umad", file), "--permissive"):
        eventually((file.parent / "umad.sock").exists, 20)
        status = json.loads(image.run(*words_of("HEALTHCHECK", "umad")))
        assert status["workers"] == []


@pytest.mark.slow
@pytest.mark.models
def test_the_server_of_the_image_needs_no_sources(image: Image, file: Path) -> None:
    (address,) = re.findall('listen = "(.+?)"', file.read_text())
    check = [
        word.replace("127.0.0.1:8600", address) for word in words_of("HEALTHCHECK", "umad-serve")
    ]

    def healthy() -> bool:
        command = ["python", *check[1:]]
        done = subprocess.run(
            command, env=image.environment, cwd=image.folder, capture_output=True, check=False
        )
        return done.returncode == 0

    with image.started(*entry("umad-serve", file)):
        eventually(healthy, 30)


JOIN = """
import os, sys
from umad.client import connect
with connect(sys.argv[1]) as client, client.worker("inside", quota="8MiB") as worker:
    held = worker.load(lambda: bytearray(1 << 20))
    print(os.getpid(), flush=True)
    sys.stdin.readline()
    held.extend(bytes(64 << 20))
    print("over", flush=True)
    sys.stdin.readline()
"""
ELSEWHERE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace of its own needs root")
def test_a_worker_in_a_pid_namespace_of_its_own_is_known_and_stopped(tmp_path: Path) -> None:
    """Why compose.yaml says pid: host: from there the daemon sees into every other one."""
    command = [*ELSEWHERE, sys.executable, "-c", JOIN]
    with (
        running(tmp_path) as daemon,
        subprocess.Popen(
            [*command, str(daemon.socket)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        ) as outer,
    ):
        assert outer.stdout is not None
        assert outer.stdin is not None
        inner = int(outer.stdout.readline())
        (known,) = daemon.status()["workers"]
        assert inner < 10 < known["pid"], "its own number says nothing here"
        assert Path(f"/proc/{known['pid']}/comm").exists()
        outer.stdin.write("\n")
        outer.stdin.flush()
        stopped = daemon.wait_for("stopped", worker="inside")
        assert (stopped["pid"], stopped["fence"]) == (known["pid"], "sigkill")
        outer.wait(10)


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace of its own needs root")
def test_a_daemon_in_a_pid_namespace_of_its_own_refuses_and_says_why(tmp_path: Path) -> None:
    class Elsewhere(Daemon):
        def command(self) -> list[str]:
            return [*ELSEWHERE, *super().command()]

    daemon = Elsewhere(tmp_path)
    try:
        daemon.start()
        with pytest.raises(UmadError):
            daemon.client()
        assert "--pid=host" in daemon.wait_for("protocol_violation")["why"]
    finally:
        daemon.kill()  # unshare hears no SIGTERM, and takes the daemon with it
        daemon.stop()
