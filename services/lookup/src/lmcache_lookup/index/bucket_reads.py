"""The commands of a lookup: one `HMGET` for each bucket asked, of hundreds of chunk ids, which
are joined and not looked at one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lmcache_core.keys import CHUNK_ID_BYTES

from lmcache_lookup.index.packing import NUM_BUCKETS, bucket_key
from lmcache_lookup.index.redis_node import Command

MAX_TENANTS_KEPT: Final = 256

_BEFORE_ID: Final = b"\r\n$%d\r\n" % CHUNK_ID_BYTES


class BucketReads:
    """Keeps what the commands of a tenant have in common: their keys, and their bytes between
    the number of words and the first id.
    """

    def __init__(self) -> None:
        self._kept: dict[str, list[tuple[str, bytes]]] = {}

    def of(self, tenant: str, buckets: Sequence[Sequence[bytes]]) -> list[Command]:
        """The commands, in the order of the buckets.

        Args:
            tenant: Whose buckets.
            buckets: Ids of 16 bytes for each bucket; one without any is not asked.
        """
        kept = self._kept.get(tenant) or self._keep(tenant)
        return [
            Command(
                key, (), None, b"*%d%b%b\r\n" % (len(inside) + 2, head, _BEFORE_ID.join(inside))
            )
            for (key, head), inside in zip(kept, buckets, strict=True)
            if inside
        ]

    def _keep(self, tenant: str) -> list[tuple[str, bytes]]:
        if len(self._kept) >= MAX_TENANTS_KEPT:
            self._kept.clear()
        keys = [bucket_key(tenant, bucket) for bucket in range(NUM_BUCKETS)]
        self._kept[tenant] = kept = [
            (key, b"\r\n$5\r\nHMGET\r\n$%d\r\n%b%b" % (len(key), key.encode("ascii"), _BEFORE_ID))
            for key in keys
        ]
        return kept
