"""BentoML with its adaptive batching: ``bentoml serve tests.bench.rivals.bento:Embed``."""

import bentoml

from tests.bench.rivals.model import BATCH, Model


@bentoml.service(workers=1, traffic={"timeout": 60, "concurrency": 2 * BATCH})
class Embed:
    def __init__(self) -> None:
        self._model = Model()

    @bentoml.api(batchable=True, max_batch_size=BATCH, max_latency_ms=10_000)
    def embed(self, texts: list[str]) -> list[list[float]]:
        return self._model(texts)
