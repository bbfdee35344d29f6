"""Who may do what: (peer, method) -> allowed or not.

The kernel says who the peer is; nothing it claims itself counts.  An unknown peer may only read.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from umad.values import Peer


class Permission(IntEnum):
    """What a method needs; each includes those before it."""

    READ = 0
    WORKER = 1
    ADMIN = 2


METHODS: Final[dict[str, Permission]] = {
    "hello": Permission.READ,
    "ping": Permission.READ,
    "status": Permission.READ,
    "metrics": Permission.READ,
    "snapshot": Permission.READ,
    "events": Permission.READ,
    "timeline": Permission.READ,
    "register": Permission.WORKER,
    "unregister": Permission.WORKER,
    "reserve": Permission.WORKER,
    "commit": Permission.WORKER,
    "void": Permission.WORKER,
    "release": Permission.WORKER,
    "init_lock": Permission.WORKER,
    "init_unlock": Permission.WORKER,
    "admit": Permission.WORKER,
    "extend": Permission.WORKER,
    "forward_done": Permission.WORKER,
    "progress": Permission.WORKER,
    "segments": Permission.WORKER,
    "keep": Permission.WORKER,
    "set_quota": Permission.ADMIN,
    "evict": Permission.ADMIN,
    "load": Permission.ADMIN,
    "pin": Permission.ADMIN,
    "drain": Permission.ADMIN,
    "resume": Permission.ADMIN,
    "reload": Permission.ADMIN,
    "adopt": Permission.ADMIN,
    "disown": Permission.ADMIN,
    "cost": Permission.READ,
}


@dataclass(frozen=True, slots=True)
class Access:
    """The daemon's own uid and the group ids that stand for the two permissions."""

    uid: int
    worker_gid: int | None
    admin_gid: int | None

    def of(self, peer: Peer) -> Permission:
        """The highest permission of a peer.

        1. root and the daemon's own user: ADMIN.
        2. a member of the admin group: ADMIN.
        3. a member of the worker group: WORKER.
        4. anyone else who could open the socket: READ.
        """
        groups = peer.groups | {peer.gid}
        if peer.uid in (0, self.uid):
            return Permission.ADMIN
        if self.admin_gid is not None and self.admin_gid in groups:
            return Permission.ADMIN
        if self.worker_gid is not None and self.worker_gid in groups:
            return Permission.WORKER
        return Permission.READ
