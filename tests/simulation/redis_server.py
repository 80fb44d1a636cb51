"""A Redis for simulated processes: fakeredis, which runs our scripts in Lua, on a simulated socket."""

from __future__ import annotations

import asyncio
from typing import Any

from fakeredis import FakeServer
from fakeredis._clients._sync import FakeRedisConnection
from fakeredis._clients._tcp_server import encode_reply


class _Connection(asyncio.Protocol):
    def __init__(self, server: FakeServer) -> None:
        self._redis: Any = FakeRedisConnection(server=server, protocol=2)
        self._transport: Any = None
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        socket = self._redis.get_socket()
        socket.sendall(data)
        while self._redis.can_read():
            try:
                answer = self._redis.read_response()
            except Exception as exc:  # noqa: BLE001 - whatever it is goes to the client
                answer = exc
            self._transport.write(encode_reply(answer, socket._client_info.protocol_version))

    def connection_lost(self, exc: Exception | None) -> None:
        self._redis.disconnect()


class RedisServer:
    """What Redis keeps outlives its process: a restart finds it, as with a synced append-only file.

    `flush` forgets it, as a restart without a file does.
    """

    def __init__(self) -> None:
        self.server = FakeServer(version=(7, 0))

    def flush(self) -> None:
        """Forget everything."""
        self.server.dbs.clear()

    def main(self) -> int:
        """Serve port 6379 until the process ends."""
        asyncio.run(self._serve())
        return 0

    async def _serve(self) -> None:
        listening = await asyncio.get_running_loop().create_server(
            lambda: _Connection(self.server), "0.0.0.0", 6379
        )
        await listening.serve_forever()
