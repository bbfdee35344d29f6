"""Batches of texts that are all there from the start: what a server can only lose from.

Reads a list of texts as JSON, prints the seconds of a text: as they come, and sorted by length.
"""

import json
import sys
import time

from tests.bench.rivals.model import BATCH, Model

if __name__ == "__main__":
    texts, model = json.load(sys.stdin), Model()
    model(texts[: 2 * BATCH])
    took = {}
    for name, ordered in (("unsorted", texts), ("sorted", sorted(texts, key=len))):
        began_s = time.perf_counter()
        for at in range(0, len(ordered), BATCH):
            model(ordered[at : at + BATCH])
        took[name] = (time.perf_counter() - began_s) / len(ordered)
    print(json.dumps(took))
