"""Finds the other servers: by a URL that names them, or by the broker."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.p2p import BrokerClient, parse_distributed_url
from lmcache_core.security import ClientTls, ShownToken
from lmcache_core.storage.remote import RemoteOptions
from lmcache_core.storage.remote.lm import client_maker, members_of
from lmcache_core.storage.remote.members import Address, Members

from lmcache_storage.handover.mover import SEND_TIMEOUT_S
from lmcache_storage.settings import StorageSettings

STORAGE_KIND = "storage"


def create_members(
    settings: StorageSettings, broker: BrokerClient | None, token: ShownToken, tls: ClientTls | None
) -> Members | None:
    """The set that this server belongs to, not opened; None where it has no neighbours.

    Args:
        settings: Name the servers, or nobody.
        broker: Open; asked where the settings name none.
        token: What they are shown.
        tls: Whom to trust, where connections are encrypted.

    Raises:
        ConfigError: `replicas_url` is no such URL.
    """
    options = RemoteOptions(token, SEND_TIMEOUT_S, settings.instance_id, tls=tls)
    if settings.replicas_url is not None:
        return members_of(settings.replicas_url, options, hands_over=True)
    if broker is None:
        return None

    async def find() -> Sequence[Address]:
        peers = [
            peer
            for peer in await broker.peers()
            if peer.kind == STORAGE_KIND and peer.id != settings.instance_id
        ]
        urls = [parse_distributed_url(peer.distributed_url) for peer in peers if not peer.draining]
        return [Address(url.host, url.port, url.host) for url in urls]

    scheme = "lm" if settings.tls_cert_file is None else "lm+tls"
    return Members(find, client_maker(f"{scheme}://", options, hands_over=True), "the broker")
