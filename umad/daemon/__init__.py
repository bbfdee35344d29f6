"""The shell around core: loop, control socket, effects, logs."""

import sys

# structlog takes rich along where that is installed, for tracebacks that the daemon never prints:
# 3.4 MiB of the 40 it may hold (our measurement, 2026-11).
_absent = sys.modules.setdefault("rich", None) is None  # type: ignore[arg-type]
import structlog as _structlog  # noqa: E402, F401

if _absent:
    del sys.modules["rich"]
