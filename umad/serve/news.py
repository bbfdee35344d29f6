"""What the daemon did, as a sentence for people who look in.

Owns ``told``: an event of the protocol in, words and a tone out.  Rules: an event without a
sentence of its own is told by its name and fields; what it does not say is "?"; nothing here
trusts what a program calls itself.
"""

from collections.abc import Mapping
from typing import Any, Final

from umad.units import format_bytes, format_duration, printable

TEXT_MAX: Final = 300
_SENTENCES: Final[dict[str, tuple[str, str]]] = {
    "registered": ("", "{worker} is here, with a quota of {quota_bytes}"),
    "rejoined": ("", "{worker} is back"),
    "page_found": ("", "process {pid} lives on from before the daemon's restart"),
    "accounts_abandoned": ("warn", "process {pid}: nobody came back for {limit_bytes} of it"),
    "launched": ("", "{worker} may start; {booked_bytes} are booked"),
    "loaded": ("good", "{worker} is loaded and holds {measured_bytes}"),
    "unloaded": ("", "{worker} has unloaded; {bytes} return"),
    "left": ("", "{worker} has left"),
    "exited": ("", "process {pid} has ended; {freed_bytes} of its bookings are free"),
    "adopted": ("", "{worker} ({unit}) is under quota now, with {booked_bytes} booked"),
    "disowned": ("", "{worker} is no longer under quota"),
    "evicting": ("", "{worker} is asked to go: {reason}"),
    "evict_cancelled": ("", "{worker} may stay"),
    "evict_missed": ("warn", "{worker} did not go in time, and stays"),
    "refused": ("warn", "{worker} was refused {asked_bytes}: {why}"),
    "revoked": ("bad", "{worker} is told to stop: it holds {measured_bytes} of {limit_bytes}"),
    "complied": ("good", "{worker} is within its limit again"),
    "stopped": ("bad", "{worker} was stopped with {measured_bytes} of {limit_bytes}: {fence}"),
    "unkillable": ("bad", "{worker} was killed, and is still there after {after_s}"),
    "orphaned": ("warn", "{worker} has ended; what it started lives and holds memory"),
    "leaked": ("warn", "{worker} lost a booking of {bytes}"),
    "leaking": ("warn", "{worker} keeps {held_bytes} that it said it gave back"),
    "lease_expired": ("warn", "{worker}: a booking of {bytes} has expired"),
    "init_lock_expired": ("warn", "{worker} held the load's turn for too long"),
    "prediction_exceeded": (
        "warn",
        "{worker}: a request took {took_bytes}; {predicted_bytes} were foreseen",
    ),
    "migrated": ("warn", "{worker}: {swapped_bytes} lie in swap, {evicted_bytes} outside the GPU"),
    "quota_set": ("", "{worker} has a quota of {quota_bytes} now; it was {was_bytes}"),
    "pinned": ("", "{worker} is pinned: it goes for nobody"),
    "unpinned": ("", "{worker} is no longer pinned"),
    "drained": ("warn", "no load begins until the daemon is told to resume"),
    "resumed": ("good", "loads may begin again"),
    "reloaded": ("", "the configuration was read again"),
    "shrinking": ("warn", "{free_bytes} are free, below the reserve: caches are given back"),
    "admission_closed": ("bad", "memory is short, {free_bytes} are free: nothing is granted"),
    "admission_opened": ("good", "{free_bytes} are free: memory is granted again"),
    "oom_kill": ("bad", "the kernel's OOM killer has struck"),
}
_FENCES: Final = {
    "return": "its memory was taken back",
    "revoke": "it ended when it was told to",
    "sigkill": "its process was killed",
    "exit": "it has ended",
}
_UNTOLD: Final = frozenset({"seq", "name", "unix_s", "level"})


class _Fields(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return "?"


def told(event: Mapping[str, Any]) -> tuple[str, str]:
    """(tone, sentence) of an event: the tone is "", "good", "warn" or "bad".

    Args:
        event: as ``events`` of the protocol answers it.
    """
    name = str(event.get("name", "?"))
    fields = _Fields((key, _shown(key, value)) for key, value in event.items())
    if name in _SENTENCES:
        tone, sentence = _SENTENCES[name]
        text = sentence.format_map(fields)
    else:
        tone = ""
        rest = ", ".join(
            f"{_word(key)} {value}"
            for key, value in fields.items()
            if key not in _UNTOLD and value not in ("", "?")
        )
        text = f"{name.replace('_', ' ')}: {rest}" if rest else name.replace("_", " ")
    return tone, printable(text[:TEXT_MAX])


def _word(key: str) -> str:
    return key.removesuffix("_bytes").removesuffix("_s").replace("_", " ")


def _shown(key: str, value: object) -> str:
    if value is None:
        return "?"
    if key == "fence":
        return _FENCES.get(str(value), str(value))
    if isinstance(value, int) and (key == "bytes" or key.endswith("_bytes")):
        return format_bytes(value)
    if isinstance(value, int | float) and key.endswith("_s"):
        return format_duration(value)
    return str(value)
