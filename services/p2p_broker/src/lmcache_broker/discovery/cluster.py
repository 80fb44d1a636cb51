"""The part of the Kubernetes API that the broker uses: the EndpointSlices of one service, and one
annotation of pods.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

import httpx
from lmcache_core.errors import ConfigError, UnavailableError
from lmcache_core.security import TlsFiles, TokenFile, client_context
from lmcache_core.wire.http_client import BearerAuth, context_for, http_client

from lmcache_broker.settings import DiscoverySettings, api_url_of_pod

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
WATCH_SECONDS: Final = 240
CALL_TIMEOUT_S: Final = 5.0
MAX_CONNECTIONS: Final = 4
GONE: Final = 410
_MERGE: Final = "application/merge-patch+json"


class GoneError(UnavailableError):
    """The version from which a watch was to continue has expired."""


class ClusterApi:
    """Client of the Kubernetes API. The constructor does not connect.

    Args:
        settings: Address of the API, and the service whose endpoints are peers.
    """

    def __init__(self, settings: DiscoverySettings, namespace: str) -> None:
        self.settings = settings
        self._namespace = quote(namespace, safe="")
        self._client: httpx.AsyncClient | None = None

    async def open(self) -> None:
        """Create the client.

        Raises:
            ConfigError: No address is set and this is not a pod of a cluster, or a file cannot be
                read.
        """
        url, token_file, ca_file = self._access()
        token = None
        if token_file is not None:
            token = await asyncio.to_thread(TokenFile, token_file, "kubernetes_token_file")
        trusted = None if ca_file is None else client_context(TlsFiles(ca_file=ca_file))
        self._client = http_client(
            url,
            BearerAuth(token, "Kubernetes API"),
            CALL_TIMEOUT_S,
            context_for(url, trusted),
            httpx.Limits(max_connections=MAX_CONNECTIONS),
        )

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    @asynccontextmanager
    async def slices(self, silence_s: float, **query: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """List or watch the service's slices; yield the parts of the response's body.

        Args:
            silence_s: Longest wait for the next part.
            query: Parameters of a watch.

        Raises:
            GoneError: A watch was to continue from a version that has expired.
            UnavailableError: The API refused, fell silent, or cannot be reached.
        """
        assert self._client is not None, "not open"
        selector = f"kubernetes.io/service-name={self.settings.kubernetes_service}"
        try:
            async with self._client.stream(
                "GET",
                f"/apis/discovery.k8s.io/v1/namespaces/{self._namespace}/endpointslices",
                params={"labelSelector": selector, **query},
                timeout=httpx.Timeout(CALL_TIMEOUT_S, read=silence_s),
            ) as response:
                if response.status_code != httpx.codes.OK:
                    raise _refusal(response.status_code)
                yield response.aiter_bytes()
        except httpx.HTTPError as exc:
            raise _unreachable(exc) from exc

    async def annotate_pod(self, name: str, annotation: str, value: str) -> bool:
        """Set an annotation of a pod in the namespace.

        Returns:
            Whether there is such a pod.

        Raises:
            UnavailableError: The API refused, or cannot be reached.
            TimeoutError: It did not answer within `CALL_TIMEOUT_S`.
        """
        assert self._client is not None, "not open"
        try:
            async with (
                asyncio.timeout(CALL_TIMEOUT_S),
                self._client.stream(
                    "PATCH",
                    f"/api/v1/namespaces/{self._namespace}/pods/{quote(name, safe='')}",
                    content=json.dumps({"metadata": {"annotations": {annotation: value}}}),
                    headers={"content-type": _MERGE},
                ) as response,
            ):
                status = response.status_code
        except httpx.HTTPError as exc:
            raise _unreachable(exc) from exc
        if status not in (httpx.codes.OK, httpx.codes.NOT_FOUND):
            raise _refusal(status)
        return status == httpx.codes.OK

    def _access(self) -> tuple[str, Path | None, Path | None]:
        """Return the API's URL, and the files with the token for it and its authority."""
        settings = self.settings
        if settings.kubernetes_api_url is not None:
            token_file, ca_file = settings.kubernetes_token_file, settings.kubernetes_ca_file
            return settings.kubernetes_api_url, token_file, ca_file
        url = api_url_of_pod()
        if url is None:
            raise ConfigError(
                "discovery=kubernetes: this is not a pod of a cluster (KUBERNETES_SERVICE_HOST is"
                " not set); set kubernetes_api_url"
            )
        return url, SERVICE_ACCOUNT / "token", SERVICE_ACCOUNT / "ca.crt"


def _refusal(status: int) -> UnavailableError:
    return (
        GoneError("the version has expired")
        if status == GONE
        else UnavailableError(f"the Kubernetes API answered with status {status}")
    )


def _unreachable(cause: httpx.HTTPError) -> UnavailableError:
    return UnavailableError(f"the Kubernetes API: {str(cause) or type(cause).__name__}")
