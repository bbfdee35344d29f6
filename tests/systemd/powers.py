"""Inside a unit's sandbox: what its process may do and may not, as JSON.

powers.py PID: PID is a process of another user, which is killed in the end.
"""

import ctypes
import errno
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path


def _gpu() -> None:
    """A node of NVIDIA's that the policy lets through has no driver here; a closed one is EPERM."""
    try:
        os.close(os.open("/dev/nvidia0", os.O_RDWR))
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise


def main() -> None:
    """Try each thing; ``true`` or the error's text."""
    pid = int(sys.argv[1])
    process = Path(f"/proc/{pid}")
    setting = Path("/proc/sys/vm/swappiness")
    libc = ctypes.CDLL(None, use_errno=True)

    def pressure_trigger() -> None:
        fd = os.open("/proc/pressure/memory", os.O_RDWR | os.O_NONBLOCK)
        os.write(fd, b"some 100000 2000000\0")

    def callback() -> None:
        assert ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 5)() == 5

    def namespace() -> None:
        if libc.unshare(0x10000000):  # CLONE_NEWUSER
            raise OSError(ctypes.get_errno(), "no new user namespace")

    def content(path: str) -> None:
        """Hidden files are still there, as empty ones that these capabilities can open."""
        place = Path(path)
        if not (place.read_text() if place.is_file() else list(place.iterdir())):
            raise OSError(0, f"{path} is empty")

    def kill() -> None:
        signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGKILL)

    tries: dict[str, Callable[[], object]] = {
        "meminfo": Path("/proc/meminfo").read_text,
        "smaps": (process / "smaps_rollup").read_text,
        "fd": lambda: [link.readlink() for link in (process / "fd").iterdir()],
        "fdinfo": (process / "fdinfo/0").read_text,
        "debugfs": lambda: content("/sys/kernel/debug"),
        "gpu": _gpu,
        "home": Path("/home/someone/model/config.json").read_text,
        "sysfs": lambda: content("/sys/class"),
        "pressure": pressure_trigger,
        "callback": callback,
        "run": Path("/run/umad/trial").touch,
        "shadow": lambda: content("/etc/shadow"),
        "root": lambda: content("/root"),
        "write": Path("/etc/umad/trial").touch,
        "settings": lambda: setting.write_text(setting.read_text()),  # changes nothing
        "disk": lambda: os.open("/dev/disk", os.O_RDONLY),
        "network": lambda: socket.socket(socket.AF_INET),
        "namespace": namespace,
        "kill": kill,
    }
    results: dict[str, object] = {}
    for name, attempt in tries.items():
        try:
            attempt()
            results[name] = True
        except OSError as error:
            results[name] = error.strerror
    print(json.dumps(results))


main()
