"""The lookup service's client."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import httpx
import msgspec

from lmcache_core.lookup.messages import (
    JSON,
    MAX_CHUNKS_PER_LOOKUP,
    MSGPACK,
    ChunksRequest,
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
    packed_events,
)
from lmcache_core.security import ShownToken, validate_instance_id
from lmcache_core.wire.json_http import JsonHttpClient, Reply

T = TypeVar("T")

JSON_ONLY_S: Final = 60.0
"""After a service has rejected MessagePack, only JSON is sent for this long: the service may be
upgraded at any time.
"""

_DOES_NOT_TAKE_IT: Final = (400, 415, 422)
"""Status of a service that cannot read a body. It may also mean that the question is invalid: then
it is refused as JSON, too.
"""

_TAKES_BOTH: Final = {"accept": f"{MSGPACK}, {JSON};q=0.5"}


class FormatChooser:
    """Sends questions in the best format that the service accepts.

    Args:
        http: HTTP client of the service.
        clock: Seconds, monotonic.
    """

    def __init__(self, http: JsonHttpClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._http = http
        self._clock = clock
        self._json_until = float("-inf")

    async def ask(
        self,
        method: str,
        path: str,
        packed: msgspec.Struct,
        plain: Callable[[], msgspec.Struct],
        *,
        timeout_s: float | None = None,
    ) -> Reply:
        """Send a question, a second time as JSON if the service cannot read MessagePack.

        Args:
            method: HTTP method.
            path: Path below the base URL.
            packed: The body for MessagePack.
            plain: Returns the body for JSON.
            timeout_s: Limit on both attempts together, instead of the client's.

        Returns:
            A successful reply.

        Raises:
            UnavailableError: No answer in time, or a refusal.
        """
        begin = self._clock()
        limit_s = self._http.timeout_s if timeout_s is None else timeout_s
        if begin >= self._json_until:
            headers = {"content-type": MSGPACK, **_TAKES_BOTH}
            reply = await self._http.exchange(
                method, path, msgspec.msgpack.encode(packed), headers, timeout_s=limit_s
            )
            if reply.is_success:
                return reply
            if reply.status not in _DOES_NOT_TAKE_IT:
                raise self._http.refused(reply)
        body = msgspec.json.encode(plain())
        left_s = max(limit_s - (self._clock() - begin), 0.0)
        reply = await self._http.exchange(
            method, path, body, {"content-type": JSON, **_TAKES_BOTH}, timeout_s=left_s
        )
        if not reply.is_success:
            raise self._http.refused(reply)
        # Only now is it certain that the format was rejected, not the question.
        if begin >= self._json_until:
            self._json_until = self._clock() + JSON_ONLY_S
        return reply

    def decode(self, reply: Reply, kind: type[T]) -> T:
        """Decode a reply according to its format, checking every bound that `kind` states.

        Raises:
            UnavailableError: It is not a valid `kind`.
        """
        if not is_packed(reply):
            return self._http.decode(reply.data, kind)
        try:
            return msgspec.msgpack.decode(reply.data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise self._http.unusable(str(exc)) from exc


class LookupClient:
    """Queries one lookup service. Every failure is an `UnavailableError`; what to do without an
    answer is the caller's choice.

    Bodies are MessagePack; a service one version older that accepts only JSON gets JSON.

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
        self._formats = FormatChooser(self._http)

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
        reply = await self._ask("/v1/lookup", asked, exclude, timeout_s)
        answer = self._lookup_answer(reply)
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
            exclude: Instances to leave out. An older service includes them: they are removed here.
            timeout_s: Limit on this call instead of the client's.

        Raises:
            UnavailableError: The service did not answer, refused, or its answer does not fit.
        """
        asked = chunk_ids[:MAX_CHUNKS_PER_LOOKUP]
        if not asked:
            return RouteAnswer([])
        answer = self._formats.decode(
            await self._ask("/v1/route", asked, exclude, timeout_s), RouteAnswer
        )
        if any(entry.num_prefix > len(asked) for entry in answer.instances):
            raise self._http.unusable("it does not fit the question")
        return RouteAnswer(
            [entry for entry in answer.instances if entry.instance not in exclude], answer.degraded
        )

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
            exclude: Instances whose holdings do not count.
            timeout_s: Limit on this call instead of the client's.

        Raises:
            ValueError: There are more than 8192.
            UnavailableError: The service did not answer, refused, or is too old to know the
            question.
        """
        if len(chunk_ids) > MAX_CHUNKS_PER_LOOKUP:
            raise ValueError(
                f"{len(chunk_ids)} chunks are more than {MAX_CHUNKS_PER_LOOKUP}: ask in parts"
            )
        if not chunk_ids:
            return ContainsAnswer([])
        answer = self._formats.decode(
            await self._ask("/v1/contains", chunk_ids, exclude, timeout_s), ContainsAnswer
        )
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
            UnavailableError: The service did not answer, refused, or is too old to know the
            question.
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
            instance_id: Id of the instance.
            incarnation: Number of its current life; a higher one immediately ends all lower ones.
            kind: Kind of instance.
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
            instance_id: Id of the instance.
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
            instance_id: Id of the instance.
            incarnation: Incarnation of the lease.
            first_sequence: Number of the first event; the others follow without a gap.
            events: At most 2048.

        Raises:
            UnavailableError: The service did not answer, or refused. It may still have accepted the
                events; sending them again is safe.
        """
        body = EventsRequest(
            validate_instance_id(instance_id), incarnation, first_sequence, list(events)
        )
        return self._formats.decode(
            await self._formats.ask("POST", "/v1/events", packed_events(body), lambda: body),
            EventsAck,
        )

    async def _ask(
        self, path: str, chunk_ids: Sequence[bytes], exclude: Sequence[str], timeout_s: float | None
    ) -> Reply:
        packed = PackedChunksRequest(pack_ids(chunk_ids), list(exclude))
        return await self._formats.ask(
            "POST",
            path,
            packed,
            lambda: ChunksRequest([chunk_id.hex() for chunk_id in chunk_ids], list(exclude)),
            timeout_s=timeout_s,
        )

    def _lookup_answer(self, reply: Reply) -> LookupAnswer:
        if not is_packed(reply):
            return self._formats.decode(reply, LookupAnswer)
        try:
            return self._formats.decode(reply, PackedLookupAnswer).unpack()
        except ValueError as exc:
            raise self._http.unusable(str(exc)) from exc


def _instance_path(instance_id: str) -> str:
    return f"/v1/instances/{validate_instance_id(instance_id)}"


def is_packed(reply: Reply) -> bool:
    """Return whether an answer is MessagePack."""
    return reply.content_type.partition(";")[0].strip().lower() == MSGPACK
