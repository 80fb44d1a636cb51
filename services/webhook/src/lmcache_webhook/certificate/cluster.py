"""Where the certificate is kept, and who is told whom to trust: a Secret, and the webhook's
configuration in the API server.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
from collections.abc import Callable
from typing import Any, Final

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from lmcache_core.errors import ConfigError, UnavailableError
from urllib3.exceptions import HTTPError

from lmcache_webhook.certificate.authority import Material

CALL_TIMEOUT_S: Final = 10
PARTS: Final = ("ca.crt", "ca.key", "tls.crt", "tls.key")
"""Names in the Secret of the parts of a `Material`, in its order."""
LABELS: Final = {
    "app.kubernetes.io/managed-by": "lmcache-webhook",
    "app.kubernetes.io/part-of": "lmcache",
}
_NOT_FOUND: Final = 404
_CONFLICT: Final = 409


class LostRaceError(UnavailableError):
    """The Secret was written concurrently: read it again."""


class CertificateStore:
    """A Secret and a MutatingWebhookConfiguration of the cluster that this pod runs in.

    Args:
        namespace: Of the Secret.
        secret: Its name.
        configuration: Name of the webhook's configuration.
        api_url: Instead of the API that this pod's cluster has.

    Raises:
        ConfigError: No address was given, and this is no pod of a cluster.
    """

    def __init__(
        self, namespace: str, secret: str, configuration: str, api_url: str | None = None
    ) -> None:
        options = client.Configuration()
        if api_url is None:
            try:
                config.load_incluster_config(options)
            except config.ConfigException as exc:
                raise ConfigError(f"this is no pod of a cluster ({exc}); set --api-url") from exc
        else:
            options.host = api_url
        options.retries = 0  # the Job that runs this is tried again
        api = client.ApiClient(options)
        self._core = client.CoreV1Api(api)
        self._admission = client.AdmissionregistrationV1Api(api)
        self._namespace = namespace
        self._secret = secret
        self._configuration = configuration

    def read(self) -> tuple[Material | None, str]:
        """Return the certificate and its version; a Secret that lacks a part is none.

        Raises:
            UnavailableError: The API server does not let us, or cannot be reached.
        """
        found = _call(self._core.read_namespaced_secret, self._secret, self._namespace)
        if found is None:
            return None, ""
        data = found.data or {}
        try:
            material = Material(*(base64.b64decode(data[name]) for name in PARTS))
        except (KeyError, binascii.Error):
            return None, found.metadata.resource_version
        return material, found.metadata.resource_version

    def write(self, material: Material, version: str) -> None:
        """Keep another certificate in the place of that version, of none where it is empty.

        Raises:
            LostRaceError: The Secret has another version now.
            UnavailableError: As `read`.
        """
        parts = zip(PARTS, dataclasses.astuple(material), strict=True)
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": self._secret, "namespace": self._namespace, "labels": LABELS},
            "type": "Opaque",
            "data": {name: base64.b64encode(data).decode() for name, data in parts},
        }
        if version:
            body["metadata"]["resourceVersion"] = version  # type: ignore[index]
            written = _call(
                self._core.replace_namespaced_secret, self._secret, self._namespace, body
            )
        else:
            written = _call(self._core.create_namespaced_secret, self._namespace, body)
        if written is None:
            raise LostRaceError("the Secret, or its namespace, has been removed in the meantime")

    def trust(self, authorities: bytes) -> int | None:
        """Tell the API server whom to trust.

        Returns:
            How many webhooks were told; None where there is no configuration yet.

        Raises:
            UnavailableError: As `read`.
        """
        found = _call(self._admission.read_mutating_webhook_configuration, self._configuration)
        if found is None:
            return None
        bundle = base64.b64encode(authorities).decode()
        operations: list[dict[str, Any]] = []
        for index, webhook in enumerate(found.webhooks or []):
            if webhook.client_config.ca_bundle == bundle:
                continue
            # The name is tested: between reading and writing one may have been added or
            # removed.
            operations.append(
                {"op": "test", "path": f"/webhooks/{index}/name", "value": webhook.name}
            )
            operations.append(
                {"op": "add", "path": f"/webhooks/{index}/clientConfig/caBundle", "value": bundle}
            )
        if operations:
            _call(
                self._admission.patch_mutating_webhook_configuration,
                self._configuration,
                operations,
            )
        return len(operations) // 2


def _call(method: Callable[..., Any], *arguments: Any) -> Any:
    """One call of the API; None where there is no such object."""
    try:
        return method(*arguments, _request_timeout=CALL_TIMEOUT_S)
    except ApiException as exc:
        if exc.status == _NOT_FOUND:
            return None
        if exc.status == _CONFLICT:
            raise LostRaceError("the Secret has changed in the meantime") from exc
        raise UnavailableError(
            f"the API server answers {exc.status} {exc.reason} to {method.__name__}"
        ) from exc
    except HTTPError as exc:
        raise UnavailableError(f"the API server cannot be reached: {type(exc).__name__}") from exc
