"""A configuration that was read again: what is in effect at once, and what needs a restart."""

from dataclasses import dataclass, fields, replace
from typing import Any, Final

from umad.config import Settings

# Sockets, folders, groups and probes are made once, and virtual memory is judged before a start.
_AT_START: Final = {
    "daemon": None,
    "metrics": None,
    "serve": frozenset({"listen", "runtime_quota", "guard", "body_max"}),  # of umad-serve
    "memory": frozenset({"root", "gpu", "conservative"}),
}
_LISTED_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Reloaded:
    """The settings to go by; the names of those that are new, and of those that must wait."""

    settings: Settings
    changed: tuple[str, ...]
    restart: tuple[str, ...]

    def answer(self) -> dict[str, Any]:
        """For the one who asked."""
        return {
            "changed": list(self.changed[:_LISTED_MAX]),
            "restart": list(self.restart[:_LISTED_MAX]),
        }


def take(now: Settings, read: Settings) -> Reloaded:
    """Go by what was read, as far as a running daemon can."""
    changed: list[str] = []
    restart: list[str] = []
    sections: dict[str, Any] = {}
    for table in fields(Settings):
        old, new = getattr(now, table.name), getattr(read, table.name)
        if isinstance(new, tuple):  # the tables of models and of adopted units
            changed += [table.name] if old != new else []
            sections[table.name] = new
            continue
        at_start = _AT_START.get(table.name, frozenset())
        kept: dict[str, Any] = {}
        for one in fields(new):
            if getattr(old, one.name) == getattr(new, one.name):
                continue
            if at_start is None or one.name in at_start:
                kept[one.name] = getattr(old, one.name)
                restart.append(f"{table.name}.{one.name}")
            else:
                changed.append(f"{table.name}.{one.name}")
        sections[table.name] = replace(new, **kept)
    return Reloaded(Settings(**sections), tuple(changed), tuple(restart))
