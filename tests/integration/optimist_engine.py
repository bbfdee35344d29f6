"""An engine that takes every forward for a small one.

What its predictions let in does not fit, so that the guard has to refuse it:
``python -m tests.integration.optimist_engine``.
"""

import sys

from umad.core.cost import CostModel
from umad.serve import engine

MIB = 1 << 20

if __name__ == "__main__":
    CostModel.predict = lambda *_, **__: MIB  # type: ignore[method-assign]
    sys.exit(engine.main())
