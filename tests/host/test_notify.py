import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from umad.host.notify import Notifier, listen_fds


@pytest.fixture(params=["abstract", "path"])
def manager(request, tmp_path) -> Iterator[tuple[socket.socket, str]]:
    """The other end, and what NOTIFY_SOCKET says."""
    abstract = request.param == "abstract"
    name = f"umad-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + name if abstract else name)
        sock.setblocking(False)
        yield sock, "@" + name if abstract else name


def received(sock: socket.socket) -> list[str]:
    messages = []
    while True:
        try:
            messages.append(sock.recv(4096).decode())
        except BlockingIOError:
            return messages


def test_what_systemd_hears(manager):
    sock, address = manager
    environ = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "400000", "PATH": "/bin"}
    notifier = Notifier(environ)
    assert notifier.watchdog_period_s == pytest.approx(0.2)
    assert environ == {"PATH": "/bin"}
    assert notifier.ready("5 workers")
    notifier.status("läuft\nREADY=1")
    notifier.watchdog()
    notifier.stopping()
    notifier.close()
    assert received(sock) == [
        "READY=1\nSTATUS=5 workers",
        "STATUS=läuft READY=1",
        "WATCHDOG=1",
        "STOPPING=1",
    ]
    notifier.status("after the end")
    assert received(sock) == []


@pytest.mark.parametrize(
    ("usec", "pid", "period_s"),
    [
        ("400000", str(os.getpid()), 0.2),
        ("400000", "1", None),
        ("0", "", None),
        ("-5", "", None),
        ("soon", "", None),
        ("", "", None),
    ],
)
def test_pings_only_where_they_are_asked_for(manager, usec, pid, period_s):
    sock, address = manager
    environ = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": usec, "WATCHDOG_PID": pid}
    notifier = Notifier(environ)
    assert notifier.watchdog_period_s == period_s
    notifier.watchdog()
    assert received(sock) == (["WATCHDOG=1"] if period_s else [])
    assert environ == {}
    notifier.close()


def test_systemd_keeps_a_descriptor_and_forgets_it(manager, tmp_path):
    sock, address = manager
    notifier = Notifier({"NOTIFY_SOCKET": address})
    kept = tmp_path / "kept"
    with kept.open("w") as file:
        assert notifier.store_fd("page.7.700.ab", file.fileno())
    data, fds, _, _ = socket.recv_fds(sock, 4096, 4)
    assert data.decode() == "FDSTORE=1\nFDNAME=page.7.700.ab\nFDPOLL=0"
    assert [os.fstat(fd).st_ino for fd in fds] == [kept.stat().st_ino]
    os.close(fds[0])
    assert notifier.remove_fd("page.7.700.ab")
    assert received(sock) == ["FDSTOREREMOVE=1\nFDNAME=page.7.700.ab"]
    notifier.close()


def test_an_address_where_nobody_listens_stops_nobody():
    notifier = Notifier({"NOTIFY_SOCKET": "/nowhere/x"})
    assert not notifier.ready()
    notifier.watchdog()
    notifier.close()


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": ""}])
def test_without_systemd_nothing_happens(environ):
    notifier = Notifier({**environ, "WATCHDOG_USEC": "400000"})
    assert notifier.watchdog_period_s is None
    assert notifier.ready()
    notifier.watchdog()
    assert notifier.store_fd("page", 0)
    assert notifier.remove_fd("page")
    notifier.stopping()
    notifier.close()
    notifier.close()


@pytest.mark.timeout(10)
def test_a_manager_that_does_not_listen_stops_nobody(manager):
    _, address = manager
    notifier = Notifier({"NOTIFY_SOCKET": address})
    for _ in range(1000):  # far more than a datagram queue holds
        notifier.status("busy")
    assert not notifier.ready()
    received(manager[0])
    assert notifier.ready()
    assert received(manager[0]) == ["READY=1"]
    notifier.close()


def test_no_child_inherits_the_socket(manager):
    def inherited() -> str:
        code = "import os; print(sorted(os.listdir('/proc/self/fd')))"
        command = [sys.executable, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, close_fds=False).stdout

    before = inherited()
    notifier = Notifier({"NOTIFY_SOCKET": manager[1]})
    assert inherited() == before
    notifier.close()


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"LISTEN_FDS": "1"},
        {"LISTEN_PID": "1", "LISTEN_FDS": "1"},
        {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "x"},
        {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "0"},
    ],
)
def test_no_sockets_are_taken_that_are_not_ours(environ):
    assert listen_fds(environ) == []
    assert environ == {}


@pytest.mark.parametrize(
    ("names", "expected"),
    [("a.socket:page.7", ("a.socket", "page.7")), ("a", ("a", "")), ("a:b:c", ("a", "b"))],
)
def test_what_systemd_hands_over(names, expected):
    """In a process of its own, since descriptors 3 and 4 are in use in this one."""
    code = (
        "import os\n"
        "from umad.host.notify import listen_fds\n"
        "os.environ['LISTEN_PID'] = str(os.getpid())\n"
        "fds = listen_fds()\n"
        "print([tuple(one) for one in fds], [os.get_inheritable(fd) for _, fd in fds],"
        " [name for name in os.environ if name.startswith('LISTEN')])\n"
    )
    with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as two:
        shell = f'exec {sys.executable} -c "$CODE" 3<&{one.fileno()} 4<&{two.fileno()}'
        done = subprocess.run(
            ["bash", "-c", shell],
            env={**os.environ, "CODE": code, "LISTEN_FDS": "2", "LISTEN_FDNAMES": names},
            pass_fds=[one.fileno(), two.fileno()],
            capture_output=True,
            text=True,
            check=True,
        )
    handed = list(zip(expected, (3, 4), strict=True))
    assert done.stdout == f"{handed} [False, False] []\n"
