"""What a sidecar is asked, and what strange answers become."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from lmcache_ctl import rest
from lmcache_ctl.errors import CtlError
from lmcache_ctl.sidecar.rest import STANDARD_INPUT, Sidecar, read_token_ids

ANSWERS = {
    "/fine": (200, b'{"a": 1}'),
    "/problem": (409, b'{"title": "No", "detail": "an engine must have connected"}'),
    "/bare": (403, b'{"title": "Not you"}'),
    "/invalid": (422, b'{"title": "No", "errors": [{"at": "body.a.0", "message": "not so"}, {"at": "body.b", "message": "nor so"}]}'),
    "/strange": (422, b'{"title": "No", "errors": [7]}'),
    "/html": (200, b"<html>"),
    "/list": (200, b"[1]"),
    "/long": (200, b'{"a": "' + b"x" * 100_000 + b'"}'),
}


class Service(BaseHTTPRequestHandler):
    """Answers with what the path says."""

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers.get("content-length", "0")))
        if self.path == "/echo":
            told = {"token": self.headers.get("authorization"), "body": json.loads(sent)}
            self._answer(200, json.dumps(told).encode())
        else:
            self._answer(*ANSWERS[self.path])

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Service)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_question_and_the_token_get_there(url: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    asked: dict[str, Any] = {"token_ids": [1, 2]}
    assert Sidecar(url + "/", tmp_path / "token").ask("POST", "/echo", asked) == {"token": "Bearer s3cret", "body": asked}
    assert Sidecar(url, None).ask("POST", "/fine") == {"a": 1}


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/problem", "answered 409: an engine must have connected"),
        ("/bare", "answered 403: Not you"),
        ("/invalid", "answered 422: body.a.0: not so; body.b: nor so"),
        ("/strange", "answered 422: No"),
        ("/html", "is that the REST port of a sidecar"),
        ("/list", "is that the REST port of a sidecar"),
        ("/long", "more than 50000 bytes"),
    ],
)
def test_other_answers_are_told(url: str, path: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest, "MAX_ANSWER_BYTES", 50_000)
    with pytest.raises(CtlError, match=told):
        Sidecar(url, None).ask("POST", path)


@pytest.mark.parametrize("text", ["1 2\n3\n", "[1, 2, 3]", "1,2,3", " [1,\n2 , 3]\n"])
def test_token_ids_are_read_as_people_write_them(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokens").write_text(text)
    assert read_token_ids(tmp_path / "tokens") == [1, 2, 3]
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert read_token_ids(STANDARD_INPUT) == [1, 2, 3]


@pytest.mark.parametrize("content", [b"", b"1 -2", b"1 31337x", b"[1, [2]]", b"\xff\xfe", "\u0661".encode()])
def test_what_is_no_token_id_is_refused_and_not_repeated(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_bytes(content)
    with pytest.raises(CtlError) as caught:
        read_token_ids(tmp_path / "tokens")
    assert "31337" not in str(caught.value)
