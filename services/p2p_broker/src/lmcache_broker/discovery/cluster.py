"""The part of the Kubernetes API that the broker uses: the EndpointSlices of one service, and one
annotation of pods.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from lmcache_core.errors import ConfigError, UnavailableError

from lmcache_broker.settings import DiscoverySettings

WATCH_SECONDS: Final = 240
PATCH_TIMEOUT_S: Final = 5.0
GONE: Final = 410
_MERGE: Final = "application/merge-patch+json"


class GoneError(UnavailableError):
    """The version from which a watch was to continue has expired."""


class ClusterApi:
    """Client of the Kubernetes API. The constructor does not connect.

    Args:
        settings: Address of the API, and the service whose endpoints are peers.
        namespace: Namespace of the service and its pods.

    Attributes:
        settings: See above.
    """

    def __init__(self, settings: DiscoverySettings, namespace: str) -> None:
        self.settings = settings
        self._namespace = namespace
        self._client: Any = None
        self._slices: Any = None
        self._pods: Any = None

    async def open(self) -> None:
        """Create the client.

        Raises:
            ConfigError: No address is set and this is not a pod of a cluster, or a file cannot be
                read.
        """
        from kubernetes.aio import client, config

        configuration = client.Configuration()
        if self.settings.kubernetes_api_url is None:
            try:
                config.load_incluster_config(configuration)
            except config.ConfigException as exc:
                raise ConfigError(
                    f"discovery=kubernetes: this is not a pod of a cluster ({exc}); set"
                    " kubernetes_api_url"
                ) from exc
        else:
            configuration.host = self.settings.kubernetes_api_url
            ca_file = self.settings.kubernetes_ca_file
            configuration.ssl_ca_cert = None if ca_file is None else str(ca_file)
        self._client = client.ApiClient(configuration)
        self._slices = client.DiscoveryV1Api(self._client)
        self._pods = client.CoreV1Api(self._client)

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def list_slices(self, **how: Any) -> Any:
        """Return the unread response to a list or watch of the service's slices; the caller closes
        it.

        Raises:
            GoneError: A watch was to continue from a version that has expired.
            UnavailableError: The API refused.
        """
        from kubernetes.aio.client.exceptions import ApiException

        await self._authorise()
        selector = f"kubernetes.io/service-name={self.settings.kubernetes_service}"
        try:
            response = await self._slices.list_namespaced_endpoint_slice_without_preload_content(
                self._namespace, label_selector=selector, _request_timeout=WATCH_SECONDS * 2, **how
            )
        except ApiException as exc:
            raise _refusal(exc.status) from exc
        if response.status != 200:
            response.close()
            raise _refusal(response.status)
        return response

    async def annotate_pod(self, name: str, annotation: str, value: str) -> bool:
        """Set an annotation of a pod in the namespace.

        Returns:
            Whether there is such a pod.

        Raises:
            UnavailableError: The API refused.
            OSError: It cannot be reached; `TimeoutError` after `PATCH_TIMEOUT_S`.
        """
        from aiohttp import ClientError
        from kubernetes.aio.client.exceptions import ApiException

        await self._authorise()
        body = {"metadata": {"annotations": {annotation: value}}}
        try:
            async with asyncio.timeout(PATCH_TIMEOUT_S):
                response = await self._pods.patch_namespaced_pod_without_preload_content(
                    name, self._namespace, body, _content_type=_MERGE
                )
        except ApiException as exc:
            raise _refusal(exc.status) from exc
        except ClientError as exc:
            raise UnavailableError(f"the Kubernetes API: {type(exc).__name__}") from exc
        status = response.status
        response.close()
        if status not in (200, 404):
            raise _refusal(status)
        return bool(status == 200)

    async def _authorise(self) -> None:
        """Re-read the token, which is replaced while this process runs."""
        if self.settings.kubernetes_token_file is not None:
            token = await asyncio.to_thread(self.settings.kubernetes_token_file.read_text, "utf-8")
            self._client.configuration.api_key["BearerToken"] = f"Bearer {token.strip()}"


def _refusal(status: object) -> UnavailableError:
    return (
        GoneError("the version has expired")
        if status == GONE
        else UnavailableError(f"the Kubernetes API answered with status {status}")
    )
