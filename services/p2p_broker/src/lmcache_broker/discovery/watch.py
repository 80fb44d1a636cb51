"""Follows the EndpointSlices of one service through the Kubernetes API: a list, then a watch from where it ended, for ever.

A watch that the server ends, or whose connection is cut, goes on from the last version that was seen (bookmarks keep that one young). One
whose version the server has forgotten (410), or that cannot be understood, begins again with a list.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lmcache_core.errors import ConfigError, UnavailableError
from lmcache_core.wire.backoff import Backoff

from lmcache_broker.discovery.sighting import Sighting
from lmcache_broker.discovery.slices import SliceTable

logger = logging.getLogger(__name__)

MAX_LINE_BYTES: Final = 16 << 20
MAX_LIST_BYTES: Final = 64 << 20
LIST_TIMEOUT_S: Final = 10.0
WATCH_SECONDS: Final = 240
SILENCE_S: Final = 90.0
"""A watch that says nothing for longer, not even a bookmark (they come every minute), is taken for dead."""
RETRY_S: Final = 0.25
MAX_RETRY_S: Final = 30.0
GONE: Final = 410

OnSeen = Callable[[Mapping[str, Sighting]], None]


class GoneError(UnavailableError):
    """The version that a watch was to go on from is not known any more."""


class _UnreadableError(UnavailableError):
    """A watch said what cannot be gone on from: it would say it again."""


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Where the API is and what is followed.

    Attributes:
        service: Name of the service whose endpoints are peers.
        namespace: Its namespace.
        port: Of lm://, where the service's slices do not name `port_name`.
        port_name: Name of the service's port.
        api_url: Instead of what a pod is told by its cluster.
        token_file: Token for `api_url`; read again at each list and watch.
        ca_file: Who signed the certificate of `api_url`.
        is_encrypted: Whether peers serve lm:// over TLS.
    """

    service: str
    namespace: str
    port: int
    port_name: str
    api_url: str | None = None
    token_file: Path | None = None
    ca_file: Path | None = None
    is_encrypted: bool = False


class EndpointWatch:
    """See the module. The constructor connects to nothing.

    Args:
        options: Where and what.
        on_seen: Called on the loop with all peers, by id, whenever something has changed.
        silence_s: See `SILENCE_S`.

    Attributes:
        num_lists: Lists since the start: the first, and resyncs.
        num_watches: Watches begun.
    """

    def __init__(self, options: ClusterOptions, on_seen: OnSeen, silence_s: float = SILENCE_S) -> None:
        self._options = options
        self._on_seen = on_seen
        self._silence_s = silence_s
        self._table = SliceTable(options.port, options.port_name, options.is_encrypted)
        self._backoff = Backoff(RETRY_S, MAX_RETRY_S, time.monotonic)
        self._api: Any = None
        self._client: Any = None
        self._version = ""
        self._heard_at = float("-inf")
        self._is_following: bool | None = None
        self.num_lists = 0
        self.num_watches = 0

    async def open(self) -> None:
        """Make the client.

        Raises:
            ConfigError: No address was given, and this is no pod of a cluster, or a file cannot be read.
        """
        from kubernetes.aio import client, config

        configuration = client.Configuration()
        if self._options.api_url is None:
            try:
                config.load_incluster_config(configuration)
            except config.ConfigException as exc:
                raise ConfigError(f"discovery=kubernetes: this is no pod of a cluster ({exc}); set kubernetes_api_url") from exc
        else:
            configuration.host = self._options.api_url
            configuration.ssl_ca_cert = None if self._options.ca_file is None else str(self._options.ca_file)
        self._client = client.ApiClient(configuration)
        self._api = client.DiscoveryV1Api(self._client)

    async def close(self) -> None:
        """End the connections. Idempotent."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def ping(self) -> str:
        """For readiness.

        Raises:
            UnavailableError: Nothing has been heard of the API for too long.
        """
        if time.monotonic() - self._heard_at > self._silence_s + MAX_RETRY_S or not self._is_following:
            raise UnavailableError("the Kubernetes API cannot be followed; peers are known by their registrations only")
        return f"version {self._version}"

    async def follow(self) -> None:
        """One list or watch; to be repeated. Failures are waited for, longer and longer, and logged when they begin and end."""
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
            response = await self._ask()
            try:
                body = bytearray()
                async for part in response.content.iter_any():
                    body += part
                    if len(body) > MAX_LIST_BYTES:
                        raise UnavailableError(f"the list of endpoints has more than {MAX_LIST_BYTES} bytes")
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
            response = await self._ask(
                watch=True, resource_version=self._version, allow_watch_bookmarks=True, timeout_seconds=WATCH_SECONDS
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

    async def _ask(self, **how: Any) -> Any:
        from kubernetes.aio.client.exceptions import ApiException

        options = self._options
        if options.token_file is not None:
            token = await asyncio.to_thread(options.token_file.read_text, "utf-8")
            self._client.configuration.api_key["BearerToken"] = f"Bearer {token.strip()}"
        selector = f"kubernetes.io/service-name={options.service}"
        try:
            response = await self._api.list_namespaced_endpoint_slice_without_preload_content(
                options.namespace, label_selector=selector, _request_timeout=WATCH_SECONDS * 2, **how
            )
        except ApiException as exc:
            raise _refusal(exc.status) from exc
        if response.status != 200:
            response.close()
            raise _refusal(response.status)
        return response

    def _heard(self, version: str) -> None:
        self._version = version
        self._heard_at = time.monotonic()
        self._backoff.succeeded()
        self._note(True, f"version {version}")

    def _note(self, is_following: bool, detail: str) -> None:
        """Log changes only."""
        if is_following != self._is_following:
            self._is_following = is_following
            logger.log(logging.INFO if is_following else logging.WARNING, "endpoints of %s: %s", self._options.service, detail)


async def _lines(parts: AsyncIterator[bytes], silence_s: float) -> AsyncIterator[bytes]:
    """The lines of a stream, ended by its end. Raises `TimeoutError` when nothing comes for too long. What was cut off is no line."""
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


def _refusal(status: object) -> UnavailableError:
    return GoneError("the version is gone") if status == GONE else UnavailableError(f"the Kubernetes API answered with status {status}")
