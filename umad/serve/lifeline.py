"""Ends a process with the engine that it serves, whoever its parent is.

The engine holds the write end of a pipe, and nobody else does; the processes behind it hold the
read end.  When the engine is gone, however it went, the kernel signals each of them SIGKILL: no
thread, no interpreter lock and no cooperation is needed.  PR_SET_PDEATHSIG would tie a model's
process to its parent, the zygote, which may die without harm to the models; and it fires when the
*thread* that forked ends.
"""

import fcntl
import os
import select
import signal


def end_with(lifeline: int) -> bool:
    """Have the kernel end this process when the pipe's write end is gone.

    Args:
        lifeline: the read end; it is replaced by one of our own, because the owner of signals
            belongs to an open file, which forked processes share.

    Returns:
        False when it is gone already.
    """
    own = os.open(f"/proc/self/fd/{lifeline}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.dup2(own, lifeline, inheritable=False)
    os.close(own)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_RDONLY | os.O_NONBLOCK | os.O_ASYNC)
    poller = select.poll()
    poller.register(lifeline, 0)  # a hang-up is told without being asked for
    return not poller.poll(0)
