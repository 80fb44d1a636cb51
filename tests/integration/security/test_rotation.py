"""Tokens and certificates are replaced while services run and connections stand."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from lmcache_core.errors import AuthenticationError, UnavailableError
from lmcache_core.security import ClientTls
from lmcache_core.wire.client import LmClient

from tests.fixtures.guarded_services import REST_NAMES, TOKENS, Guarded, write_tokens
from tests.fixtures.tls import replace
from tests.fixtures.waiting import until, wait_until
from tests.suites.chunks import make_key

KEY = make_key("rotated", "acme")
STATUS = {
    "lookup": "/v1/stats",
    "broker": "/v1/stats",
    "storage": "/v1/stats",
    "sidecar": "/v1/status",
}


def is_served(guarded: Guarded, name: str, token: str, tls: ClientTls | None = None) -> bool:
    """Return whether a new connection is served to the holder of this token."""
    try:
        with guarded.rest(name, TOKENS.get(token, token), tls) as client:
            return client.get(STATUS[name]).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def restored(guarded: Guarded) -> Iterator[Guarded]:
    files = [
        guarded.server.cert,
        guarded.server.key,
        guarded.pod.cert,
        guarded.pod.key,
        guarded.authority.file,
    ]
    before = {path: path.read_bytes() for path in files}
    yield guarded
    for path, data in before.items():
        replace(path, data)
    write_tokens(guarded.tokens_file, TOKENS)
    replace(guarded.directory / "service-token", TOKENS["acme-service"].encode())
    wait_until(lambda: all(is_served(guarded, name, "acme") for name in REST_NAMES))


async def test_an_old_token_ends_on_every_port_and_a_new_one_begins(restored: Guarded) -> None:
    old, new = TOKENS["acme"], "acme-client-that-came-later"
    kept, gone = (
        restored.rest("lookup", TOKENS["rival"]),
        {name: restored.rest(name, old) for name in REST_NAMES},
    )
    standing = {name: restored.lm(name, old) for name in ("storage", "sidecar")}
    for client in standing.values():
        assert await client.contains([KEY]) == [False]
    for name, client in gone.items():
        assert client.get(STATUS[name]).status_code == 200
    write_tokens(
        restored.tokens_file,
        {**TOKENS, "acme": new, "acme-service": "acme-service-that-came-later"},
    )
    replace(restored.directory / "service-token", b"acme-service-that-came-later\n")
    for name, client in gone.items():
        await until(lambda name=name, client=client: client.get(STATUS[name]).status_code == 401)
    for lm in standing.values():
        await until(lambda lm=lm: is_refused(lm))
    assert kept.get("/v1/stats").status_code == 200, "the other tokens stay valid"
    for name in REST_NAMES:
        assert is_served(restored, name, new)
    for name in standing:
        client = restored.lm(name, new)
        assert await client.contains([KEY]) == [False]
        await client.close()
    with restored.rest("sidecar", new) as client:  # It shows lookup and broker its new token.
        wait_until(
            lambda: (
                client.get("/readyz").json()["checks"]["lookup-and-broker"]["detail"]
                == "registered"
            )
        )
    for client in (*gone.values(), kept):
        client.close()
    for lm in standing.values():
        await lm.close()


async def is_refused(lm: LmClient) -> bool:
    try:
        await lm.contains([KEY])
    except (AuthenticationError, UnavailableError):
        return True
    return False


async def test_an_invalid_token_file_leaves_the_last_valid_one_in_force(restored: Guarded) -> None:
    replace(restored.tokens_file, b"tokens: [{name: x, token: acme-client-0123456789-spoilt")
    for name in REST_NAMES:
        service = restored.services[name]
        await until(lambda service=service: "line 1 is not YAML" in service.output)
        assert is_served(restored, name, "acme")


async def test_new_certificates_apply_to_new_connections(restored: Guarded) -> None:
    before = restored.tls
    standing, lm = (
        {name: restored.rest(name, TOKENS["acme"], before) for name in REST_NAMES},
        restored.lm("storage", TOKENS["acme"]),
    )
    for name, client in standing.items():
        assert client.get(STATUS[name]).status_code == 200
    await lm.ping()
    restored.stranger.publish(restored.authority.file)
    restored.stranger.renew(restored.server)
    restored.stranger.renew(restored.pod, "pod.example")
    for name, client in standing.items():
        await until(lambda name=name: is_served(restored, name, "acme", restored.tls))
        assert client.get(STATUS[name]).status_code == 200, "the connection stands"
        client.close()
    await lm.ping()
    fresh_lm = restored.lm("storage", TOKENS["acme"])
    await fresh_lm.ping()
    for client in (lm, fresh_lm):
        await client.close()
    with restored.rest("sidecar", TOKENS["acme"]) as rest:
        wait_until(
            lambda: (
                rest.get("/readyz").json()["checks"]["lookup-and-broker"]["detail"] == "registered"
            )
        )
