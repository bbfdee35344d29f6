"""The families of the registered processes: who is in them, and what they hold together.

A family is a registered process and its descendants that are not registered themselves, nor below
another registered process.  A descendant is known by one of these, and by nothing weaker:

1. its chain of parents leads to the registered process, or to a member that was known before: who
   was seen once stays one of the family when its parent dies;
2. its session is led by one of the family: a session cannot be joined, only inherited;
3. it is in the registered process's own cgroup, while that process lives: a ``.scope`` or
   ``.service`` that at some look held nobody but the family, or the unit that was adopted;
4. it was taken in by the registered process's launcher (``umadctl run``), as every orphan below
   that is: it starts nothing else.

A process group proves nothing: a shell puts the neighbours in a pipeline into one.  umad, its
ancestors and pid 1 are in no family, and have none: who started umad is a host, not a worker.
A process of another user than its registered process's is not in its family: umad, as root, would
kill for a worker whom the worker may not.

What can slip through without a launcher: a child that is born after the last look (a second),
outlives its parent and has left its session (or never had one of its own) is not found.  Its bytes
then count as what they are, used memory that nobody can be asked for: they lower what can be
granted.
"""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Final

from umad.host import cgroups
from umad.host.clock import Clock
from umad.host.files import Unreadable, inside, read_as, read_file
from umad.host.procs import Stat, lineage, parse_proportional, parse_stat, parse_uid
from umad.values import Identity, Kin, Moved, ProcessReading, Reading

_ROUNDS_MAX: Final = 8  # adoptions by session in one look; the next look goes on from there
# How often shared pages are counted anew: once a second, and for at most a fiftieth of the time.
_RECOUNT_S: Final = 1.0
_RECOUNT_COST: Final = 50.0


_OURS: Final = Identity(0, 0)


def read_table(root: str = "/") -> dict[int, Stat]:
    """All processes by pid; 9 us for each.

    Raises:
        Unreadable: there is no process to be seen.
    """
    folder = inside(root, "proc")
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.name.isdigit()]
    except OSError as error:
        raise Unreadable.from_os(folder, error) from error
    table: dict[int, Stat] = {}
    for name in names:
        try:
            table[int(name)] = read_as(f"{folder}/{name}/stat", parse_stat)
        except Unreadable:
            continue  # it has ended meanwhile, or may not be seen: then it is nobody's child
    return table


def families(
    table: Mapping[int, Stat],
    roots: Mapping[Identity, Collection[Identity]],
    *,
    umad: int,
    never: Collection[int],
    ended: Identity | None = None,
    units: Mapping[Identity, Collection[int]] | None = None,
    launchers: Mapping[Identity, Identity] | None = None,
) -> dict[Identity, frozenset[Identity]]:
    """Whose family each process is in.

    Args:
        table: all processes.
        roots: the registered processes, and who is known to be of their family.
        umad: our pid; we and what is below us are in no family.
        never: pids that are in no family and have none, as our ancestors; 0 and 1 are of them.
        ended: a registered process that has ended this moment: its session is its last word.
        units: pids in the own cgroups of registered processes that live.
        launchers: by registered process, who started it, and is in no family itself for that.

    Returns:
        The members of each registered process's family, itself not included.
    """

    def there(who: Identity) -> bool:
        return who.pid in table and table[who.pid].start_ticks == who.start_ticks

    fixed: dict[int, Identity | None] = {root.pid: root for root in roots if there(root)}
    fixed |= dict.fromkeys((0, 1, *never))
    fixed[umad] = _OURS  # somebody, so that nothing below us is taken for an orphan
    seeds: dict[int, Identity | None] = {}
    for root, known in roots.items():
        # A member that has registered since takes along what is below it.
        new_roots = [one for one in known if one in roots]
        nearest = _owners(table, fixed) if new_roots else {}
        seeds |= {
            who.pid: root for who in known if there(who) and nearest.get(who.pid) not in new_roots
        }
    parents = {one.pid: root for root, one in (launchers or {}).items() if there(one)}
    seeds |= parents
    seeds |= fixed
    for _ in range(_ROUNDS_MAX):
        owners = _owners(table, seeds)
        more = dict(_by_session(table, owners, seeds, ended))
        for root, pids in (units or {}).items():
            free = (pid for pid in pids if pid in table and pid not in seeds)
            more |= {pid: root for pid in free if owners[pid] is None}
        if not more:
            break
        seeds |= more
    found: dict[Identity, set[Identity]] = {root: set() for root in roots}
    for pid, owner in _owners(table, seeds).items():
        if owner in (None, _OURS) or pid not in table or table[pid].ended:
            continue
        who = Identity(pid, table[pid].start_ticks)
        if who != owner and parents.get(pid) != owner:
            found[owner].add(who)
    return {root: frozenset(members) for root, members in found.items()}


def _owners(
    table: Mapping[int, Stat], seeds: Mapping[int, Identity | None]
) -> dict[int, Identity | None]:
    """The nearest seed above each process."""
    owners = dict(seeds)
    for start in table:
        path: list[int] = []
        pid = start
        while pid not in owners:
            owners[pid] = None  # for the time being; ends a circle that a torn table may show
            path.append(pid)
            child, parent = table[pid], table.get(table[pid].parent)
            # A parent that is younger than its child is another process with the parent's pid.
            if parent is None or parent.start_ticks > child.start_ticks:
                break
            pid = child.parent
        owner = owners[pid]
        owners.update(dict.fromkeys(path, owner))
    return owners


def _by_session(
    table: Mapping[int, Stat],
    owners: Mapping[int, Identity | None],
    seeds: Mapping[int, Identity | None],
    ended: Identity | None,
) -> Iterable[tuple[int, Identity]]:
    """Processes of nobody whose session one of a family leads."""
    for pid, stat in table.items():
        if owners[pid] is not None or pid in seeds:
            continue
        leader = table.get(stat.session)
        if leader is not None and leader.start_ticks <= stat.start_ticks:
            root = owners[stat.session]
            if root is not None:
                yield pid, root
        # While the session has members the kernel gives its number to nobody else.
        elif leader is None and ended is not None and _of_session(stat, ended):
            yield pid, ended


def _of_session(stat: Stat, leader: Identity) -> bool:
    return stat.session == leader.pid and stat.start_ticks >= leader.start_ticks


class FamilyFinder:
    """Finds families on a machine; remembers which registered process has a cgroup of its own.

    Args:
        root: the folder that holds ``proc/`` and ``sys/``.
    """

    def __init__(self, root: str = "/") -> None:
        self._root = root
        self._own: dict[Identity, str] = {}  # cgroups
        self._seen: tuple[bytes, frozenset[Identity]] | None = None

    def find(
        self, roots: Mapping[Identity, Kin], ended: Identity | None = None
    ) -> dict[Identity, frozenset[Identity]]:
        """The families now; where processes cannot be listed, as they were.

        Args:
            roots: the registered processes.
            ended: the one of them that has ended this moment.
        """
        known = {root: kin.members for root, kin in roots.items()}
        newest = self._newest()
        seen = (newest, frozenset(roots)) if newest and not any(known.values()) else None
        if seen is not None and seen == self._seen and ended is None:
            return known  # nobody was born since there was no family: there is none now
        self._seen = seen
        try:
            table = read_table(self._root)
        except Unreadable:
            return known
        umad = os.getpid()
        never = lineage(umad, self._root)
        search = partial(
            families,
            table,
            known,
            umad=umad,
            never=never,
            ended=ended,
            launchers={root: kin.launcher for root, kin in roots.items() if kin.launcher},
        )
        found = search()
        units = self._units(table, found, never, roots)
        if any(units.values()):
            found = search(units=units)
        result = {
            root: frozenset(one for one in members if self._may_be(one, roots[root]))
            for root, members in found.items()
        }
        if any(result.values()):
            self._seen = None  # who asked may not take them over, and asks again
        return result

    def _newest(self) -> bytes:
        """The pid that was given out last; nothing where that cannot be told."""
        try:
            return read_file(inside(self._root, "proc/loadavg")).split()[4]
        except (Unreadable, IndexError):
            return b""

    def _units(
        self,
        table: Mapping[int, Stat],
        found: Mapping[Identity, frozenset[Identity]],
        never: Collection[int],
        roots: Mapping[Identity, Kin],
    ) -> dict[Identity, frozenset[int]]:
        """Who else is in the cgroups that are some registered process's own."""
        own: dict[Identity, str] = {}
        units: dict[Identity, frozenset[int]] = {}
        for root, members in found.items():
            family = {root.pid, *(member.pid for member in members)}
            others = {one.pid for one in found if one != root}.union(never)
            if adopted := roots[root].cgroup:
                units[root] = cgroups.pids_below(adopted, self._root) - family - others
                continue
            if root.pid not in table or table[root.pid].start_ticks != root.start_ticks:
                continue  # it has ended: from now on the unit may hold its successor
            path = cgroups.of_process(root.pid, self._root)
            if not path.endswith((".scope", ".service")):
                continue
            inside_it = cgroups.pids(path, self._root)
            if root.pid not in inside_it or inside_it & others:
                continue
            if inside_it <= family or self._own.get(root) == path:
                own[root] = path
                units[root] = inside_it - family
        self._own = own
        return units

    def _may_be(self, member: Identity, of: Kin) -> bool:
        if of.uid == 0 or of.cgroup:  # an administrator adopted the unit, whoever is in it
            return True
        try:
            path = inside(self._root, f"proc/{member.pid}/status")
            return read_as(path, parse_uid) == of.uid
        except Unreadable:
            return False  # gone; or nobody can say whose it is


@dataclass(slots=True)
class _Sharing:
    """How many bytes of a family would count twice, when that was counted, and at what cost."""

    of: frozenset[Identity]
    readings: Sequence[ProcessReading]
    bytes: int = 0
    problem: str = ""
    taken_s: float = 0.0
    due_s: float = 0.0


class Joint:
    """Makes one reading of a family, with each page once.

    Pages that parent and child share since the fork are in the RssAnon of both.  The kernel
    counts them by their share (smaps_rollup), which sums to the truth where all who share are of
    the family, and to less where not.  That takes 22 ms for 4 GiB of 4 KiB pages, so it is done
    when a family changes, then once a second at most, and in ``confirm``.  In between, what a
    child copies by writing is not seen.

    Args:
        root: the folder that holds ``proc/``.
        clock: measures what a count costs.
    """

    def __init__(self, root: str, clock: Clock) -> None:
        self._root = root
        self._clock = clock
        self._sharing: dict[Identity, _Sharing] = {}

    def join(
        self,
        readings: Mapping[Identity, ProcessReading],
        kin: Mapping[Identity, Collection[Identity]],
        now_s: float,
    ) -> dict[Identity, ProcessReading]:
        """The readings of the registered processes, their families' bytes included.

        Args:
            readings: of registered processes and of members.
            kin: the members by registered process; who has none may be missing.
            now_s: of these readings.
        """
        members = {one for group in kin.values() for one in group}
        joined = {who: reading for who, reading in readings.items() if who not in members}
        sharing: dict[Identity, _Sharing] = {}
        for root, group in kin.items():
            everybody = (readings[root], *(readings[one] for one in sorted(group, key=_age)))
            alive = [reading for reading in everybody if reading.alive]
            if not any(reading.identity != root for reading in alive):
                continue
            mine = _Sharing(frozenset(reading.identity for reading in alive), alive)
            old = self._sharing.get(root)
            if old is not None and old.of == mine.of and now_s < old.due_s:
                mine = replace(old, readings=alive)
            else:
                self._count(mine, now_s)
            sharing[root] = mine
            joined[root] = _together(root, mine)
        self._sharing = sharing
        return joined

    def confirm(self, identity: Identity, now_s: float) -> ProcessReading | None:
        """A family's reading with the shared pages counted anew; None for one without a family."""
        mine = self._sharing.get(identity)
        if mine is None:
            return None
        if mine.taken_s < now_s:
            self._count(mine, now_s)
        return _together(identity, mine)

    def _count(self, mine: _Sharing, now_s: float) -> None:
        began_s = self._clock.now_s()
        mine.bytes, mine.problem, mine.taken_s = 0, "", now_s
        if len(mine.readings) > 1:
            try:
                mine.bytes = sum(self._shared(reading) for reading in mine.readings)
            except Unreadable as error:
                mine.problem = f"what its family shares cannot be told: {error}"
        cost_s = self._clock.now_s() - began_s
        mine.due_s = now_s + max(_RECOUNT_S, _RECOUNT_COST * cost_s)

    def _shared(self, reading: ProcessReading) -> int:
        path = inside(self._root, f"proc/{reading.identity.pid}/smaps_rollup")
        try:
            share = read_as(path, parse_proportional)
        except Unreadable as error:
            if error.gone or error.absent:
                return reading.host_bytes  # it has ended since: nothing of it is there
            raise
        return max(0, reading.host_bytes - share)


def _age(identity: Identity) -> tuple[int, int]:
    return identity.start_ticks, identity.pid


def _together(root: Identity, mine: _Sharing) -> ProcessReading:
    """One reading out of those of a family's living."""
    broken = next((one.bytes for one in mine.readings if one.bytes.value is None), None)
    if broken is None and mine.problem:
        broken = Reading.broken("smaps_rollup", mine.problem)
    host = sum(one.host_bytes for one in mine.readings) - mine.bytes
    # What one of them holds is there, whatever was shared at the last count.
    host = max(host, *(one.host_bytes for one in mine.readings), 0)
    pools: dict[str, int] = {}
    for reading in mine.readings:
        for name, size in reading.gpu:
            pools[name] = pools.get(name, 0) + size
    total = host + sum(pools.values())
    source = f"{mine.readings[0].bytes.source} of {len(mine.readings)} processes"
    return ProcessReading(
        root,
        True,
        Reading.of(total, source) if broken is None else broken,
        host_bytes=host,
        gpu=tuple(sorted(pools.items())),
        # What was shared at the fork, they map too.
        shmem_bytes=host if len(mine.readings) > 1 else 0,
        locked_bytes=sum(one.locked_bytes for one in mine.readings),
        moved=reduce(Moved.plus, (one.moved for one in mine.readings)),
    )
