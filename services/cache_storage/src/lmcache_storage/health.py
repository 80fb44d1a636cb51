"""What `/readyz` asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_core.errors import UnavailableError
from lmcache_core.storage import DiskBackend
from lmcache_servicekit.health import HealthRegistry

from lmcache_storage.problems import DrainingError

if TYPE_CHECKING:
    from lmcache_storage.s3.backend import S3Backend
    from lmcache_storage.storage import StorageNode


def add_health_checks(storage: StorageNode) -> None:
    """Register the checks. Without disk, bucket, lookup or broker the storage still serves from
    memory: they only degrade it.
    """
    health = storage.state.health

    async def stores() -> str:
        if not storage.takes_chunks():
            raise DrainingError("draining")
        return "new chunks are taken"

    async def arena() -> str:
        figures = storage.stack.hot.stats()
        return f"{figures['used_bytes']} of {figures['capacity_bytes']} bytes used"

    async def lookup() -> str:
        if storage.reporter is None or not storage.reporter.registered:
            raise UnavailableError("not registered at lookup; others cannot find what is held here")
        return "registered"

    async def broker() -> str:
        if storage.registration is None or not storage.registration.registered:
            raise UnavailableError("not registered at the broker; others are not sent here")
        return "registered"

    health.add("stores", stores)
    health.add("arena", arena)
    for tier in storage.local_tiers:
        if isinstance(tier, DiskBackend):
            _add_disk_check(health, tier)
    if storage.bucket is not None:
        _add_bucket_check(health, storage.bucket)
    if storage.reporter is not None:
        health.add("lookup", lookup, required=False)
    if storage.registration is not None:
        health.add("broker", broker, required=False)


def _add_disk_check(health: HealthRegistry, disk: DiskBackend) -> None:
    async def takes_writes() -> str:
        figures = disk.stats()
        if figures["is_failing"]:
            raise UnavailableError(
                "the disk does not take writes; new chunks are kept in memory only"
            )
        return (
            "its directory is being read"
            if figures["is_loading"]
            else f"{figures['num_chunks']} chunks"
        )

    health.add("disk", takes_writes, required=False)


def _add_bucket_check(health: HealthRegistry, bucket: S3Backend) -> None:
    async def answers() -> str:
        await bucket.probe()
        if bucket.refuses_writes:
            raise UnavailableError(
                "the bucket does not take writes; new chunks are kept in memory and on disk only"
            )
        return "answers"

    health.add("s3", answers, required=False, where=bucket.where)
