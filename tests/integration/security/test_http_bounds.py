"""What one caller without credentials can make a REST port do: raw connections to a real
process.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterator

import httpx
import pytest
from lmcache_core.security.handshakes import MAX_HANDSHAKES
from lmcache_servicekit.http_protocol import MAX_HEAD_BYTES

from tests.fixtures.guarded_services import Guarded
from tests.fixtures.service_process import ServiceProcess, running_service
from tests.fixtures.waiting import wait_until

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with running_service(
        "tests.fixtures.impatient_broker",
        tmp_path_factory.mktemp("broker"),
        {"LMCACHE_BROKER_PORT": "0"},
    ) as service:
        yield service


@pytest.fixture
def connection(broker: ServiceProcess) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", broker.ports["port"]), timeout=TIMEOUT_S) as made:
        yield made
    assert httpx.get(f"{broker.url}/healthz", trust_env=False).status_code == 200, (
        "others are served as before"
    )


def answer_of(connection: socket.socket) -> bytes:
    """All that comes until the other side ends the connection."""
    data = bytearray()
    try:
        while part := connection.recv(65536):
            data += part
    except ConnectionError:
        pass
    return bytes(data)


def is_sent(connection: socket.socket, *parts: bytes) -> bool:
    """Whether the other side takes all of it."""
    try:
        for part in parts:
            connection.sendall(part)
    except (ConnectionError, TimeoutError):
        return False
    return True


@pytest.mark.parametrize(
    "part", [b"x: " + b"y" * 8000 + b"\r\n", b"y" * 8000], ids=["many headers", "one header"]
)
def test_endless_headers_end_the_connection(connection: socket.socket, part: bytes) -> None:
    connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\nx: ")
    assert not is_sent(connection, *[part] * 10_000)


def test_too_many_headers_are_answered_by_431(connection: socket.socket) -> None:
    connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n")
    for _ in range(
        6 * MAX_HEAD_BYTES // 8000
    ):  # what comes with the first byte of the request is not counted
        connection.sendall(b"x: " + b"y" * 8000 + b"\r\n")
        if select.select([connection], [], [], 0.01)[0]:
            break
    assert answer_of(connection).startswith(b"HTTP/1.1 431 ")


def test_endless_trailers_end_the_connection(connection: socket.socket) -> None:
    connection.sendall(
        b"POST /v1/transfers HTTP/1.1\r\nhost: x\r\ntransfer-encoding:"
        b" chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    )
    assert not is_sent(connection, *[b"x: " + b"y" * 8000 + b"\r\n"] * 10_000)


def test_connections_without_a_whole_request_are_closed(broker: ServiceProcess) -> None:
    """Neither before the first request nor after it."""
    head = b"GET /healthz HTTP/1.1\r\nhost: x\r\n"
    parts = [b"", b"GET /he", head, head + b"\r\n" + head[:20]]
    connections = [
        socket.create_connection(("127.0.0.1", broker.ports["port"]), timeout=TIMEOUT_S)
        for _ in parts
    ]
    for connection, part in zip(connections, parts, strict=True):
        connection.sendall(part)
    assert [answer_of(connection).count(b"HTTP/1.1 200 ") for connection in connections] == [
        0,
        0,
        0,
        1,
    ]
    for connection in connections:
        connection.close()


def test_a_missing_body_is_answered_by_408(connection: socket.socket) -> None:
    connection.sendall(
        b"POST /v1/transfers HTTP/1.1\r\nhost: x\r\ncontent-type:"
        b" application/json\r\ncontent-length: 1000\r\n\r\n" + b'{"requester'
    )
    assert b"HTTP/1.1 408 " in answer_of(connection)


def test_many_small_pieces_of_a_body_are_fine(connection: socket.socket) -> None:
    body = b'{"requester": "a", "chunks": []' + b" " * 3000 + b"}"
    connection.sendall(
        b"POST /v1/transfers HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type:"
        b" application/json\r\n"
    )
    connection.sendall(
        b"transfer-encoding: chunked\r\n\r\n"
        + b"".join(b"1\r\n%c\r\n" % byte for byte in body)
        + b"0\r\n\r\n"
    )
    assert answer_of(connection).startswith(b"HTTP/1.1 200 ")


def test_tls_handshakes_above_the_bound_end_at_once(guarded: Guarded) -> None:
    """Silent connections keep others out only while they last, and from one listener alone."""
    address = ("127.0.0.1", guarded.services["storage"].ports["port"])
    with contextlib.ExitStack() as open_ones:
        for _ in range(MAX_HANDSHAKES + 8):
            last = open_ones.enter_context(socket.create_connection(address, timeout=TIMEOUT_S))
        with contextlib.suppress(ConnectionResetError):
            assert last.recv(1) == b""
        lm = ("127.0.0.1", guarded.services["storage"].ports["lm_port"])
        with guarded.tls.context.wrap_socket(
            socket.create_connection(lm, timeout=TIMEOUT_S), server_hostname="127.0.0.1"
        ) as other:
            assert other.version() == "TLSv1.3"
    wait_until(lambda: is_served(guarded))


def is_served(guarded: Guarded) -> bool:
    try:
        with guarded.rest("storage") as client:
            return client.get("/healthz").status_code == 200
    except httpx.TransportError:
        return False


def test_pipelined_requests_are_each_counted_for_themselves(connection: socket.socket) -> None:
    one = b"GET /healthz HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 20_000 + b"\r\n\r\n"
    connection.sendall(one * 30 + b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert answer_of(connection).count(b"HTTP/1.1 200 ") == 31


def test_garbage_is_logged_once(broker: ServiceProcess) -> None:
    before = broker.output.count("Invalid HTTP request")
    for _ in range(20):
        with socket.create_connection(
            ("127.0.0.1", broker.ports["port"]), timeout=TIMEOUT_S
        ) as made:
            made.sendall(b"garbage\r\n" * 100)
            answer_of(made)
    assert (before, broker.output.count("Invalid HTTP request")) in ((0, 1), (1, 1))
