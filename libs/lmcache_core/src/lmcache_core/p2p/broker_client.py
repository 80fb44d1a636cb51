"""The broker's client: one HTTP call a method, bounded in time and size, every failure an `UnavailableError`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, TypeVar

import httpx
import msgspec

from lmcache_core.errors import ConfigError, UnavailableError
from lmcache_core.p2p.distributed_url import parse_distributed_url
from lmcache_core.p2p.messages import (
    CHUNK_ID_BYTES,
    MAX_CHUNKS_PER_TRANSFER,
    MAX_HOLDERS_PER_CHUNK,
    AnnounceRequest,
    Assignment,
    ChunkHolders,
    Lease,
    Peer,
    PeersResponse,
    PeerStatus,
    TransferRequest,
    TransferResponse,
    WireAssignment,
)
from lmcache_core.security.names import validate_instance_id

T = TypeVar("T")

MAX_RESPONSE_BYTES: Final = 16 << 20
MAX_CONNECTIONS: Final = 8


class _Problem(msgspec.Struct):
    title: str = ""
    detail: str = ""


class BrokerClient:
    """Talks to one broker. The constructor does no I/O; `open` and `close` belong to the owner.

    Args:
        base_url: `http://host:port` or `https://host:port`, without credentials.
        token: Bearer token, or None where the broker takes anyone.
        timeout_s: Limit on each call, from connecting to the last byte.
        transport: Replaces the network in tests.

    Raises:
        ConfigError: `base_url` is not of that form, or `token` cannot stand in a header.
    """

    def __init__(self, base_url: str, token: str | None, timeout_s: float, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        # Here and not in the HTTP library, whose complaint would quote the token.
        if token is not None and not (token.isascii() and token.isprintable() and token and " " not in token):
            raise ConfigError("broker token: it holds something else than visible ASCII characters; write the token and nothing around it")
        self._base_url = _check_base_url(base_url)
        self._token = token
        self._timeout_s = timeout_s
        self._transport = transport
        self._client: httpx.AsyncClient | None = None

    async def open(self) -> None:
        """Make the connection pool. Connects to nothing yet."""
        if self._client is None:
            # identity: a compressed answer could grow past its bound. trust_env: a proxy for the internet is no way to a peer.
            headers = {"accept": "application/json", "accept-encoding": "identity"}
            if self._token is not None:
                headers["authorization"] = f"Bearer {self._token}"
            self._client = httpx.AsyncClient(
                base_url=self._base_url,
                headers=headers,
                timeout=self._timeout_s,
                limits=httpx.Limits(max_connections=MAX_CONNECTIONS),
                transport=self._transport,
                trust_env=False,
            )

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def register(self, peer: Peer, *, load: float, ttl_ms: int, draining: bool = False) -> Lease:
        """Announce a peer, or renew its lease: the same call, which a broker that has forgotten everything takes as well.

        Args:
            peer: Who announces itself.
            load: 0 (idle) to 1 (full).
            ttl_ms: The lease asked for; the broker may grant another.
            draining: The peer wants no new pulls.

        Raises:
            UnavailableError: The broker did not answer, or refused.
        """
        body = AnnounceRequest(
            peer.incarnation, peer.distributed_url, peer.kind, peer.zone, peer.node, min(max(load, 0.0), 1.0), ttl_ms, draining
        )
        return self._decode(await self._call("PUT", _peer_path(peer.id), body), Lease)

    async def deregister(self, instance_id: str) -> None:
        """End a peer's lease; none is fine too.

        Raises:
            UnavailableError: The broker did not answer, or refused.
        """
        await self._call("DELETE", _peer_path(instance_id), absent_ok=True)

    async def drain(self, instance_id: str) -> None:
        """Let a peer get no new pulls. Needs the role `admin`; a peer drains itself with `register(draining=True)`.

        Raises:
            UnavailableError: The broker did not answer, or refused.
        """
        await self._call("POST", f"{_peer_path(instance_id)}:drain")

    async def peers(self) -> list[PeerStatus]:
        """List the live peers that this token may see.

        Raises:
            UnavailableError: The broker did not answer, or refused.
        """
        return self._decode(await self._call("GET", "/v1/peers"), PeersResponse).peers

    async def transfers(self, requester: str, chunks: Sequence[tuple[bytes, Sequence[str]]]) -> list[Assignment]:
        """Ask who should serve chunks.

        Args:
            requester: The instance that will pull.
            chunks: Distinct chunk ids (16 bytes) with the ids of those who may hold them. Only the first 4096 chunks and the first
                16 holders of each are asked about.

        Returns:
            Pulls that cover each chunk at most once. A chunk that is in none is served by nobody now.

        Raises:
            UnavailableError: The broker did not answer, or refused, or answered something else than it was asked.
        """
        asked = {_hex(chunk_id): list(holders[:MAX_HOLDERS_PER_CHUNK]) for chunk_id, holders in chunks[:MAX_CHUNKS_PER_TRANSFER]}
        if not asked:
            return []
        body = TransferRequest(validate_instance_id(requester), [ChunkHolders(chunk_id, holders) for chunk_id, holders in asked.items()])
        answer = self._decode(await self._call("POST", "/v1/transfers", body), TransferResponse)
        return [self._take(assignment, requester, asked) for assignment in answer.assignments]

    def _take(self, wire: WireAssignment, requester: str, asked: dict[str, list[str]]) -> Assignment:
        """Check one assignment against what was asked. Takes its chunks out of `asked`, so that a second mention fails."""
        try:
            parse_distributed_url(wire.distributed_url)
        except ValueError as exc:
            raise self._unusable(str(exc)) from exc
        if wire.instance == requester:
            raise self._unusable("it assigns the requester to itself")
        for chunk_id in wire.chunk_ids:
            if wire.instance not in asked.pop(chunk_id, ()):
                raise self._unusable("it assigns a chunk twice, unasked, or to one who does not hold it")
        chunk_ids = tuple(bytes.fromhex(chunk_id) for chunk_id in wire.chunk_ids)
        return Assignment(wire.instance, wire.distributed_url, chunk_ids, wire.ticket, wire.expires_ms)

    async def _call(self, method: str, path: str, body: msgspec.Struct | None = None, *, absent_ok: bool = False) -> bytes:
        if self._client is None:
            raise UnavailableError(f"broker {self._base_url}: the client is not open")
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"content-type": "application/json"}
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._client.stream(method, path, content=content, headers=headers) as response,
            ):
                data = await self._read(response)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as exc:
            raise UnavailableError(f"broker {self._base_url}: {type(exc).__name__} {exc}".rstrip()) from exc
        if response.is_success or (absent_ok and response.status_code == 404):
            return data
        raise UnavailableError(f"broker {self._base_url}: status {response.status_code} {_reason(data)}".rstrip())

    async def _read(self, response: httpx.Response) -> bytes:
        data = bytearray()
        async for part in response.aiter_raw():
            data += part
            if len(data) > MAX_RESPONSE_BYTES:
                raise self._unusable(f"it is longer than {MAX_RESPONSE_BYTES} bytes")
        return bytes(data)

    def _decode(self, data: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise self._unusable(str(exc)) from exc

    def _unusable(self, why: str) -> UnavailableError:
        return UnavailableError(f"broker {self._base_url}: unusable answer: {why}")


def _check_base_url(base_url: str) -> str:
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as exc:
        raise ConfigError(f"broker URL: {exc}; write http://host:port") from exc
    if url.scheme not in ("http", "https") or not url.host or url.userinfo or url.query or url.fragment:
        raise ConfigError("broker URL: it needs the form http://host:port, without credentials; the token is a setting of its own")
    return base_url.rstrip("/")


def _peer_path(instance_id: str) -> str:
    return f"/v1/peers/{validate_instance_id(instance_id)}"


def _hex(chunk_id: bytes) -> str:
    if len(chunk_id) != CHUNK_ID_BYTES:
        raise ValueError(f"a chunk id has {CHUNK_ID_BYTES} bytes")
    return chunk_id.hex()


def _reason(data: bytes) -> str:
    """What a problem document says, quoted and short: it goes into logs."""
    try:
        problem = msgspec.json.decode(data, type=_Problem)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return repr((problem.detail or problem.title)[:200])
