"""Ray Serve with its dynamic batching: ``python -m tests.bench.rivals.rayserve PORT FOLDER``."""

import signal
import sys
import threading

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse

from tests.bench.rivals.model import BATCH, WAIT_S, Model


@serve.deployment(max_ongoing_requests=4 * BATCH, ray_actor_options={"num_cpus": 1})
class Embed:
    def __init__(self) -> None:
        self._model = Model()

    @serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=WAIT_S)
    async def _embed(self, texts: list[str]) -> list[list[float]]:
        return self._model(texts)

    async def __call__(self, request: Request) -> JSONResponse:
        text = (await request.json())["input"]
        return JSONResponse({"embedding": await self._embed(text)})


if __name__ == "__main__":
    ending = threading.Event()
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 << 20,
        _temp_dir=sys.argv[2],
        log_to_driver=False,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    serve.run(Embed.bind(), route_prefix="/embed")
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    ending.wait()
    serve.shutdown()
    ray.shutdown()
