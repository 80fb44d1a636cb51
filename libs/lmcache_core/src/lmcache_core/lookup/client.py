"""The lookup service's client."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import TypeVar

import httpx
import msgspec

from lmcache_core.lookup.messages import (
    MAX_CHUNKS_PER_LOOKUP,
    MSGPACK,
    ContainsAnswer,
    EventsAck,
    EventsRequest,
    InstanceKind,
    InstanceLease,
    LeaseRequest,
    LocationsAnswer,
    LookupAnswer,
    PackedChunksRequest,
    PackedLookupAnswer,
    RouteAnswer,
    StoreEvent,
    chunk_id_text,
    pack_ids,
)
from lmcache_core.security import ShownToken, validate_instance_id
from lmcache_core.wire.json_http import JsonHttpClient

T = TypeVar("T")


class LookupClient:
    """Queries one lookup service. Every failure is an `UnavailableError`; what to do without an
    answer is the caller's choice.

    Args:
        base_url: `http://host:port` or `https://host:port`, without credentials.
        token: Bearer token; None if the service requires none.
        timeout_s: Limit on each call, from connecting to the last byte.
        transport: Replaces the network in tests.
        tls: Trusted authorities and client certificate for https; None: the system's authorities.

    Raises:
        ConfigError: `base_url` is not of that form.
    """

    def __init__(
        self,
        base_url: str,
        token: ShownToken = None,
        timeout_s: float = 1.0,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._http = JsonHttpClient(
            "lookup", base_url, token, timeout_s, transport=transport, tls=tls
        )

    async def open(self) -> None:
        """Create the connection pool, without connecting yet."""
        await self._http.open()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def lookup(
        self,
        chunk_ids: Sequence[bytes],
        exclude: Sequence[str] = (),
        *,
        timeout_s: float | None = None,
    ) -> LookupAnswer:
        """Return the holders of the longest prefix of a list of chunks.

        Args:
            chunk_ids: 16 bytes each, in order. Only the first 8192 are queried.
            exclude: Instances whose holdings do not count, such as the caller itself.
            timeout_s: Limit on this call instead of the client's.

        Raises:
            UnavailableError: The service did not answer, refused, or its answer does not fit.
        """
        asked = chunk_ids[:MAX_CHUNKS_PER_LOOKUP]
        if not asked:
            return LookupAnswer(0, [])
        packed = await self._ask("/v1/lookup", asked, exclude, PackedLookupAnswer, timeout_s)
        try:
            answer = packed.unpack()
        except ValueError as exc:
            raise self._http.unusable(str(exc)) from exc
        if answer.num_prefix > len(asked) or len(answer.holders) != answer.num_prefix:
            raise self._http.unusable("it does not fit the question")
        if any(holder.instance in exclude for holders in answer.holders for holder in holders):
            raise self._http.unusable("it names an excluded instance")
        return answer

    async def route(
        self,
        chunk_ids: Sequence[bytes],
        exclude: Sequence[str] = (),
        *,
        timeout_s: float | None = None,
    ) -> RouteAnswer:
        """Return how long a prefix of these chunks each instance holds by itself.

        Args:
            chunk_ids: 16 bytes each, in order. Only the first 8192 are queried.
            timeout_s: Limit on this call instead of the client's.

        Raises:
            UnavailableError: The service did not answer, refused, or its answer does not fit.
        """
        asked = chunk_ids[:MAX_CHUNKS_PER_LOOKUP]
        if not asked:
            return RouteAnswer([])
        answer = await self._ask("/v1/route", asked, exclude, RouteAnswer, timeout_s)
        if any(entry.num_prefix > len(asked) for entry in answer.instances):
            raise self._http.unusable("it does not fit the question")
        if any(entry.instance in exclude for entry in answer.instances):
            raise self._http.unusable("it names an excluded instance")
        return answer

    async def contains(
        self,
        chunk_ids: Sequence[bytes],
        exclude: Sequence[str] = (),
        *,
        timeout_s: float | None = None,
    ) -> ContainsAnswer:
        """Return for each of these chunks whether any instance holds it.

        Args:
            chunk_ids: 16 bytes each, at most 8192, in any order.
            timeout_s: Limit on this call instead of the client's.

        Raises:
            ValueError: There are more than 8192.
            UnavailableError: The service did not answer, refused, or its answer does not fit.
        """
        if len(chunk_ids) > MAX_CHUNKS_PER_LOOKUP:
            raise ValueError(
                f"{len(chunk_ids)} chunks are more than {MAX_CHUNKS_PER_LOOKUP}: ask in parts"
            )
        if not chunk_ids:
            return ContainsAnswer([])
        answer = await self._ask("/v1/contains", chunk_ids, exclude, ContainsAnswer, timeout_s)
        if len(answer.present) != len(chunk_ids):
            raise self._http.unusable("it does not fit the question")
        return answer

    async def locations(
        self, chunk_id: bytes, *, timeout_s: float | None = None
    ) -> LocationsAnswer:
        """Return all holders of one chunk.

        Args:
            chunk_id: 16 bytes.
            timeout_s: Limit on this call instead of the client's.

        Raises:
            UnavailableError: The service did not answer, or refused.
        """
        path = f"/v1/chunks/{chunk_id_text(chunk_id)}/locations"
        return self._http.decode(
            await self._http.call("GET", path, timeout_s=timeout_s), LocationsAnswer
        )

    async def renew_instance(
        self, instance_id: str, *, incarnation: int, kind: InstanceKind, ttl_ms: int | None = None
    ) -> InstanceLease:
        """Take or renew an instance's lease.

        Args:
            incarnation: Number of its current life; a higher one immediately ends all lower ones.
            ttl_ms: The lease to request, None for the service's default; the service may grant
                another.

        Raises:
            UnavailableError: The service did not answer, or refused.
        """
        body = LeaseRequest(incarnation, kind, ttl_ms)
        return self._http.decode(
            await self._http.call("PUT", _instance_path(instance_id), body), InstanceLease
        )

    async def end_instance(self, instance_id: str, *, incarnation: int | None = None) -> None:
        """End an instance's lease, if there is one.

        Args:
            incarnation: Leave the lease alone if it belongs to another incarnation.

        Raises:
            UnavailableError: The service did not answer, or refused.
        """
        query = "" if incarnation is None else f"?incarnation={incarnation}"
        await self._http.call("DELETE", f"{_instance_path(instance_id)}{query}", absent_ok=True)

    async def send_events(
        self,
        instance_id: str,
        *,
        incarnation: int,
        first_sequence: int,
        events: Sequence[StoreEvent],
    ) -> EventsAck:
        """Report stores and removals.

        Args:
            first_sequence: Number of the first event; the others follow without a gap.
            events: At most 2048.

        Raises:
            UnavailableError: The service did not answer, or refused. It may still have accepted the
                events; sending them again is safe.
        """
        body = EventsRequest(
            validate_instance_id(instance_id), incarnation, first_sequence, list(events)
        )
        return await self._post("/v1/events", body, EventsAck)

    async def _ask(
        self,
        path: str,
        chunk_ids: Sequence[bytes],
        exclude: Sequence[str],
        kind: type[T],
        timeout_s: float | None,
    ) -> T:
        body = PackedChunksRequest(pack_ids(chunk_ids), list(exclude))
        return await self._post(path, body, kind, timeout_s)

    async def _post(
        self, path: str, body: msgspec.Struct, kind: type[T], timeout_s: float | None = None
    ) -> T:
        """Send a body as MessagePack, and decode the answer, checking every bound that `kind`
        states.
        """
        headers = {"content-type": MSGPACK, "accept": MSGPACK}
        content = msgspec.msgpack.encode(body)
        reply = await self._http.exchange("POST", path, content, headers, timeout_s=timeout_s)
        if not reply.is_success:
            raise self._http.refused(reply)
        try:
            return msgspec.msgpack.decode(reply.data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise self._http.unusable(str(exc)) from exc


def _instance_path(instance_id: str) -> str:
    return f"/v1/instances/{validate_instance_id(instance_id)}"
