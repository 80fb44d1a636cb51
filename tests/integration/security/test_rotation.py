"""Tokens and certificates are replaced while services run and connections stand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from lmcache_core.errors import AuthenticationError, UnavailableError
from lmcache_core.security.watched_files import LOOK_INTERVAL_S
from lmcache_servicekit.app import TOKEN_RELOAD_INTERVAL_S

from tests.fixtures.guarded_services import REST_NAMES, TOKENS, Guarded, write_tokens
from tests.fixtures.tls import replace
from tests.integration.security.test_ports import eventually
from tests.suites.chunks import make_key

KEY = make_key("rotated", "acme")
STATUS = {
    "lookup": "/v1/stats",
    "broker": "/v1/stats",
    "storage": "/v1/stats",
    "sidecar": "/v1/status",
}
END_OF_AN_OLD_TOKEN_S = 2 * TOKEN_RELOAD_INTERVAL_S + 3.0
"""On lm://: until the file is read, until the connection asks again, and a margin for a machine
under load.
"""


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
    time.sleep(TOKEN_RELOAD_INTERVAL_S + 0.5)


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
    begin = time.monotonic()
    ended: dict[str, float] = {}
    while len(ended) < len(gone) + len(standing):
        now = time.monotonic() - begin
        assert now < END_OF_AN_OLD_TOKEN_S, f"an old token is still good at others than {ended}"
        for name, client in gone.items():
            if client.get(STATUS[name]).status_code == 401:
                ended.setdefault(name, now)
        for name, lm in standing.items():
            try:
                await lm.contains([KEY])
            except (AuthenticationError, UnavailableError):
                ended.setdefault(f"lm of {name}", now)
        await asyncio.sleep(0.1)
    assert kept.get("/v1/stats").status_code == 200, "the tokens that stayed are as good as before"
    for name in REST_NAMES:
        with restored.rest(name, new) as client:
            assert client.get(STATUS[name]).status_code == 200
    for name in standing:
        client = restored.lm(name, new)
        assert await client.contains([KEY]) == [False]
        await client.close()
    with restored.rest(
        "sidecar", new
    ) as client:  # it shows the new token to lookup and broker by now
        eventually(
            lambda: (
                client.get("/readyz").json()["checks"]["lookup-and-broker"]["detail"]
                == "registered"
            )
        )
    for client in (*gone.values(), kept):
        client.close()
    for lm in standing.values():
        await lm.close()


async def test_a_token_file_that_is_spoilt_leaves_the_last_good_one_in_force(
    restored: Guarded,
) -> None:
    replace(restored.tokens_file, b"tokens: [{name: x, token: acme-client-0123456789-spoilt")
    await asyncio.sleep(TOKEN_RELOAD_INTERVAL_S + 0.5)
    for name in REST_NAMES:
        with restored.rest(name, TOKENS["acme"]) as client:
            assert client.get(STATUS[name]).status_code == 200
    assert "line 1 is not YAML" in restored.output


async def test_new_connections_use_new_certificates_and_standing_ones_go_on(
    restored: Guarded,
) -> None:
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
    await asyncio.sleep(LOOK_INTERVAL_S + 0.2)
    for name, client in standing.items():
        assert client.get(STATUS[name]).status_code == 200, "the connection stands"
        with restored.rest(name, TOKENS["acme"], restored.tls) as fresh:
            assert fresh.get(STATUS[name]).status_code == 200, "of the new authority"
        client.close()
    await lm.ping()
    fresh_lm = restored.lm("storage", TOKENS["acme"])
    await fresh_lm.ping()
    for client in (lm, fresh_lm):
        await client.close()
    with restored.rest("sidecar", TOKENS["acme"]) as rest:
        eventually(
            lambda: (
                rest.get("/readyz").json()["checks"]["lookup-and-broker"]["detail"] == "registered"
            )
        )
