"""The other servers of the same tier, from a URL that names them or from the broker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lmcache_core.keys import ChunkKey
from lmcache_core.p2p import BrokerClient, parse_distributed_url
from lmcache_core.record import Chunk
from lmcache_core.security import ClientTls, ShownToken
from lmcache_core.storage.remote import RemoteOptions
from lmcache_core.storage.remote.lm import client_maker, members_of
from lmcache_core.storage.remote.members import Member, Members, ServerAddress

from lmcache_storage.settings import StorageSettings

SEND_TIMEOUT_S: Final = 5.0
STORAGE_KIND: Final = "storage"


@dataclass(frozen=True, slots=True)
class OtherServers:
    """All members of the set except this server.

    Attributes:
        members: The set; opened and closed by its owner.
    """

    members: Members
    instance: str

    def known(self) -> frozenset[str]:
        """Return the names of all other servers, including those that do not answer."""
        return frozenset(self.members.by_name()) - {self.instance}

    def live(self) -> dict[str, Member]:
        """Return the servers that answer, by name."""
        return {
            name: member
            for name, member in self.members.by_name().items()
            if name != self.instance and not member.is_resting
        }

    async def send(
        self, member: Member, chunks: Sequence[Chunk], may_evict: bool
    ) -> dict[ChunkKey, bool]:
        """Send chunks (borrowed); return for each whether that server has it now.

        Raises:
            UnavailableError: It did not answer.
            AuthenticationError: It refuses our token.
            ProtocolError: Its answer is malformed.
        """
        stored = await member.client.hand_over(chunks, may_evict, SEND_TIMEOUT_S)
        return dict(zip((chunk.key for chunk in chunks), stored, strict=True))

    async def held_there(self, member: Member, keys: Sequence[ChunkKey]) -> dict[ChunkKey, bool]:
        """Return for each chunk whether that server confirms that it holds the chunk and keeps it.
        Only these may be dropped here. Raises as `send`.
        """
        by_tenant: dict[str, list[ChunkKey]] = {}
        for key in keys:
            by_tenant.setdefault(key.tenant, []).append(key)
        found = dict.fromkeys(keys, False)
        for tenant, part in by_tenant.items():
            found |= zip(part, await member.client.holds(tenant, part, SEND_TIMEOUT_S), strict=True)
        return found


def create_members(
    settings: StorageSettings, broker: BrokerClient | None, token: ShownToken, tls: ClientTls | None
) -> Members | None:
    """Create the set that this server belongs to, not opened; None if there is no other server.

    Args:
        settings: May name the servers.
        broker: An open client; used if the settings name none.

    Raises:
        ConfigError: `replicas_url` is malformed.
    """
    options = RemoteOptions(token, SEND_TIMEOUT_S, settings.instance_id, tls=tls)
    if settings.replicas_url is not None:
        return members_of(settings.replicas_url, options)
    if broker is None:
        return None

    async def find() -> Sequence[ServerAddress]:
        peers = [
            peer
            for peer in await broker.peers()
            if peer.kind == STORAGE_KIND and peer.id != settings.instance_id
        ]
        urls = [parse_distributed_url(peer.distributed_url) for peer in peers if not peer.draining]
        return [ServerAddress(url.host, url.port, url.host) for url in urls]

    scheme = "lm" if settings.tls_cert_file is None else "lm+tls"
    return Members(find, client_maker(f"{scheme}://", options), "the broker")
