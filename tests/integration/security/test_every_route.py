"""Every route of every service, as its OpenAPI document lists them: nothing of a request is read
before its caller is known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.fixtures.guarded_services import REST_NAMES, Guarded

OPEN = {"/healthz", "/readyz", "/metrics"}
BODIES = {
    "application/json": b'{"chunk_ids": [',
    "application/msgpack": b"\xc1",
    "application/vnd.lmcache.record": b"LMKV and no record",
    "text/html": b"<",
}


def operations(guarded: Guarded, name: str) -> Iterator[tuple[str, str]]:
    """Methods and paths, with what no parameter of ours can be in the place of each."""
    with guarded.rest(name) as client:
        document = client.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        for method in methods:
            yield method.upper(), re.sub(r"\{[^}]*\}", "%21%21", path)


@pytest.mark.parametrize("name", REST_NAMES)
@pytest.mark.parametrize("token", [None, "an-unknown-token-0123456789", "é"])
def test_a_stranger_learns_nothing_of_what_a_good_request_would_be(
    guarded: Guarded, name: str, token: str | None
) -> None:
    found = list(operations(guarded, name))
    assert len(found) > len(OPEN) + 4
    assert {path for _, path in found} >= OPEN
    shown = {} if token is None else {b"authorization": b"Bearer " + token.encode()}
    with guarded.rest(name) as client:
        assert client.get("/healthz").status_code == 200, "a probe has no token"
        for method, path in found:
            if path in OPEN | {"/"}:
                continue
            for media_type, body in BODIES.items():
                answer = client.request(
                    method,
                    f"{path}?limit=many&ttl_ms=-1&incarnation=no",
                    content=body,
                    headers={b"content-type": media_type.encode(), **shown},
                )
                assert answer.status_code == 401, (method, path, media_type, answer.text)
                assert answer.headers["www-authenticate"] == "Bearer"
                if method != "HEAD":
                    assert answer.headers["content-type"] == "application/problem+json"
