import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest

from umad.errors import AccessDenied, ProbeError
from umad.host import peercred
from umad.host.peercred import enable_passcred, group_id, parse_creds, peer_of
from umad.host.procs import process_identity

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def receive(sock: socket.socket) -> tuple[bytes, int | None]:
    data, ancillary, _, _ = sock.recvmsg(100, socket.CMSG_SPACE(64))
    return data, parse_creds(ancillary)


def test_the_peer_is_the_connecting_process(tmp_path):
    path = str(tmp_path / "s")
    code = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({path!r}); s.recv(1)"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        with subprocess.Popen([sys.executable, "-c", code]) as client:
            sock, _ = listener.accept()
            with sock:
                peer = peer_of(sock)
                assert peer.identity == process_identity(client.pid)
                assert (peer.uid, peer.gid) == (os.getuid(), os.getgid())
                assert peer.groups == frozenset(os.getgroups())
                assert peer.comm.startswith("python")


def test_a_peer_that_has_ended_is_refused(tmp_path):
    path = str(tmp_path / "s")
    code = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({path!r})"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        subprocess.run([sys.executable, "-c", code], check=True)
        sock, _ = listener.accept()
        with sock, pytest.raises(AccessDenied, match="ended"):
            peer_of(sock)


def test_pid_zero_is_refused_with_the_reason(pair, monkeypatch):
    class Foreign(socket.socket):
        def getsockopt(self, *_: int) -> bytes:  # type: ignore[override]
            return struct.pack("=iII", 0, 65534, 65534)

    with Foreign(fileno=os.dup(pair[0].fileno())) as sock, pytest.raises(AccessDenied) as caught:
        peer_of(sock)
    assert "PID namespace" in caught.value.message


def test_before_linux_6_5_a_pid_is_looked_up_by_number(pair, monkeypatch):
    monkeypatch.setattr(peercred, "_SO_PEERPIDFD", 9999)
    assert peer_of(pair[0]).identity.pid == os.getpid()


def test_a_socket_without_peers_is_a_probe_error():
    with socket.socket(socket.AF_UNIX) as sock:
        fd = sock.detach()
        os.close(fd)
        with pytest.raises(ProbeError):
            peer_of(sock)


def test_no_descriptor_is_left_open(pair):
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - Path would add one of its own
    peer_of(pair[0])
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_groups_by_name():
    assert group_id("root") == 0
    assert group_id("no-such-group-here") is None


def test_a_forked_child_on_its_parents_connection_is_seen(pair):
    near, far = pair
    enable_passcred(near)
    far.send(b"parent")
    assert receive(near) == (b"parent", os.getpid())
    child = os.fork()
    if child == 0:
        far.send(b"child")
        os._exit(0)
    assert receive(near) == (b"child", child)
    os.waitpid(child, 0)
    # the connection's own credentials still name the parent
    assert peer_of(near).identity.pid == os.getpid()


def test_no_credentials_no_pid(pair):
    near, far = pair
    far.send(b"x")
    assert receive(near) == (b"x", None)
    kind = (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
    assert parse_creds([(*kind, struct.pack("=iII", 0, 0, 0))]) is None
    assert parse_creds([(*kind, b"\1")]) is None
    assert parse_creds([(socket.SOL_SOCKET, socket.SCM_RIGHTS, b"\1\0\0\0")]) is None
