"""What one writes in an afternoon: each request alone on a worker thread, behind starlette."""

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.bench.rivals.model import Model

if __name__ == "__main__":
    model, worker = Model(), ThreadPoolExecutor(1)

    async def embed(request: Request) -> JSONResponse:
        text = (await request.json())["input"]
        (vector,) = await asyncio.get_running_loop().run_in_executor(worker, model, [text])
        return JSONResponse({"embedding": vector})

    app = Starlette(routes=[Route("/embed", embed, methods=["POST"])])
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
