"""The REST of cache_storage as release 0.1.0 speaks it, from docs/protocols.md. Frozen: see README.md.

`storage_rest.py client PORT` stores and fetches; `storage_rest.py server` serves a dictionary, and first says at which port.
"""

from __future__ import annotations

import base64
import http.client
import http.server
import json
import sys
from typing import Any

from formats import key_of, payload_of, read_head, read_record, record_of

RECORD = "application/vnd.lmcache.record"
TIMEOUT_S = 10.0


def url_key(name: str) -> str:
    return base64.urlsafe_b64encode(key_of(name)).decode().rstrip("=")


def records_in(data: bytes) -> list[bytes]:
    """Records that lie back to back."""
    found = []
    while data:
        _, head, payload_bytes = read_head(data)
        length = len(head) + payload_bytes
        found.append(data[:length])
        data = data[length:]
    return found


def converse(port: int) -> dict[str, Any]:
    """What a client wants of a server; what came of it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)

    def ask(method: str, path: str, body: bytes | None = None, kind: str = RECORD) -> tuple[int, bytes]:
        named = {} if body is None else {"content-type": kind}
        connection.request(method, f"/v1/chunks{path}", body, {"lmcache-accept": "lossless"} | named)
        response = connection.getresponse()
        return response.status, response.read()

    def ask_json(path: str, body: Any) -> tuple[int, bytes]:
        return ask("POST", path, json.dumps(body).encode(), "application/json")

    keys = {name: url_key(name) for name in ("one", "two", "three")}
    damaged = record_of("three")[:-1] + b"?"
    said: dict[str, Any] = {"put": [ask("PUT", f"/{keys[name]}", record_of(name))[0] for name in ("one", "two", "one")]}
    said["damaged"] = ask("PUT", f"/{keys['three']}", damaged)[0]
    said["head"] = [ask("HEAD", f"/{keys[name]}")[0] for name in ("one", "three")]
    status, record = ask("GET", f"/{keys['two']}")
    said["get"] = [status, read_record(record) == (key_of("two"), payload_of("two")), ask("GET", f"/{keys['three']}")[0]]
    status, answer = ask_json(":contains", {"keys": list(keys.values())})
    said["contains"] = [status, json.loads(answer)["present"]]
    status, answer = ask_json(":get", {"keys": [keys["two"], keys["three"], keys["one"]]})
    said["get_many"] = [
        status,
        [read_record(record)[0] == key_of(name) for record, name in zip(records_in(answer), ("two", "one"), strict=True)],
    ]
    said["delete"] = [ask("DELETE", f"/{keys[name]}")[0] for name in ("one", "two", "one")]
    return said


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    records: dict[str, bytes] = {}

    def handle_any(self) -> None:
        path, body = self.path.removeprefix("/v1/chunks"), self.body()
        key = path.removeprefix("/")
        if self.command == "POST":
            keys = json.loads(body)["keys"]
            assert path in (":contains", ":get"), path
            if path == ":contains":
                self.tell(200, json.dumps({"present": [key in self.records for key in keys]}).encode(), "application/json")
            else:
                self.tell(200, b"".join(self.records[key] for key in keys if key in self.records))
        elif self.command == "PUT":
            assert self.headers["content-type"] == RECORD
            name = base64.urlsafe_b64encode(read_record(body)[0]).decode().rstrip("=")
            assert name == key, "the record has another key"
            status = 204 if key in self.records else 201
            self.records[key] = body
            self.tell(status)
        elif key not in self.records:
            self.tell(404)
        elif self.command == "DELETE":
            del self.records[key]
            self.tell(204)
        else:
            self.tell(200, self.records[key])

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any

    def body(self) -> bytes:
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        data = b""
        while length := int(self.rfile.readline().partition(b";")[0], 16):
            data += self.rfile.read(length)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def tell(self, status: int, data: bytes = b"", kind: str = RECORD) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        if status != 204:
            self.send_header("content-length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def main(role: str, *arguments: str) -> None:
    if role == "client":
        print(json.dumps(converse(int(arguments[0]))))
        return
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
