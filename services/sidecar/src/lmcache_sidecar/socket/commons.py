"""What the sessions of one socket have in common."""

from __future__ import annotations

from lmcache_core.sidecar import messages as m
from lmcache_core.storage.staging import STAGED_SHARE, ChunkBudget

from lmcache_sidecar.socket.names import KeyMemo
from lmcache_sidecar.socket.reservations import KEPT_SHARE, ReservationRoom


class Commons:
    """Made by the server, handed to each session.

    Args:
        tenant: Namespace of this pod's chunks.
        arena_bytes: Size of the arena.

    Attributes:
        names: Keys that were read.
        room: What tickets of all clients may hold together.
        reserved: What reservations of all clients may hold together.
        pinned: What pins of all clients may hold together; a chunk that several pin counts once.
    """

    def __init__(self, tenant: str, arena_bytes: int) -> None:
        self.names = KeyMemo(tenant)
        self.room = ChunkBudget(arena_bytes // STAGED_SHARE)
        self.reserved = ReservationRoom(arena_bytes)
        self.pinned = ChunkBudget(arena_bytes - arena_bytes // KEPT_SHARE)
        self._greeted: list[m.Hello] = []

    def greet(self, hello: m.Hello) -> str | None:
        """A client says who it is; `leave` follows.

        Two layouts of one model in one engine (clients of one name) would be a mistake somewhere:
        its processes must agree on what a chunk holds. Engines with different layouts never share,
        since the layout is part of every chunk's name. A client that names no layout is not
        compared.

        Returns:
            Why it cannot be let in, None when it is in.
        """
        for other in self._greeted:
            is_same_kv = (other.client, other.model, other.world_size) == (
                hello.client,
                hello.model,
                hello.world_size,
            )
            if is_same_kv and hello.layout and other.layout and hello.layout != other.layout:
                return (
                    f"client {hello.client!r}, model {hello.model!r}: layout {hello.layout!r}, but"
                    f" the client with pid {other.pid} has connected with layout {other.layout!r};"
                    " the processes of one engine must agree"
                )
        self._greeted.append(hello)
        return None

    def leave(self, hello: m.Hello) -> None:
        """A client that was let in is gone."""
        at = next(i for i, other in enumerate(self._greeted) if other is hello)
        del self._greeted[at]
