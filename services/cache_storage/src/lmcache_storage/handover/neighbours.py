"""The other servers of the same tier."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.keys import ChunkKey
from lmcache_core.record import Chunk
from lmcache_core.storage.remote.members import Member, Members


class Neighbours:
    """Everybody in the set but this server itself.

    Args:
        members: The set; opened and closed by its owner.
        instance: What this server calls itself.
        tenant: Of the token that is shown: its chunks can be sent also to those that take no
            handovers.
    """

    def __init__(self, members: Members, instance: str, tenant: str) -> None:
        self._members = members
        self._tenant = tenant
        self.instance = instance

    def known(self) -> frozenset[str]:
        """Names of all others, also of those that are away."""
        return frozenset(self._members.by_name()) - {self.instance}

    def live(self) -> dict[str, Member]:
        """Those that answer."""
        return {
            name: member
            for name, member in self._members.by_name().items()
            if name != self.instance and not member.is_resting
        }

    async def refresh(self) -> None:
        """Look who is there now."""
        await self._members.refresh()

    async def send(
        self, member: Member, chunks: Sequence[Chunk], may_evict: bool, timeout_s: float
    ) -> dict[ChunkKey, bool]:
        """Send chunks (borrowed); for each whether that server has it now.

        Raises:
            UnavailableError: It did not answer.
            AuthenticationError: It refuses us.
            ProtocolError: What it said is none.
        """
        client = member.client
        if client.takes_handovers:
            able, stored = list(chunks), await client.hand_over(chunks, may_evict, timeout_s)
        else:
            able = [chunk for chunk in chunks if chunk.key.tenant == self._tenant]
            stored = await client.put(able, timeout_s) if able else []
        return {chunk.key: False for chunk in chunks} | {
            chunk.key: is_there for chunk, is_there in zip(able, stored, strict=True)
        }

    async def still_there(
        self, member: Member, keys: Sequence[ChunkKey], timeout_s: float
    ) -> list[ChunkKey]:
        """Those that it says it holds, to stay: only these may be forgotten here. Raises as
        `send`.
        """
        return [
            key
            for key, is_there in (await self._asked(member, keys, timeout_s)).items()
            if is_there
        ]

    async def missing_there(
        self, member: Member, keys: Sequence[ChunkKey], timeout_s: float
    ) -> list[ChunkKey]:
        """Those that need to be sent: it does not say that it holds them. Raises as `send`."""
        present = await self._asked(member, keys, timeout_s)
        return [key for key in keys if not present[key]]

    async def _asked(
        self, member: Member, keys: Sequence[ChunkKey], timeout_s: float
    ) -> dict[ChunkKey, bool]:
        """Which it says it holds. A server of an earlier version, or one that does not let us speak
        for other tenants, says nothing of their chunks: these do not count as held.
        """
        by_tenant: dict[str, list[ChunkKey]] = {}
        for key in keys:
            by_tenant.setdefault(key.tenant, []).append(key)
        found = dict.fromkeys(keys, False)
        client = member.client
        if not client.is_connected:
            await client.ping(timeout_s)  # whether it can be asked is known once it is connected
        for tenant, part in by_tenant.items():
            if client.answers_held:
                found |= zip(part, await client.holds(tenant, part, timeout_s), strict=True)
            elif tenant == self._tenant:
                found |= zip(part, await client.contains(part, timeout_s), strict=True)
        return found
