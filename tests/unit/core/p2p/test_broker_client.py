import asyncio
import gzip
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import msgspec
import pytest
from lmcache_core.errors import ConfigError, UnavailableError
from lmcache_core.lookup import MAX_HOLDERS_PER_CHUNK
from lmcache_core.p2p import Assignment, BrokerClient, CopyOrder, DrainReport, HeldBy, Lease, Peer
from lmcache_core.p2p.messages import MAX_CHUNKS_PER_TRANSFER, Renewal
from lmcache_core.wire import json_http as module

URL = "http://broker:8082"
PEER = Peer(id="a", incarnation=3, distributed_url="lm://10.0.0.1:65433", zone="z", node="n")
ONE, TWO = b"\1" * 16, b"\2" * 16
Handler = Callable[[httpx.Request], httpx.Response]


async def opened(handler: Handler, token: str | None = None) -> BrokerClient:
    client = BrokerClient(URL, token, 30.0, transport=httpx.MockTransport(handler))
    await client.open()
    return client


def raw(content: bytes, status: int = 200) -> httpx.Response:
    """An answer that is still to be read, as from a socket."""
    return httpx.Response(status, stream=httpx.ByteStream(content))


def answer(body: Any, status: int = 200) -> Handler:
    return lambda request: raw(msgspec.json.encode(body), status)


def noting(seen: list[Any], body: bytes, status: int = 200) -> Handler:
    """Answers so, and notes the path and the body of each request."""

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append((request.url.path, msgspec.json.decode(request.content)))
        return raw(body, status)

    return handler


def granted(*assignments: dict[str, Any]) -> Handler:
    full = [
        {"distributed_url": "lm://10.0.0.2:1", "ticket": "v1.x.y", "expires_ms": 1_700_000_000_000}
        | a
        for a in assignments
    ]
    return answer({"assignments": full, "unassigned": []})


async def test_register_sends_what_the_protocol_names() -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return raw(b'{"ttl_ms": 9000, "draining": true, "from_a_newer_version": 1}')

    client = await opened(handler, token="secret-token")
    assert await client.register(PEER, load=7.0, ttl_ms=15_000) == Lease(9000, True)
    (request,) = seen
    assert (request.method, str(request.url)) == ("PUT", f"{URL}/v1/peers/a")
    assert request.headers["authorization"] == "Bearer secret-token"
    assert request.headers["accept-encoding"] == "identity"
    assert msgspec.json.decode(request.content) == {
        "incarnation": 3,
        "distributed_url": "lm://10.0.0.1:65433",
        "kind": "sidecar",
        "zone": "z",
        "node": "n",
        "load": 1.0,
        "ttl_ms": 15_000,
        "draining": False,
    }
    await client.close()


async def test_transfers_are_assigned() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert msgspec.json.decode(request.content) == {
            "requester": "me",
            "chunks": [
                {"chunk_id": ONE.hex(), "holders": ["b", "c"], "tiers": ["memory", "disk"]},
                {"chunk_id": TWO.hex(), "holders": ["c"]},
            ],
            "wait_ms": 250,
        }
        return granted({"instance": "c", "chunk_ids": [TWO.hex(), ONE.hex()]})(request)

    client = await opened(handler)
    assert await client.transfers("me", []) == [], "nothing is asked"
    wanted = [(ONE, [HeldBy("b", "memory"), HeldBy("c", "disk")]), (TWO, ["c"])]
    found = await client.transfers("me", wanted, wait_ms=250)
    assert found == [
        Assignment("c", "lm://10.0.0.2:1", [TWO.hex(), ONE.hex()], "v1.x.y", 1_700_000_000_000)
    ]
    assert "v1.x.y" not in repr(found)


@pytest.mark.parametrize(
    "assignments",
    [
        [{"instance": "b", "chunk_ids": [ONE.hex()]}, {"instance": "c", "chunk_ids": [ONE.hex()]}],
        [{"instance": "b", "chunk_ids": [ONE.hex(), ONE.hex()]}],
        [{"instance": "stranger", "chunk_ids": [ONE.hex()]}],
        [{"instance": "me", "chunk_ids": [ONE.hex()]}],
        [{"instance": "b", "chunk_ids": ["ff" * 16]}],
        [{"instance": "b", "chunk_ids": ["zz"]}],
        [{"instance": "b", "chunk_ids": []}],
        [{"instance": "b", "chunk_ids": [ONE.hex()], "distributed_url": "http://10.0.0.2:1"}],
        [{"instance": "b", "chunk_ids": [ONE.hex()], "ticket": "x" * 5000}],
        [{"instance": "b", "chunk_ids": [ONE.hex()], "expires_ms": -1}],
    ],
)
async def test_impossible_assignments_are_refused(assignments: list[dict[str, Any]]) -> None:
    client = await opened(granted(*assignments))
    with pytest.raises(UnavailableError, match="unusable answer"):
        await client.transfers("me", [(ONE, ["b", "c", "me"])])


COPY = {"chunk_id": ONE.hex() + "\n", "instance": "b", "distributed_url": "lm://b:1"}


@pytest.mark.parametrize(
    "body",
    [
        b"null",
        b"{}",
        b'{"ttl_ms": 0, "draining": false}',
        b'{"ttl_ms": "1", "draining": false}',
        b"\xff\xfe",
        b"[" * 5000,
        msgspec.json.encode({"ttl_ms": 1, "draining": True, "copies": [COPY]}),
    ],
)
async def test_malformed_lease_is_refused(body: bytes) -> None:
    client = await opened(lambda request: raw(body))
    with pytest.raises(UnavailableError, match="unusable answer"):
        await client.register(PEER, load=0.0, ttl_ms=1000)


async def test_peer_is_deregistered_even_if_it_is_gone_and_drained_by_name() -> None:
    seen: list[str] = []
    status = 404

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(f"{request.method} {request.url.path}")
        return raw(b"", status)

    client = await opened(handler)
    await client.deregister("a")
    status = 403
    with pytest.raises(UnavailableError):
        await client.deregister("a")
    status = 204
    await client.drain("a")
    assert seen == ["DELETE /v1/peers/a"] * 2 + ["POST /v1/admin/peers/a:drain"]


def all_request_errors(
    base: type[httpx.RequestError] = httpx.RequestError,
) -> list[type[httpx.RequestError]]:
    return [base] + [found for sub in base.__subclasses__() for found in all_request_errors(sub)]


@pytest.mark.parametrize("error", all_request_errors())
async def test_every_failure_of_the_http_library_is_mapped(error: type[httpx.RequestError]) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise error("broken", request=request)

    client = await opened(handler)
    with pytest.raises(UnavailableError, match=error.__name__):
        await client.peers()


@pytest.mark.virtual_time
async def test_call_ends_at_its_deadline_though_bytes_keep_dripping() -> None:
    async def drip() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(0.1)

    client = await opened(lambda request: httpx.Response(200, content=drip()))
    with pytest.raises(UnavailableError, match="TimeoutError"):
        await client.peers()


async def test_endless_body_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_RESPONSE_BYTES", 1000)

    async def flood() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 100

    client = await opened(lambda request: httpx.Response(200, content=flood()))
    with pytest.raises(UnavailableError, match="longer than"):
        await client.peers()


async def test_compressed_body_is_not_inflated() -> None:
    packed = gzip.compress(b'{"peers": []}')
    client = await opened(
        lambda request: httpx.Response(
            200, stream=httpx.ByteStream(packed), headers={"content-encoding": "gzip"}
        )
    )
    with pytest.raises(UnavailableError, match="unusable"):
        await client.peers()


@pytest.mark.parametrize(
    "url", ["broker:8082", "ftp://broker", "http://", "http://me:secret@broker", "http://broker/?x"]
)
def test_malformed_url_is_a_config_error_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match="broker URL") as error:
        BrokerClient(url, None, 1.0)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "changed", [{"id": "../admin"}, {"distributed_url": "lm://u:p@a:1"}, {"incarnation": -1}]
)
def test_malformed_peer_is_refused(changed: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"id": "a", "incarnation": 0, "distributed_url": "lm://a:1"}
    with pytest.raises(ValueError):
        Peer(**fields | changed)


async def test_drain_is_reported_and_orders_to_copy_are_read() -> None:
    seen: list[Any] = []
    order = {"chunk_id": ONE.hex(), "instance": "b", "distributed_url": "lm://b:1"}
    body = msgspec.json.encode({"ttl_ms": 1, "draining": True, "copies": [order]})
    client = await opened(noting(seen, body))
    report = DrainReport("done", 3, 1, 1, 1, 0)
    lease = await client.register(PEER, load=0.0, ttl_ms=1, drain=report)
    ((_, sent),) = seen
    assert sent["drain"] == msgspec.to_builtins(report)
    assert lease.copies == (CopyOrder(ONE.hex(), "b", "lm://b:1"),)


async def test_pull_is_renewed_where_the_broker_knows_it() -> None:
    seen: list[Any] = []
    known = {"pull": "p", "ticket": "v1.x.y", "expires_ms": 1_700_000_000_000, "ttl_ms": 5_000}
    body = msgspec.json.encode({"renewed": [known | {"pull": "another"}, known]})
    client = await opened(noting(seen, body))
    renewal = await client.renew("me", "p")
    assert renewal == Renewal("p", "v1.x.y", 1_700_000_000_000, 5_000)
    assert "v1.x.y" not in repr(renewal)
    assert await client.renew("me", "q") is None
    assert seen[0] == ("/v1/transfers:renew", {"requester": "me", "pulls": ["p"]})


async def test_long_request_is_cut_to_its_bounds() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        chunks = msgspec.json.decode(request.content)["chunks"]
        assert len(chunks) == MAX_CHUNKS_PER_TRANSFER
        assert {len(chunk["holders"]) for chunk in chunks} == {MAX_HOLDERS_PER_CHUNK}
        return granted()(request)

    many = [(i.to_bytes(16), ["p"] * 20) for i in range(MAX_CHUNKS_PER_TRANSFER + 1)]
    assert await (await opened(handler)).transfers("me", many) == []
