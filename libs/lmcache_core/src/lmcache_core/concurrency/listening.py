"""How a listener stops."""

from __future__ import annotations

import asyncio
from typing import Final

ACCEPT_TURNS: Final = 4
"""Turns of the event loop after which a connection that it had taken from the backlog is known
to its protocol, or has ended.
"""


async def stop_listening(server: asyncio.Server) -> None:
    """Take no more connections, and know of all that were taken.

    asyncio loses a connection that it is accepting while its server closes: the other side waits at
    a socket that stays open until it is collected. Here accepting stops first, and the server
    closes a few turns of the loop later. The caller has decided before what becomes of
    connections that are still made in between.

    Args:
        server: Of the loop that runs; accepted connections continue. Closed already, nothing is
            done.
    """
    loop = asyncio.get_running_loop()
    for listening in server.sockets:
        loop.remove_reader(listening.fileno())
    await take_turns(ACCEPT_TURNS)
    server.close()


async def take_turns(num_turns: int) -> None:
    """Let the event loop turn so often."""
    for _ in range(num_turns):
        await asyncio.sleep(0)
