"""What the admin routes answer, made of the running parts."""

from __future__ import annotations

import time

from lmcache_servicekit.version import version_of

from lmcache_sidecar.admin import schemas
from lmcache_sidecar.parts import SidecarParts


def status_of(parts: SidecarParts) -> schemas.Status:
    """The sidecar at a glance."""
    clients = [session.describe() for session in parts.socket_server.sessions]
    return schemas.Status(
        instance=parts.instance,
        version=version_of("lmcache-sidecar"),
        uptime_s=round(time.monotonic() - parts.started_at, 3),
        distributed_url=parts.distributed_url,
        generation=f"{parts.arena.generation:016x}",
        arena_bytes=parts.arena.size,
        arena=schemas.ArenaView.model_validate(parts.keeper.status),
        verify_hot=parts.settings.verify_hot,
        accepts_handover=parts.takes_handovers(),
        draining=parts.is_draining,
        drain=schemas.DrainView.model_validate(parts.drain.progress),
        num_clients=len(clients),
        registered=parts.is_registered if parts.has_neighbours else None,
        settled=parts.is_settled,
        pending_bytes=parts.stack.num_pending_bytes,
        reserved_bytes=sum(int(client["reserved_bytes"]) for client in clients),
        held_bytes=sum(int(client["pinned_bytes"]) for client in clients)
        + parts.socket_server.staged_bytes,
        pinned_bytes=parts.pins.num_bytes,
    )


def clients_of(parts: SidecarParts) -> schemas.Clients:
    """Clients of the socket that are connected now."""
    sessions = [session for session in parts.socket_server.sessions if session.hello is not None]
    return schemas.Clients(
        clients=[
            schemas.ClientStatus.model_validate(
                session.describe()
                | {
                    "descriptions": [
                        schemas.Description.model_validate(known) for known in session.descriptions
                    ]
                }
            )
            for session in sessions
        ]
    )
