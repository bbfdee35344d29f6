"""An engine that is driven by hand, and what its metrics say."""

from prometheus_client.parser import text_string_to_metric_families

from tests.core.drive import Drive
from tests.core.fakes import MB, identity, process
from umad.daemon.metrics import RENDER_EVERY_S, Metrics
from umad.values import AccountFigures, PageFigures

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: bytes) -> Series:
    """Every sample by name and labels; two of the same would be a fault."""
    found: Series = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, key
            found[key] = sample.value
    return found


def value(series: Series, name: str, **labels: str) -> float | None:
    return series.get((name, tuple(sorted(labels.items()))))


def names(series: Series, label: str) -> set[str]:
    return {dict(labels)[label] for _, labels in series if label in dict(labels)}


class Shown:
    """An engine that is driven by hand, and its figures."""

    def __init__(self, drive: Drive) -> None:
        self.drive = drive
        self.guarded: set[int] = set()
        self.metrics = Metrics(drive.engine, self.guarded.__contains__, lambda: drive.now_s)

    def text(self) -> bytes:
        self.drive.now_s += 2 * RENDER_EVERY_S
        return self.metrics.text()

    def series(self) -> Series:
        return parsed(self.text())


def rich(shown: Shown) -> None:
    """Something of everything."""
    drive = shown.drive
    shown.guarded.add(7)
    drive.loaded(7, "greedy", 300 * MB, guard=True)
    drive.loaded(7, "good", 200 * MB, guard=True, instance=1)
    drive.loaded(8, "plain", 100 * MB, guard_off='no "guard": \\ here\n' + "x" * 150)
    drive.refused(8, "reserve", worker=3)
    greedy = AccountFigures(used=400 * MB, peak=450 * MB, refused=3)
    drive.look({7: 500 * MB, 8: None}, accounts={1: greedy})
    gone = AccountFigures(
        used=400 * MB, peak=450 * MB, refused=3, returned=400 * MB, closed=True, swept=True
    )
    drive.now_s += 0.02
    drive.look({7: 100 * MB, 8: None}, accounts={1: gone})
    for action in drive.last:
        if getattr(action, "name", "") == "stopped":
            shown.metrics.stopped(action.fields)
    snapshot = drive.engine.state.snapshot
    assert snapshot is not None
    shown.metrics.looked(snapshot, 0.0002)
    page = PageFigures({0: 50 * MB}, frozenset(), 0)
    drive.engine.found(identity(9), "late", 0, page, process(9, 0), drive.now_s)
