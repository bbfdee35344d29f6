"""Inside a container: asks the five models without a pause until its input ends.

Prints a line when each has answered, and at the end, when each has answered once more, as JSON
what failed.

    python -m tests.packaging.traffic ADDRESS
"""

import json
import sys

from tests.demo.run import Traffic


def main(address: str) -> None:
    """Keep the models of the demonstration busy."""
    with Traffic(address) as traffic:
        traffic.another_round()
        print("each has answered", flush=True)
        sys.stdin.read()
        traffic.another_round()
    print(json.dumps(traffic.failed))


if __name__ == "__main__":
    main(*sys.argv[1:])
