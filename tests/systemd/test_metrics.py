"""The daemon's own listener for Prometheus under the unit's restrictions."""

import pytest

from tests.systemd.conftest import PERMISSIVE, Installed
from tests.systemd.test_units import said

pytestmark = [pytest.mark.systemd, pytest.mark.root, pytest.mark.slow]


def serve_at(umad: Installed, address: str) -> None:
    umad.machine.path("/run/metrics.toml").write_text(f'[metrics]\nlisten = "{address}"\n')
    elsewhere = PERMISSIVE.replace("/etc/umad/umad.toml", "/run/metrics.toml")
    umad.drop_in("umad.service", elsewhere)
    umad.run("systemctl start umad")


def test_a_unix_socket_is_served_to_the_group(umad: Installed) -> None:
    serve_at(umad, "unix:/run/umad/metrics.sock")
    fetch = (
        "import socket; s = socket.socket(socket.AF_UNIX); s.connect('/run/umad/metrics.sock');"
        "s.sendall(b'GET /metrics HTTP/1.0\\r\\n\\r\\n'); print(s.makefile().read())"
    )
    answer = umad.run(f'/usr/bin/python3 -c "{fetch}"', user="umad").stdout
    assert "umad_up 1.0" in answer
    nobody = umad.run(f'/usr/bin/python3 -c "{fetch}"', user="nobody", check=False)
    assert "PermissionError" in nobody.stderr


def test_a_port_is_refused_by_the_unit_and_the_daemon_runs(umad: Installed) -> None:
    serve_at(umad, "127.0.0.1:9464")
    assert umad.show("umad", "ActiveState") == "active"
    assert "umad.service may use Unix sockets only" in said(umad)
