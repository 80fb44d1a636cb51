"""An example: a proxy that has prompts computed by one engine, and answered by another one.

    python docs/examples/prefill_decode_proxy.py --port 8000 \\
        --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

It asks a prefill engine for one token, then a decode engine for the answer, each in turn. The
decode engine finds the prompt's KV in the cache. If the prefill engine fails, the decode engine
computes. With `--says llm-d` or `--says vllm` both learn of each other as from those routers; with
`--says nothing`, the default, they know from their roles.

A proxy for use belongs to the router: see docs/prefill-decode.md.
"""

from __future__ import annotations

import argparse
import itertools
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

PREFILL_S = 60.0
ANSWER_S = 3600.0


def create_app(prefill: list[str], decode: list[str], says: str) -> FastAPI:
    """Return the proxy's app.

    Args:
        prefill: Base URLs of the engines that compute prompts.
        decode: Base URLs of the engines that answer.
        says: What the engines are told of each other: `nothing`, `llm-d` or `vllm`.
    """
    prefill_turns, decode_turns = itertools.cycle(prefill), itertools.cycle(decode)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with httpx.AsyncClient(timeout=ANSWER_S) as client:
            app.state.client = client
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> StreamingResponse:
        client: httpx.AsyncClient = request.app.state.client
        body: dict[str, Any] = await request.json()
        path, computing = request.url.path, next(prefill_turns)
        params = await prefilled(client, computing + path, body, says)
        told = body if params is None else body | {"kv_transfer_params": params}
        sent = client.build_request("POST", next(decode_turns) + path, json=told)
        answer = await client.send(sent, stream=True)

        async def passed_on() -> AsyncIterator[bytes]:
            try:
                async for part in answer.aiter_raw():
                    yield part
            finally:
                await answer.aclose()

        kind = answer.headers.get("content-type")
        return StreamingResponse(passed_on(), answer.status_code, media_type=kind)

    return app


async def prefilled(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], says: str
) -> dict[str, Any] | None:
    """Have a prompt computed; return what the engine that answers is told of that."""
    asked = {name: value for name, value in body.items() if name != "stream_options"}
    asked |= {"max_tokens": 1, "stream": False}
    if "max_completion_tokens" in body:
        asked["max_completion_tokens"] = 1
    name = {"kv_request_id": str(uuid.uuid4())}
    if says == "vllm":
        asked["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False}
    elif says == "llm-d":
        asked["kv_transfer_params"] = {"remote_decoder": name}
    began = time.monotonic()
    try:
        answer = await client.post(url, json=asked, timeout=PREFILL_S)
        answer.raise_for_status()
    except httpx.HTTPError as exc:
        print(f"not computed before it is answered: {exc!r}", flush=True)
        return None
    print(f"prefilled in {time.monotonic() - began:.3f} s", flush=True)
    if says == "vllm":
        params: dict[str, Any] | None = answer.json().get("kv_transfer_params")
        return params
    if says == "llm-d":
        return {"remote_prefiller": name | {"remote_host": urlsplit(url).hostname}}
    return None


def main() -> None:
    """Serve on loopback."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", action="append", required=True, metavar="URL")
    parser.add_argument("--decode", action="append", required=True, metavar="URL")
    parser.add_argument("--says", choices=["nothing", "llm-d", "vllm"], default="nothing")
    options = parser.parse_args()
    app = create_app(options.prefill, options.decode, options.says)
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
