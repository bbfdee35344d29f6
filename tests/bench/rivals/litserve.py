"""LitServe with its dynamic batching: ``python -m tests.bench.rivals.litserve PORT``."""

import sys
from typing import Any

import litserve

from tests.bench.rivals.model import BATCH, WAIT_S, Model


class Embed(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self._model = Model()

    def decode_request(self, request: dict[str, Any]) -> str:
        return str(request["input"])

    def predict(self, texts: list[str]) -> list[list[float]]:
        return self._model(texts)

    def encode_response(self, vector: list[float]) -> dict[str, Any]:
        return {"embedding": vector}


if __name__ == "__main__":
    api = Embed(max_batch_size=BATCH, batch_timeout=WAIT_S, api_path="/embed")
    server = litserve.LitServer(api, accelerator="cpu", timeout=60)
    server.run(
        port=int(sys.argv[1]), host="127.0.0.1", generate_client_file=False, log_level="error"
    )
