"""Every port of every service: without credentials, with another tenant's, with an expired
ticket, with no or the wrong certificate.
"""

from __future__ import annotations

import ssl

import httpx
import pytest
from lmcache_core.errors import AuthenticationError, UnavailableError
from lmcache_core.memory import BytesBufferMemoryObj
from lmcache_core.record import Chunk, Miss
from lmcache_core.security import TicketSigner, unix_ms
from lmcache_core.wire.client import LmClient

from tests.fixtures.guarded_services import REST_NAMES, TICKET_KEYS, TOKENS, Guarded
from tests.fixtures.tls import client_tls
from tests.fixtures.waiting import wait_until
from tests.suites.chunks import make_chunk, make_key, make_record

LM_NAMES = ("storage", "sidecar")
CHUNK = make_key("guarded", "acme")
CHUNK_ID = CHUNK.key.chunk_id().hex()
CALLS: dict[str, list[tuple[str, str, object]]] = {
    "lookup": [
        ("POST", "/v1/lookup", {"chunk_ids": [CHUNK_ID]}),
        ("GET", "/v1/instances", None),
        ("POST", "/v1/admin/clear", None),
    ],
    "broker": [
        ("GET", "/v1/peers", None),
        ("POST", "/v1/transfers", {"requester": "a", "chunks": []}),
        ("POST", "/v1/admin/peers/a:drain", None),
        ("GET", "/v1/overview", None),
    ],
    "storage": [
        ("GET", f"/v1/chunks/{CHUNK.key.to_url()}", None),
        ("DELETE", f"/v1/chunks/{CHUNK.key.to_url()}", None),
        ("POST", "/v1/chunks:contains", {"keys": [CHUNK.key.to_url()]}),
        ("POST", "/v1/admin/clear", {"all_tenants": True}),
    ],
    "sidecar": [
        ("GET", "/v1/status", None),
        ("POST", "/v1/admin/clear", None),
        ("POST", "/v1/admin/drain", None),
        ("POST", "/v1/admin/explain", {"token_ids": [1]}),
    ],
}


def allocate(num_bytes: int) -> BytesBufferMemoryObj:
    return BytesBufferMemoryObj(bytearray(num_bytes))


def ticket(
    *,
    instance: str = "sidecar-0",
    requester: str = "test",
    tenant: str = "acme",
    ttl_ms: int = 60_000,
    keys: object = None,
) -> str:
    signer = TicketSigner(keys or TICKET_KEYS)  # type: ignore[arg-type]
    return signer.sign(
        instance=instance, requester=requester, tenant=tenant, expires_unix_ms=unix_ms() + ttl_ms
    )


def test_the_brokers_page_is_open_and_the_same_for_all(guarded: Guarded) -> None:
    """A browser shows no token when it asks for a page; the page asks for one itself."""
    with (
        guarded.rest("broker", TOKENS["operator"]) as operator,
        guarded.rest("broker") as anonymous,
    ):
        for path in ("/", "/page/app.js"):
            shown = anonymous.get(path)
            assert shown.status_code == 200
            assert shown.content == operator.get(path).content
            assert b"sidecar-0" not in shown.content
        assert {
            anonymous.request(method, "/").status_code for method in ("POST", "PUT", "DELETE")
        } == {405}
    health = f"http://127.0.0.1:{guarded.services['broker'].ports['health_port']}"
    assert [
        httpx.get(health + path, trust_env=False).status_code for path in ("/", "/page/app.js")
    ] == [404, 404]


@pytest.mark.parametrize("name", REST_NAMES)
def test_rest_without_encryption_or_certificate(guarded: Guarded, name: str) -> None:
    nameless, foreign = (
        client_tls(guarded.authority),
        client_tls(guarded.authority, guarded.stranger.sign("foreign", "pod.example")),
    )
    for tls in (nameless, foreign):
        with (
            guarded.rest(name, TOKENS["operator"], tls) as client,
            pytest.raises((httpx.TransportError, ssl.SSLError)),
        ):
            client.get("/healthz")
    with guarded.rest(name, scheme="http") as client, pytest.raises(httpx.TransportError):
        client.get("/healthz")
    with (
        guarded.rest(name, tls=client_tls(guarded.stranger, guarded.pod)) as client,
        pytest.raises(httpx.ConnectError),
    ):
        client.get("/healthz")
    with guarded.rest(name) as client:
        assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize("name", REST_NAMES)
def test_a_kubelet_needs_no_certificate(guarded: Guarded, name: str) -> None:
    url = f"http://127.0.0.1:{guarded.services[name].ports['health_port']}"
    assert [
        httpx.get(url + path, trust_env=False).status_code
        for path in ("/healthz", "/readyz", "/metrics")
    ] == [200, 200, 200]
    assert [httpx.get(url + path, trust_env=False).status_code for _, path, _ in CALLS[name]] == [
        404
    ] * len(CALLS[name])


def test_the_services_reach_one_another(guarded: Guarded) -> None:
    with guarded.rest("sidecar", TOKENS["acme"]) as client:
        wait_until(
            lambda: (
                client.get("/readyz").json()["checks"]["lookup-and-broker"]["detail"]
                == "registered"
            )
        )
    with guarded.rest("broker", TOKENS["operator"]) as client:
        wait_until(lambda: len(client.get("/v1/peers").json()["peers"]) == 2)
        assert all(
            peer["distributed_url"].startswith("lm+tls://127.0.0.1:")
            for peer in client.get("/v1/peers").json()["peers"]
        )


def test_tenants_do_not_see_one_another(guarded: Guarded) -> None:
    """The token alone names the namespace, at lookup, broker and storage."""
    path = f"/v1/chunks/{CHUNK.key.to_url()}"
    with (
        guarded.rest("storage", TOKENS["acme"]) as acme,
        guarded.rest("storage", TOKENS["rival"]) as rival,
    ):
        assert acme.put(path, content=make_record("guarded")).status_code in (201, 204)
        assert rival.get(path).status_code == 404
        assert rival.head(path).status_code == 404
        assert rival.delete(path).status_code == 404
        assert rival.post("/v1/chunks:contains", json={"keys": [CHUNK.key.to_url()]}).json() == {
            "present": [False]
        }
        assert rival.get("/v1/chunks").json()["chunks"] == []
        assert acme.get(path).content == make_record("guarded")
    with (
        guarded.rest("lookup", TOKENS["acme"]) as acme,
        guarded.rest("lookup", TOKENS["rival"]) as rival,
    ):
        question = {"chunk_ids": [CHUNK_ID]}
        wait_until(lambda: acme.post("/v1/lookup", json=question).json()["num_prefix"] == 1)
        assert rival.post("/v1/lookup", json=question).json()["num_prefix"] == 0
        assert "storage-0" not in rival.get("/v1/instances").text
        assert rival.delete("/v1/instances/storage-0").status_code == 204
        assert acme.post("/v1/lookup", json=question).json()["num_prefix"] == 1
    with (
        guarded.rest("broker", TOKENS["acme"]) as acme,
        guarded.rest("broker", TOKENS["rival"]) as rival,
    ):
        announced = {"incarnation": 1, "distributed_url": "lm+tls://127.0.0.1:1"}
        assert rival.put("/v1/peers/rival-0", json=announced).status_code == 200
        assert "rival-0" not in acme.get("/v1/peers").text


@pytest.mark.parametrize("name", LM_NAMES)
async def test_lm_without_credentials(guarded: Guarded, name: str) -> None:
    for token in (None, "an-unknown-token-0123456789"):
        client = guarded.lm(name, token)
        for call in (
            client.contains([CHUNK]),
            client.remove([CHUNK]),
            client.put([make_chunk("guarded")]),
        ):
            with pytest.raises((AuthenticationError, UnavailableError)):
                await call
        await is_not_given(client, None)
        await client.close()


@pytest.mark.parametrize("name", LM_NAMES)
async def test_lm_without_encryption_or_certificate(guarded: Guarded, name: str) -> None:
    foreign = guarded.stranger.sign("foreign-lm", "pod.example")
    for tls in (
        client_tls(guarded.authority),
        client_tls(guarded.authority, foreign),
        client_tls(guarded.stranger, guarded.pod),
    ):
        client = guarded.lm(name, TOKENS["acme"], tls)
        with pytest.raises(UnavailableError):
            await client.ping()
        await client.close()
    plain = LmClient("127.0.0.1", guarded.services[name].ports["lm_port"], TOKENS["acme"])
    with pytest.raises(UnavailableError):
        await plain.ping()
    await plain.close()


async def test_lm_with_another_tenants_token(guarded: Guarded) -> None:
    acme, rival = guarded.lm("storage", TOKENS["acme"]), guarded.lm("storage", TOKENS["rival"])
    assert await acme.put([make_chunk("guarded", tenant="acme")]) == [True]
    assert await rival.contains([CHUNK]) == [False]
    assert await rival.remove([CHUNK]) == 0
    await is_not_given(rival, None)
    assert await acme.contains([CHUNK]) == [True]
    intruder = guarded.lm("sidecar", TOKENS["rival"])
    assert await intruder.put([make_chunk("guarded")]) == [False], (
        "a sidecar takes chunks of its own tenant only"
    )
    assert await intruder.contains([CHUNK]) == [False]
    for client in (acme, rival, intruder):
        await client.close()


async def test_lm_with_tickets(guarded: Guarded) -> None:
    """The sidecar holds a chunk of acme's; a peer without a token gets it by a good ticket, and
    by no other.
    """
    handing_over = guarded.lm("sidecar", TOKENS["acme-service"])
    assert await handing_over.put([make_chunk("guarded", tenant="acme")]) == [True]
    await handing_over.close()
    peer = guarded.lm("sidecar")
    (got,) = await peer.get([CHUNK], allocate, ticket=ticket())
    assert isinstance(got, Chunk)
    got.release()
    for bad in (
        ticket(ttl_ms=-10_000),
        ticket(instance="sidecar-1"),
        ticket(requester="another-peer"),
        ticket(keys={"k1": b"another secret of 32 bytes......"}),
        ticket()[:-4] + "AAAA",
        "v1.x.y",
        None,
    ):
        await is_not_given(peer, bad)
    (other,) = await peer.get([CHUNK], allocate, ticket=ticket(tenant="rival"))
    assert isinstance(other, Miss), "a ticket opens the namespace that it names"
    await peer.close()


async def is_not_given(client: LmClient, shown: str | None) -> None:
    try:
        (got,) = await client.get([CHUNK], allocate, ticket=shown)
    except (AuthenticationError, UnavailableError):
        return
    assert isinstance(got, Miss)
