"""Bodies, requests and answers over HTTP, for `lookup.py` and `broker.py`. Frozen: see README.md."""

from __future__ import annotations

import http.client
import http.server
import re
from collections.abc import Callable
from typing import Any

import msgspec

JSON, MSGPACK = "application/json", "application/vnd.msgpack"
TIMEOUT_S = 10.0
Route = tuple[str, str, Callable[..., Any]]


def pack(kind: str, body: Any) -> bytes:
    return msgspec.msgpack.encode(body) if kind == MSGPACK else msgspec.json.encode(body)


def unpack(kind: str, data: bytes) -> Any:
    return msgspec.msgpack.decode(data) if kind.startswith(MSGPACK) else msgspec.json.decode(data)


class Caller:
    """Asks a service at a port of this machine."""

    def __init__(self, port: int, kind: str) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        self.kind = kind

    def ask(self, method: str, path: str, body: Any = None, kind: str | None = None) -> Any:
        kind = kind or self.kind
        data = None if body is None else pack(kind, body)
        self.connection.request(method, path, data, {"accept": kind} | ({} if data is None else {"content-type": kind}))
        response = self.connection.getresponse()
        answer = response.read()
        assert response.status in (200, 204), (method, path, response.status, answer)
        if not answer:
            return None
        assert response.headers["content-type"].startswith(kind), response.headers["content-type"]
        return unpack(kind, answer)


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers by the first of its routes that fits, in JSON, or as the caller likes where `kinds` has more."""

    protocol_version = "HTTP/1.1"
    routes: tuple[Route, ...] = ()
    kinds: tuple[str, ...] = (JSON,)

    def handle_any(self) -> None:
        data = self.rfile.read(int(self.headers.get("content-length") or 0))
        said, wanted = self.headers.get("content-type", JSON), self.headers.get("accept", JSON)
        kind = MSGPACK if MSGPACK in self.kinds and MSGPACK in wanted else JSON
        if data and said not in self.kinds:
            self.tell(415, JSON, {"type": "about:blank", "title": "Unsupported Media Type", "status": 415})
            return
        for method, pattern, answer in self.routes:
            found = re.fullmatch(pattern, self.path)
            if method == self.command and found:
                body = [unpack(said, data)] if data else []
                told = answer(*found.groups(), *body, **({"kind": kind} if MSGPACK in self.kinds else {}))
                self.tell(204 if told is None else 200, kind, told)
                return
        self.tell(404, JSON, {"type": "about:blank", "title": "Not Found", "status": 404})

    do_GET = do_PUT = do_POST = do_DELETE = handle_any

    def tell(self, status: int, kind: str, body: Any) -> None:
        data = b"" if body is None else pack(kind, body)
        self.send_response(status)
        self.send_header("content-type", kind if status < 400 else "application/problem+json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def serve(routes: tuple[Route, ...], kinds: tuple[str, ...] = (JSON,)) -> None:
    """Say the port, and serve."""
    Handler.routes, Handler.kinds = routes, kinds
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()
