"""An engine that keeps nothing of prompts, for comparison: ``python -m tests.bench.unkept``."""

import sys

from umad.serve import engine, growing

if __name__ == "__main__":
    growing.KEPT_RATIO = 0.0
    sys.exit(engine.main())
