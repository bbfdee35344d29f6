"""Fifty processes for the init mutex: python -m tests.daemon.herd SOCKET LOG COUNT

Each registers, queues for the mutex, holds it for 20 ms and gives it back; but the first that gets
it is killed, the second stops (SIGSTOP), the third forks a child that keeps the socket, and ends.
Each writes lines into LOG: "enter RANK SECONDS PID" and "leave RANK SECONDS WHAT".
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.daemon.running import Raw

HOLD_S = 0.02
ORPHAN_S = 10


def write(log: int, *words: object) -> None:
    os.write(log, (" ".join(map(str, words)) + "\n").encode())


def worker(socket: Path, log: int, number: int) -> None:
    with Raw(socket) as peer:
        key = peer.call("register", model=f"m{number}", quota=1 << 20)["worker"]
        held = peer.call("init_lock", worker=key, wait_s=60.0)
        rank = held["token"] & 0xFFFFFFFF  # above that is the daemon's generation
        write(log, "enter", rank, time.monotonic(), os.getpid())
        if rank == 1:
            write(log, "leave", rank, time.monotonic(), "killed")
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)  # until somebody goes on with it
        elif rank == 3:
            if os.fork() == 0:
                signal.alarm(
                    ORPHAN_S
                )  # whatever becomes of it, it does not outlive the test for long
                signal.pause()
            write(log, "leave", rank, time.monotonic(), "forked")
            os._exit(0)
        threading.Event().wait(HOLD_S)
        if rank != 2:
            write(log, "leave", rank, time.monotonic(), "done")
        answer: Any = peer.call("init_unlock", worker=key, token=held["token"])
        if rank == 2:
            write(log, "late", rank, time.monotonic(), answer.get("code"))


def main(socket: Path, path: Path, count: int) -> None:
    log = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for number in range(count):
        if os.fork() == 0:
            try:
                worker(socket, log, number)
            finally:
                os._exit(1)
    left = count
    while left:
        pid, status = os.waitpid(-1, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            while " 3 " not in path.read_text():  # its time is over, and the next has its turn
                threading.Event().wait(0.01)
            os.kill(pid, signal.SIGCONT)
        else:
            left -= 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
