"""Follows the EndpointSlices of one service through the Kubernetes API: a list, then a watch from
where it ended, for ever.

A watch that the server ends, or whose connection is cut, goes on from the last version that was
seen (bookmarks keep that one young). One whose version the server has forgotten (410), or that
cannot be understood, begins again with a list.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

from lmcache_core.errors import UnavailableError
from lmcache_core.wire.backoff import Backoff

from lmcache_broker.discovery.cluster import GONE, WATCH_SECONDS, ClusterApi, GoneError
from lmcache_broker.discovery.slices import Sighting, SliceTable

logger = logging.getLogger(__name__)

MAX_LINE_BYTES: Final = 16 << 20
MAX_LIST_BYTES: Final = 64 << 20
LIST_TIMEOUT_S: Final = 10.0
SILENCE_S: Final = 90.0
"""A watch that says nothing for longer, not even a bookmark (they come every minute), is taken
for dead.
"""
RETRY_S: Final = 0.25
MAX_RETRY_S: Final = 30.0

OnSeen = Callable[[Mapping[str, Sighting]], None]


class _UnreadableError(UnavailableError):
    """A watch said what cannot be gone on from: it would say it again."""


class EndpointWatch:
    """Watches the endpoints of one service. The constructor connects to nothing.

    Args:
        api: Open for as long as this is followed.
        on_seen: Called on the loop with all peers, by id, whenever something has changed.
        silence_s: See `SILENCE_S`.

    Attributes:
        num_lists: Lists since the start: the first, and resyncs.
        num_watches: Watches begun.
    """

    def __init__(self, api: ClusterApi, on_seen: OnSeen, silence_s: float = SILENCE_S) -> None:
        settings = api.settings
        self._api = api
        self._on_seen = on_seen
        self._silence_s = silence_s
        self._table = SliceTable(
            settings.kubernetes_port, settings.kubernetes_port_name, settings.kubernetes_tls
        )
        self._backoff = Backoff(RETRY_S, MAX_RETRY_S, time.monotonic)
        self._version = ""
        self._heard_at = float("-inf")
        self._is_following: bool | None = None
        self.num_lists = 0
        self.num_watches = 0

    async def ping(self) -> str:
        """For readiness.

        Raises:
            UnavailableError: Nothing has been heard of the API for too long.
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
        """One list or watch; to be repeated. Failures are waited for, longer and longer, and
        logged when they begin and end.
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
        self._note(False, f"{type(exc).__name__}: {exc}")
        await asyncio.sleep(self._backoff.wait_s)

    async def _list(self) -> None:
        self.num_lists += 1
        async with asyncio.timeout(LIST_TIMEOUT_S):
            response = await self._api.list_slices()
            try:
                body = bytearray()
                async for part in response.content.iter_any():
                    body += part
                    if len(body) > MAX_LIST_BYTES:
                        raise UnavailableError(
                            f"the list of endpoints has more than {MAX_LIST_BYTES} bytes"
                        )
            finally:
                response.close()
        found = json.loads(bytes(body))
        if not isinstance(found, dict):
            raise UnavailableError("the list of endpoints is not an object")
        self._table.replace(found.get("items") or [])
        self._heard(str((found.get("metadata") or {}).get("resourceVersion") or ""))
        self._on_seen(self._table.sightings())

    async def _watch(self) -> None:
        self.num_watches += 1
        async with asyncio.timeout(LIST_TIMEOUT_S):
            response = await self._api.list_slices(
                watch=True,
                resource_version=self._version,
                allow_watch_bookmarks=True,
                timeout_seconds=WATCH_SECONDS,
            )
        try:
            async for line in _lines(response.content.iter_any(), self._silence_s):
                try:
                    event = json.loads(line)
                except ValueError as exc:
                    raise _UnreadableError("an event of the watch is not JSON") from exc
                if not isinstance(event, dict) or not isinstance(event.get("object"), dict):
                    raise _UnreadableError("an event of the watch has no object")
                self._take(str(event.get("type")), event["object"])
        finally:
            response.close()

    def _take(self, kind: str, item: Mapping[str, Any]) -> None:
        if kind == "ERROR":
            if item.get("code") == GONE:
                raise GoneError("the version is gone")
            raise _UnreadableError(f"the watch ended with code {item.get('code')}")
        self._heard(str((item.get("metadata") or {}).get("resourceVersion") or self._version))
        if kind != "BOOKMARK":
            self._table.apply(kind, item)
            self._on_seen(self._table.sightings())

    def _heard(self, version: str) -> None:
        self._version = version
        self._heard_at = time.monotonic()
        self._backoff.succeeded()
        self._note(True, f"version {version}")

    def _note(self, is_following: bool, detail: str) -> None:
        """Log changes only."""
        if is_following != self._is_following:
            self._is_following = is_following
            logger.log(
                logging.INFO if is_following else logging.WARNING,
                "endpoints of %s: %s",
                self._api.settings.kubernetes_service,
                detail,
            )


async def _lines(parts: AsyncIterator[bytes], silence_s: float) -> AsyncIterator[bytes]:
    """Return the lines of a stream, ended by its end. Raises `TimeoutError` when nothing comes for
    too long. What was cut off is no line.
    """
    rest = bytearray()
    while True:
        try:
            async with asyncio.timeout(silence_s):
                part = await anext(parts)
        except StopAsyncIteration:
            return
        rest += part
        if len(rest) > MAX_LINE_BYTES:
            raise UnavailableError(f"an event of the watch has more than {MAX_LINE_BYTES} bytes")
        *lines, tail = rest.split(b"\n")
        rest = bytearray(tail)
        for line in lines:
            if line.strip():
                yield bytes(line)
