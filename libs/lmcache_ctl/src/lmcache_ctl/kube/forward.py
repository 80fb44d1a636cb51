"""Forward a socket of this machine to a port of a pod, through the Kubernetes API; one stream for
each connection.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from lmcache_ctl.kube.access import PORT_FORWARD, KubeApi
from lmcache_ctl.options import CtlSettings

MAX_STREAMS: Final = 16
JOIN_S: Final = 2.0
POLL_S: Final = 0.1
READ_BYTES: Final = 1 << 16
END_S: Final = 1.0
"""For the API to close a stream."""
LOOPBACK: Final = "127.0.0.1"


class PodPort:
    """Forwards connections while entered; answers 502 with the reason if that fails.

    Args:
        port: The port in it; that may be on its loopback.
        path: Of the Unix socket; None for a TCP port on loopback, which every user of this machine
            may connect to.
    """

    def __init__(self, cluster: KubeApi, pod: str, port: int, path: Path | None) -> None:
        self._cluster = cluster
        self._pod = pod
        self._port = port
        self._path = path
        self._listener = socket.socket(
            socket.AF_INET if path is None else socket.AF_UNIX, socket.SOCK_STREAM
        )
        self._is_over = threading.Event()
        self._room = threading.BoundedSemaphore(MAX_STREAMS)
        self._threads: list[threading.Thread] = []
        self._opening: set[threading.Thread] = set()

    def __enter__(self) -> Self:
        self._listener.bind((LOOPBACK, 0) if self._path is None else str(self._path))
        self._listener.listen(MAX_STREAMS)
        self._listener.settimeout(POLL_S)
        self._start(self._accept)
        return self

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, without a path."""
        host, port = self._listener.getsockname()
        return str(host), int(port)

    def __exit__(self, *_: object) -> None:
        """End the streams; one that the API has not answered ends with the process."""
        self._is_over.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        for thread in self._threads:
            if thread not in self._opening:
                thread.join(JOIN_S)
        self._listener.close()

    def _start(self, work: Any, *args: Any) -> None:
        thread = threading.Thread(target=work, args=args, name=f"forward {self._pod}", daemon=True)
        self._threads = [one for one in self._threads if one.is_alive()] + [thread]
        thread.start()

    def _accept(self) -> None:
        while not self._is_over.is_set():
            try:
                near, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            if self._room.acquire(blocking=False):
                self._start(self._serve, near)
            else:
                near.close()

    def _serve(self, near: socket.socket) -> None:
        from kubernetes.client.exceptions import ApiException
        from websocket import WebSocketException

        from lmcache_ctl.kube.stream import open_stream

        try:
            with near:
                self._opening.add(threading.current_thread())
                try:
                    forward = open_stream(self._cluster, self._pod, self._port)
                except (ApiException, OSError, WebSocketException) as exc:
                    _refuse(near, self._cluster.refusal(PORT_FORWARD, _status(exc), _reason(exc)))
                    return
                finally:
                    self._opening.discard(threading.current_thread())
                far = forward.socket(self._port)
                try:
                    num_back = self._pump(near, far)
                finally:
                    forward.close()  # its thread notices, and closes the stream
                    forward.has_ended.wait(END_S)
                if not num_back and not self._is_over.is_set():
                    _refuse(near, self._silence(forward.error(self._port)))
        finally:
            self._room.release()

    def _silence(self, error: str | None) -> str:
        """Return the reason for an empty answer."""
        pod = f"pod {self._pod} in {self._cluster.place}"
        if error:
            return (
                f"nothing listens at port {self._port} of {pod} ({error}): is it another release"
                f" that you mean? {self._cluster.how_to_look_elsewhere}"
            )
        return (
            f"the connection to port {self._port} of {pod} was closed before an answer: try again;"
            " perhaps it wants https (--tls)"
        )

    def _pump(self, near: socket.socket, far: Any) -> int:
        """Copy both ways until one side ends; return the bytes that came back."""
        num_back = 0
        while not self._is_over.is_set():
            readable, _, _ = select.select([near, far], [], [], POLL_S)
            for side in readable:
                try:
                    data = side.recv(READ_BYTES)
                    (far if side is near else near).sendall(data)
                except OSError:
                    return num_back
                if not data:
                    return num_back
                num_back += len(data) if side is far else 0
        return num_back


@contextlib.contextmanager
def forwarded(settings: CtlSettings, pod: str, port: int) -> Iterator[str]:
    """Yield `host:port` on loopback of this machine that leads to a port of a pod."""
    with KubeApi(settings) as api, PodPort(api, pod, port, None) as way:
        host, own_port = way.address
        yield f"{host}:{own_port}"


def _refuse(near: socket.socket, why: str) -> None:
    body = msgspec.json.encode(
        {"type": "about:blank", "title": "Bad Gateway", "status": 502, "detail": why}
    )
    head = (
        "HTTP/1.1 502 Bad Gateway\r\ncontent-type: application/problem+json\r\ncontent-length:"
        f" {len(body)}\r\nconnection: close\r\n\r\n"
    )
    try:
        near.sendall(head.encode() + body)
    except OSError:  # the client has gone
        return


def _status(exc: Exception) -> int | None:
    """Return the status, also of an answer that is not a WebSocket's."""
    return getattr(exc, "status", None) or getattr(exc, "status_code", None)


def _reason(exc: Exception) -> str:
    return str(getattr(exc, "reason", None) or exc).splitlines()[0]
