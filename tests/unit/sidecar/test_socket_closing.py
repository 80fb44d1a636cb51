"""The socket closes while engines connect."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from pathlib import Path

import pytest

from tests.fixtures.sidecar import running_socket


@pytest.mark.parametrize("num_turns", range(6))
def test_who_connects_while_it_closes_is_hung_up_on(tmp_path: Path, num_turns: int) -> None:
    """After so many turns of the loop the connection is still in the backlog, accepted, or its
    session about to begin.
    """
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5.0)
        with running_socket(tmp_path) as running:

            async def connect_and_close() -> None:
                client.connect(str(running.path))
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                await running.server.close()

            running.loop.run(connect_and_close(), 5.0)
        gc.collect()  # where something was left open, it is told here
        with contextlib.suppress(ConnectionError):
            assert client.recv(1) == b""
