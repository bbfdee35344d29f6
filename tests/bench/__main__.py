"""`make bench`: the figures of the design, each beside its rival in the same run.

python -m tests.bench [KEY...]
"""

import importlib
import sys

KEYS = (
    "rpc",
    "revoke",
    "daemon_cost",
    "burst",
    "load",
    "switch",
    "refuse",
    "return",
    "unload",
    "account",
    "guard_cost",
    "isolation",
    "admission",
    "batching",
    "rivals",
    "overload",
)


def main() -> int:
    wanted = sys.argv[1:] or KEYS
    if unknown := set(wanted) - set(KEYS):
        print(f"no benchmark {', '.join(sorted(unknown))}; there are: {', '.join(KEYS)}")
        return 2
    figures = []
    for key in wanted:
        print(f"# {key}", file=sys.stderr, flush=True)
        figures += importlib.import_module(f"tests.bench.bench_{key}").run()
    for figure in figures:
        print(figure.line())
    return 0


if __name__ == "__main__":
    sys.exit(main())
