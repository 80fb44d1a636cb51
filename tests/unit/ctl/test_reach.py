"""What services are asked, and what strange answers become."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import msgspec
import pytest
from lmcache_ctl import asking
from lmcache_ctl.asking import Asker, Caller
from lmcache_ctl.errors import CtlError
from lmcache_ctl.kube import pods
from lmcache_ctl.options import CtlSettings
from lmcache_ctl.reach import Reach
from lmcache_ctl.services import Endpoint, Kind

from tests.fixtures.http_server import Handler, served

ANSWERS = {
    "/fine": (200, b'{"a": 1}'),
    "/problem": (409, b'{"title": "No", "detail": "an engine must have connected"}'),
    "/bare": (403, b'{"title": "Not you"}'),
    "/invalid": (
        422,
        (
            b'{"title": "No", "errors": [{"at": "body.a.0", "message": "not so"}, {"at": "body.b",'
            b' "message": "nor so"}]}'
        ),
    ),
    "/strange": (422, b'{"title": "No", "errors": [7]}'),
    "/html": (200, b"<html>"),
    "/list": (200, b"[1]"),
    "/long": (200, b'{"a": "' + b"x" * 100_000 + b'"}'),
}


class Service(Handler):
    """Answers with what the path says."""

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers.get("content-length", "0")))
        if self.path == "/echo":
            said = {"token": self.headers.get("authorization"), "body": json.loads(sent)}
            self.answer(200, said)
        else:
            self.answer(*ANSWERS[self.path])


@pytest.fixture
def url() -> Iterator[str]:
    with served(Service) as url:
        yield url


def ask(url: str, path: str, body: Any = None, **settings: Any) -> dict[str, Any]:
    return Reach(CtlSettings(sidecar_urls=[url], **settings), Kind.SIDECAR).ask("POST", path, body)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/problem", "^http://[^ ]+: an engine must have connected"),
        ("/bare", "^http://[^ ]+: Not you"),
        ("/invalid", "^http://[^ ]+: body.a.0: not so; body.b: nor so"),
        ("/strange", "^http://[^ ]+: No"),
        ("/html", "its answer is not JSON"),
        ("/list", "something else than an object"),
        ("/long", "more than 50000 bytes"),
    ],
)
def test_other_answers_are_reported(
    url: str, path: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "MAX_ANSWER_BYTES", 50_000)
    with pytest.raises(CtlError, match=said):
        ask(url, path, {})


async def test_a_request_that_cannot_be_written_shows_no_token() -> None:
    """The HTTP library quotes the header that it refuses, and the header holds the token."""

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def question(caller: Caller) -> object:
        return await caller.get("/readyz")

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(CtlError, match="not valid HTTP") as caught:
            await Asker(CtlSettings()).one(
                Endpoint(Kind.STORAGE, "s", url, token="s3cret\nX"), question
            )
    assert "s3cret" not in str(caught.value)


class Cluster:
    """Two namespaces, each with one sidecar that calls itself one of ours; only the first has a
    Secret that holds an operator's token.
    """

    def __init__(self, settings: CtlSettings) -> None:
        self.namespace = settings.namespace
        self.place = self.how_to_look_elsewhere = ""
        self.core = SimpleNamespace(
            list_pod_for_all_namespaces=None, list_namespaced_pod=None, read_namespaced_secret=None
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def list(self, _method: object, _what: str, _selector: str) -> list[Any]:
        source = SimpleNamespace(
            secret=SimpleNamespace(name="auth", items=[SimpleNamespace(key=pods.TOKENS_KEY)])
        )
        volume = SimpleNamespace(projected=SimpleNamespace(sources=[source]))
        container = SimpleNamespace(name="sidecar", ports=None)
        return [
            SimpleNamespace(
                metadata=SimpleNamespace(name=f"pod-{name}", namespace=name, labels={}),
                status=SimpleNamespace(phase="Running"),
                spec=SimpleNamespace(
                    volumes=[volume], init_containers=None, containers=[container]
                ),
            )
            for name in ("ours", "strange")
            if self.namespace in ("", name)
        ]

    def call(self, _what: str, _method: object, secret: str, namespace: str) -> Any:
        assert secret == "auth"
        token = {pods.OPERATOR_KEY: base64.b64encode(b"of-ours").decode()}
        return SimpleNamespace(data=token if namespace == "ours" else {})


@pytest.mark.parametrize("given", ["token", "token_file"])
def test_pods_of_all_namespaces_are_not_sent_the_callers_token(
    given: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("of-the-caller")
    settings = CtlSettings(
        **{given: tmp_path / "token" if given == "token_file" else "of-the-caller"}
    )
    monkeypatch.setattr(pods, "KubeApi", Cluster)
    monkeypatch.setattr(pods, "PodPort", lambda *_: contextlib.nullcontext())
    everywhere = Reach(settings, Kind.SIDECAR, everywhere=True)
    with everywhere.services() as services:
        here = [msgspec.structs.replace(one, url=url, socket_path=None) for one in services]
        said = asyncio.run(
            Asker(settings).each(here, lambda caller: caller.ask("POST", "/echo", {}))
        )
    sent = {one.namespace: answer["token"] for one, answer in zip(here, said, strict=True)}
    assert sent == {"ours": "Bearer of-ours", "strange": None}
    for place in everywhere.namespaces():
        with Reach(place, Kind.SIDECAR).services() as [service]:
            assert service.token == ("of-ours" if place.namespace == "ours" else None)
            assert service.token_hint.startswith("; -A does not send it: name the --namespace")
