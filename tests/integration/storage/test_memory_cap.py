"""The memory of cache_storage is bounded, whatever is sent at once: 64 writers with 32 MiB each,
at both doors.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from lmcache_core.record import encode_head, payload_digest, raw_header
from lmcache_core.storage.hot import RECEIVING_SHARE
from lmcache_core.wire.frames import HEADER_BYTES, parse_header
from lmcache_core.wire.messages import Hello, Message, Put, PutOk, build_frame, parse_meta

from tests.fixtures.service_process import ServiceProcess
from tests.fixtures.storage_process import running_storage
from tests.suites.chunks import make_key

NUM_WRITERS = 64
PAYLOAD_BYTES = 32 << 20
MEMORY_BYTES = 256 << 20
MAX_EXTRA_BYTES = 64 << 20
"""What all connections and bodies underway may take outside the arena: 1 MiB each."""
SOCKET_TIMEOUT_S = 120

PAYLOAD = bytes(PAYLOAD_BYTES)


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def head_of(name: object, digest: bytes) -> bytes:
    return encode_head(
        raw_header(make_key(name).key, (PAYLOAD_BYTES,), "uint8", digest), PAYLOAD_BYTES
    )


def exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        piece = connection.recv(num_bytes - len(data))
        assert piece, "the server hung up"
        data += piece
    return bytes(data)


def answer(connection: socket.socket) -> Message:
    header = parse_header(exactly(connection, HEADER_BYTES))
    return parse_meta(header.type, exactly(connection, header.meta_bytes))


def put_by_lm(service: ServiceProcess, name: object, digest: bytes) -> bool:
    """Whether the store took it."""
    with socket.create_connection(
        ("127.0.0.1", service.ports["lm_port"]), SOCKET_TIMEOUT_S
    ) as connection:
        connection.sendall(build_frame(1, Hello(1, 1, [], None, "test")))
        answer(connection)
        head = head_of(name, digest)
        connection.sendall(build_frame(2, Put(), len(head) + PAYLOAD_BYTES) + head)
        connection.sendall(PAYLOAD)
        put_ok = answer(connection)
        assert isinstance(put_ok, PutOk)
        assert put_ok.stored or put_ok.reason == "no_memory"
        return put_ok.stored


def put_by_rest(service: ServiceProcess, name: object, digest: bytes) -> bool:
    """The same."""
    head = head_of(name, digest)
    with socket.create_connection(
        ("127.0.0.1", service.ports["port"]), SOCKET_TIMEOUT_S
    ) as connection:
        request = (
            f"PUT /v1/chunks/{make_key(name).key.to_url()} HTTP/1.1\r\nHost:"
            f" storage\r\nContent-Length: {len(head) + PAYLOAD_BYTES}"
        )
        connection.sendall(request.encode() + b"\r\n\r\n" + head)
        connection.sendall(PAYLOAD)
        status = int(connection.recv(1 << 16).split()[1])
        assert status in (201, 507)
        return status == 201


@pytest.mark.parametrize("put", [put_by_lm, put_by_rest])
def test_the_cap_holds_under_64_writers_of_32_mib(
    tmp_path: Path, put: Callable[[ServiceProcess, object, bytes], bool]
) -> None:
    digest = payload_digest(PAYLOAD)
    with running_storage(tmp_path, memory_gb=MEMORY_BYTES / (1 << 30)) as service:
        at_start = peak_bytes(service.pid)
        assert at_start > MEMORY_BYTES
        with ThreadPoolExecutor(NUM_WRITERS) as writers:
            stored = list(writers.map(lambda i: put(service, i, digest), range(NUM_WRITERS)))
        assert sum(stored) >= MEMORY_BYTES // RECEIVING_SHARE // PAYLOAD_BYTES, (
            "as many as one tenant may have on their way in at once"
        )
        grown = peak_bytes(service.pid) - at_start
        assert grown < MAX_EXTRA_BYTES, f"{grown >> 20} MiB outside the arena"
        stats = httpx.get(f"{service.url}/v1/stats", trust_env=False).json()
        hot = stats["tiers"]["memory"]
        assert hot["arena_used_bytes"] == hot["used_bytes"] <= MEMORY_BYTES, (
            "nothing of what was refused is left"
        )
        assert put(service, "one more", digest), "it still takes chunks"
