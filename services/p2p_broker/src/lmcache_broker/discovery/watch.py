"""Follows the EndpointSlices of one service through the Kubernetes API: a list, then a watch from
its end, forever.

A watch that the server ends, or whose connection breaks, continues from the last version seen
(bookmarks keep it recent). If the version has expired at the server (410), or an event is
malformed, it starts again with a list.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from lmcache_core.errors import UnavailableError
from lmcache_core.p2p import Peer, distributed_url_of
from lmcache_core.wire.backoff import Backoff

from lmcache_broker.discovery.cluster import GONE, WATCH_SECONDS, ClusterApi, GoneError

logger = logging.getLogger(__name__)

MAX_SLICES: Final = 4096
MAX_LINE_BYTES: Final = 16 << 20
MAX_LIST_BYTES: Final = 64 << 20
LIST_TIMEOUT_S: Final = 10.0
SILENCE_S: Final = 90.0
"""A watch that sends nothing for this long, not even a bookmark (one comes every minute), is
dead.
"""
RETRY_S: Final = 0.25
MAX_RETRY_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Sighting:
    """A peer as shown by a list or the cluster.

    Attributes:
        peer: The peer, with incarnation 0. In a cluster its id is the pod's name.
        is_ready: It may be asked for chunks although it has not registered.
    """

    peer: Peer
    is_ready: bool = True
    is_leaving: bool = False


OnSeen = Callable[[Mapping[str, Sighting]], None]


class _UnreadableError(UnavailableError):
    """A watch sent a malformed event, and would send it again."""


class EndpointWatch:
    """Watches the endpoints of one service. The constructor does not connect.

    Args:
        api: Must stay open while `follow` is repeated.
        on_seen: Called on the loop with all peers, by id, after every change.

    Attributes:
        num_lists: Lists since the start: the first, and resyncs.
    """

    def __init__(self, api: ClusterApi, on_seen: OnSeen, silence_s: float = SILENCE_S) -> None:
        self._api = api
        self._on_seen = on_seen
        self._silence_s = silence_s
        self._slices: dict[str, Mapping[str, Any]] = {}
        self._backoff = Backoff(RETRY_S, MAX_RETRY_S, time.monotonic)
        self._version = ""
        self._heard_at = float("-inf")
        self._is_following: bool | None = None
        self.num_lists = 0
        self.num_watches = 0

    async def ping(self) -> str:
        """Return the state for readiness.

        Raises:
            UnavailableError: The API has been silent for too long.
        """
        if (
            time.monotonic() - self._heard_at > self._silence_s + MAX_RETRY_S
            or not self._is_following
        ):
            raise UnavailableError(
                "the Kubernetes API cannot be followed; peers are known by their registrations only"
            )
        return f"version {self._version}"

    async def follow(self) -> None:
        """List or watch once. Call it repeatedly. After failures it waits, longer and longer; only
        the first failure and the recovery are logged.
        """
        try:
            if self._version:
                await self._watch()
            else:
                await self._list()
        except GoneError:
            self._version = ""
        except _UnreadableError as exc:
            self._version = ""
            await self._wait_after(exc)
        except (UnavailableError, OSError, TimeoutError, ValueError) as exc:
            await self._wait_after(exc)

    async def _wait_after(self, exc: Exception) -> None:
        self._backoff.failed()
        self._note(False, f"error={type(exc).__name__}: {exc}")
        await asyncio.sleep(self._backoff.wait_s)

    async def _list(self) -> None:
        self.num_lists += 1
        body = bytearray()
        async with asyncio.timeout(LIST_TIMEOUT_S), self._api.slices(LIST_TIMEOUT_S) as parts:
            async for part in parts:
                body += part
                if len(body) > MAX_LIST_BYTES:
                    raise UnavailableError(
                        f"the list of endpoints has more than {MAX_LIST_BYTES} bytes"
                    )
        found = json.loads(body)
        if not isinstance(found, dict):
            raise UnavailableError("the list of endpoints is not an object")
        items = (found.get("items") or [])[:MAX_SLICES]
        self._slices = {name: item for item in items if (name := _name_of(item))}
        self._heard(str((found.get("metadata") or {}).get("resourceVersion") or ""))
        self._on_seen(self._sightings())

    async def _watch(self) -> None:
        self.num_watches += 1
        has_event = False
        async with self._api.slices(
            self._silence_s,
            watch="true",
            resourceVersion=self._version,
            allowWatchBookmarks="true",
            timeoutSeconds=str(WATCH_SECONDS),
        ) as parts:
            async for line in _lines(parts):
                try:
                    event = json.loads(line)
                except ValueError as exc:
                    raise _UnreadableError("an event of the watch is not JSON") from exc
                if not isinstance(event, dict) or not isinstance(event.get("object"), dict):
                    raise _UnreadableError("an event of the watch has no object")
                self._take(str(event.get("type")), event["object"])
                has_event = True
        if not has_event:  # an API server that is about to end closes each watch at once
            self._backoff.failed()
            await asyncio.sleep(self._backoff.wait_s)

    def _take(self, kind: str, item: Mapping[str, Any]) -> None:
        if kind == "ERROR":
            if item.get("code") == GONE:
                raise GoneError("the version has expired")
            raise _UnreadableError(f"the watch ended with code {item.get('code')}")
        self._heard(str((item.get("metadata") or {}).get("resourceVersion") or self._version))
        if kind == "BOOKMARK":
            return
        name = _name_of(item)
        if kind == "DELETED":
            self._slices.pop(name, None)
        elif (
            kind in ("ADDED", "MODIFIED")
            and name
            and (name in self._slices or len(self._slices) < MAX_SLICES)
        ):
            self._slices[name] = item
        self._on_seen(self._sightings())

    def _sightings(self) -> dict[str, Sighting]:
        """Return peers by id. A peer in two slices, as happens while it moves between them, is
        ready if it is ready in either.
        """
        found: dict[str, Sighting] = {}
        for item in self._slices.values():
            for sighting in self._read_slice(item):
                known = found.get(sighting.peer.id)
                if known is None or (sighting.is_ready and not known.is_ready):
                    found[sighting.peer.id] = sighting
        return found

    def _read_slice(self, item: Mapping[str, Any]) -> Iterator[Sighting]:
        """Yield the peers of a slice. Unknown entries are skipped: a newer API may write them."""
        settings = self._api.settings
        ports = {port.get("name"): port.get("port") for port in item.get("ports") or ()}
        port = ports.get(settings.kubernetes_port_name) or settings.kubernetes_port
        for endpoint in item.get("endpoints") or ():
            conditions, target = endpoint.get("conditions") or {}, endpoint.get("targetRef") or {}
            addresses = endpoint.get("addresses") or ()
            if target.get("kind") != "Pod" or not addresses:
                continue
            is_leaving = conditions.get("terminating") is True
            try:
                address = str(ipaddress.ip_address(str(addresses[0])))
                peer = Peer(
                    str(target.get("name", "")),
                    0,
                    distributed_url_of(address, int(port), settings.kubernetes_tls),
                    zone=str(endpoint.get("zone") or ""),
                    node=str(endpoint.get("nodeName") or ""),
                )
            except ValueError:
                continue
            is_ready = conditions.get("ready") is not False and not is_leaving
            yield Sighting(peer, is_ready, is_leaving)

    def _heard(self, version: str) -> None:
        self._version = version
        self._heard_at = time.monotonic()
        self._backoff.succeeded()
        self._note(True, f"version={version}")

    def _note(self, is_following: bool, detail: str) -> None:
        if is_following != self._is_following:
            self._is_following = is_following
            logger.log(
                logging.INFO if is_following else logging.WARNING,
                "%s the endpoints of a service: service=%s %s",
                "following" if is_following else "cannot follow",
                self._api.settings.kubernetes_service,
                detail,
            )


def _name_of(item: Mapping[str, Any]) -> str:
    return str((item.get("metadata") or {}).get("name") or "")


async def _lines(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the whole lines of a stream that are not empty."""
    rest = bytearray()
    async for part in parts:
        rest += part
        if len(rest) > MAX_LINE_BYTES:
            raise UnavailableError(f"an event of the watch has more than {MAX_LINE_BYTES} bytes")
        *lines, tail = rest.split(b"\n")
        rest = bytearray(tail)
        for line in lines:
            if line.strip():
                yield bytes(line)
