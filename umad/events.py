"""What the daemon did, as a sentence for people: for ``umadctl`` and for umad-serve's page.

Owns ``in_words``: an event of the protocol in, a tone and words out.  Rules: an event without a
sentence of its own is told by its name and fields; what it does not say is "?"; nothing here
trusts what a program calls itself.  The journal's catalogue explains the same events at length.
"""

from collections.abc import Mapping
from typing import Any, Final

from umad.journal import shown
from umad.units import format_excess, printable

Event = Mapping[str, Any]

TEXT_MAX: Final = 300
GOOD, WARN, BAD, PLAIN = "good", "warn", "bad", ""
_SENTENCES: Final[Mapping[str, tuple[str, str]]] = {
    "registered": (PLAIN, "{worker} registered: quota {quota_bytes}, peak {peak_bytes}"),
    "rejoined": (PLAIN, "{worker} is back after its connection was lost"),
    "page_found": (
        PLAIN,
        "pid {pid} is back after a restart: {accounts} accounts of {limit_bytes}",
    ),
    "accounts_abandoned": (WARN, "nobody came back for pid {pid}: {limit_bytes} free again"),
    "launched": (PLAIN, "{worker} was started under quota: {booked_bytes} booked"),
    "loaded": (GOOD, "{worker} has loaded: {measured_bytes} measured, {booked_bytes} booked"),
    "unloaded": (PLAIN, "{worker} gave its model back: {bytes}"),
    "left": (PLAIN, "{worker} has left: {why}"),
    "exited": (PLAIN, "pid {pid} ({workers}) has ended: {freed_bytes} free again"),
    "adopted": (PLAIN, "{worker} ({unit}) is under quota now: it holds {held_bytes}"),
    "disowned": (PLAIN, "{worker} goes on without a quota: {freed_bytes} free again"),
    "evicting": (
        PLAIN,
        "{worker} is asked to go{for}: {reason}; {booked_bytes} booked, idle {idle_s}",
    ),
    "evict_cancelled": (PLAIN, "{worker} may stay"),
    "evict_missed": (WARN, "{worker} was asked to go and has not gone in time"),
    "refused": (WARN, "{worker} was refused {asked_bytes} to {what}: {why}{times}"),
    "revoked": (
        BAD,
        "{worker} holds {measured_bytes}{excess}, may hold {limit_bytes}: told to stop",
    ),
    "complied": (GOOD, "{worker} is within {limit_bytes} again, after {after_s}"),
    "stopped": (
        BAD,
        "{worker} was stopped ({fence}): it held {measured_bytes} of {limit_bytes}{excess}; "
        "gone {seen_to_gone_s} after it was seen",
    ),
    "unkillable": (BAD, "{worker} (pid {pid}) is still there {after_s} after SIGKILL"),
    "orphaned": (
        WARN,
        "pid {pid} of {worker} has ended and its children hold memory: they are stopped",
    ),
    "leaked": (WARN, "{worker} forgot to give back {bytes}"),
    "leaking": (WARN, "{worker} said it gave its memory back and keeps {held_bytes}"),
    "lease_expired": (WARN, "a lease of {worker} ended by its deadline: {bytes}"),
    "init_lock_expired": (WARN, "{worker} held the init mutex for too long"),
    "prediction_exceeded": (
        WARN,
        "a forward of {worker} took {took_bytes}, {predicted_bytes} predicted",
    ),
    "migrated": (
        WARN,
        "pages of {worker} moved: {swapped_bytes} in swap, {evicted_bytes} out of the GPU's memory",
    ),
    "quota_set": (PLAIN, "{worker} may hold {quota_bytes} now, it was {was_bytes}"),
    "pinned": (PLAIN, "{worker} is pinned: never evicted for another model"),
    "unpinned": (PLAIN, "{worker} is not pinned any more"),
    "drained": (WARN, "no load begins from now on (uid {uid})"),
    "resumed": (GOOD, "loads may begin again (uid {uid})"),
    "reloaded": (PLAIN, "the configuration was read again"),
    "shrinking": (
        WARN,
        "all workers are asked to shrink: {free_bytes} free of {reserve_bytes}",
    ),
    "admission_closed": (
        BAD,
        "the machine is below its reserve: {free_bytes} free of {reserve_bytes}; "
        "nothing is granted",
    ),
    "admission_opened": (GOOD, "the reserve is free again: {free_bytes}"),
    "oom_kill": (BAD, "the kernel's OOM killer was here before umad: {count} killed"),
    "fragmentation_risk": (WARN, "free memory lies in crumbs: {reason}"),
}
_FENCES: Final = {
    "return": "its memory was taken back",
    "revoke": "it ended when it was told to",
    "exit": "it has ended",
}
_ASKED_FOR: Final = {"reserve": "load", "admit": "answer a request", "init_lock": "load"}
_UNTOLD: Final = frozenset({"seq", "name", "unix_s", "level"})


class _Fields(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return "?"


def in_words(event: Event) -> tuple[str, str]:
    """(tone, sentence) of an event: the tone is "", "good", "warn" or "bad".

    Args:
        event: as ``events`` of the protocol answers it.
    """
    name = str(event.get("name", "?"))
    fields = _Fields((key, shown(key, value)) for key, value in event.items() if value is not None)
    tone, sentence = _SENTENCES.get(name, (PLAIN, ""))
    if sentence:
        times = event.get("times", 1)
        fields |= {
            "what": _ASKED_FOR.get(fields["what"], fields["what"]),
            "fence": _FENCES.get(fields["fence"], fields["fence"]),
            "excess": _excess(event.get("measured_bytes"), event.get("limit_bytes")),
            "for": f" for {fields['for_worker']}" if event.get("for_worker") else "",
            "times": f" ({times} times)" if isinstance(times, int) and times > 1 else "",
        }
        text = sentence.format_map(fields)
    else:
        rest = [
            f"{_word(key)} {value}"
            for key, value in fields.items()
            if key not in _UNTOLD and value != ""
        ]
        text = ": ".join([name.replace("_", " "), *([", ".join(rest)] if rest else [])])
    return tone, printable(text[:TEXT_MAX])


def _excess(held: object, limit: object) -> str:
    return format_excess(held, limit) if isinstance(held, int) and isinstance(limit, int) else ""


def _word(key: str) -> str:
    return key.removesuffix("_bytes").removesuffix("_s").replace("_", " ")
