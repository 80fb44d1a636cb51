"""A stream of a port-forward. Importing it imports the slow package `kubernetes`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from kubernetes.stream.stream import _websocket_request
from kubernetes.stream.ws_client import PortForward, create_websocket, get_websocket_url
from websocket import WebSocketException

from lmcache_ctl.kube.access import KubeApi


class Stream(PortForward):  # type: ignore[misc]
    """The package's stream, but its thread ends silently when the connection breaks, and closes
    all.

    Attributes:
        has_ended: Set when its thread has closed everything.
    """

    def __init__(self, websocket: Any, ports: list[int]) -> None:
        self.has_ended = threading.Event()  # the thread that the next line starts sets it
        super().__init__(websocket, ports)

    def _proxy(self) -> None:
        try:
            with contextlib.suppress(OSError, ValueError, RuntimeError, WebSocketException):
                super()._proxy()
        finally:
            for port in self.local_ports.values():
                port.python.close()
            self.websocket.shutdown()
            self.has_ended.set()


def open_stream(cluster: KubeApi, pod: str, port: int) -> Stream:
    """Open a stream to a port of a pod, with a new client, since opening occupies one.

    Raises:
        ApiException: The API refuses.
        OSError: It cannot be reached.
        WebSocketException: It answers something else.
    """
    from kubernetes import client

    def connected(
        configuration: Any,
        method: str,
        url: str,
        query_params: Sequence[tuple[str, str]] = (),
        headers: Mapping[str, str] | None = None,
        **_: Any,
    ) -> Stream:
        address = get_websocket_url(url, query_params)
        return Stream(create_websocket(configuration, address, headers), [port])

    with client.ApiClient(cluster.configuration) as own:
        asked = client.CoreV1Api(own).connect_get_namespaced_pod_portforward
        stream: Stream = _websocket_request(
            connected, {"_preload_content": False}, asked, pod, cluster.namespace, ports=str(port)
        )
    return stream
