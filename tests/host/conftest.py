from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.data.machine_tree import lay_out
from umad.host.memory import MachineProbe

Machine = Callable[[str], Path]
Probing = Callable[..., MachineProbe]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Lays a recorded machine out in a folder of its own."""
    return lambda name: lay_out(name, tmp_path / name)


@pytest.fixture
def probing() -> Iterator[Probing]:
    """Makes probes and closes them."""
    probes: list[MachineProbe] = []

    def make(root: Path | str, gpu: str = "auto") -> MachineProbe:
        probes.append(MachineProbe(str(root), gpu))
        return probes[-1]

    yield make
    for probe in probes:
        probe.close()
